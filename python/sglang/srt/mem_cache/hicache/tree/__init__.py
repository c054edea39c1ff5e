"""The radix tree of two tiers, in parts: `parts` puts them together.

Structure (`radix_tree`), sums, locks and orders (`accounting`, `leaf_heap`, `host_copies`), the way down
(`backups`, `device_room`, `host_room`), the way up (`load_backs`), and copies until they are settled (`acks`,
`in_flight`).
"""
