"""A digest of everything that must be equal on all ranks: the tree, its orders, the ledger and the lanes."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..radix_cache import HiRadixCache


def tree_digest(cache: HiRadixCache[Any]) -> int:
    """63-bit digest of the mirrored state; local host pages and device rows are left out.

    Covers each node's key, slots, tier, locks, hits, priority and times, the metadata's pages per rank, the
    transfers under way, the free host pages and free slots of every lane. O(tokens in the tree).
    """
    digest = hashlib.blake2b(digest_size=8)
    for node in cache.nodes():
        metadata = node.metadata
        state = (
            node.parent.id if node.parent is not None else 0,
            node.id,
            node.key.extra_key,
            node.key.cache_salt,
            len(node.key),
            node.value is not None,
            None if metadata is None else (metadata.logical_len, metadata.pages_per_lane),
            node.lock_ref,
            node.host_ref_counter,
            node.hit_count,
            node.priority,
            node.last_access_time,
            node.creation_time,
        )
        digest.update(repr(state).encode())
        digest.update(node.key.token_ids.tobytes())
        digest.update(node.slot_pages.tobytes())
    totals = (
        cache.evictable_size(),
        cache.protected_size(),
        tuple(cache.slots.room_pages().tolist()),
        cache.cache_controller.ledger.free_pages,
        sorted(cache.ongoing_write_through),
        sorted(cache.ongoing_load_back),
    )
    digest.update(repr(totals).encode())
    return int.from_bytes(digest.digest(), "little") >> 1
