"""The radix tree of two tiers, in parts: `parts` puts them together.

Structure (`radix_tree`), sums, locks and orders (`accounting`, `eviction_order`, `host_copies`), the way down
(`backups`, `device_room`, `host_room`), the way up (`load_backs`), and copies until they are settled (`transfers`,
`in_flight`).
"""
