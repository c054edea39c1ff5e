"""`TreeAccounting`: what a tree counts. Tokens on the device, locks, and who may be evicted from which tier.

Whoever changes a node's state (`radix_tree`, `tiers`, `radix_cache`) tells it here, so that sums and eviction orders
never have to be recounted; `invariants` recounts them in tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic

import numpy as np
from sglang.srt.mem_cache.base_prefix_cache import DecLockRefResult, IncLockRefResult
from sglang.srt.mem_cache.radix_cache import RadixCache

from sglang.srt.mem_cache.layouts.errors import LayoutInvariantError
from sglang.srt.mem_cache.layouts.protocol import KVLayoutStrategy, MetadataT

from .eviction import EvictionOrder
from .host_room import HostRoom

if TYPE_CHECKING:
    import torch
    from sglang.srt.mem_cache.base_prefix_cache import DecLockRefParams
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

    from sglang.srt.mem_cache.layouts.pages import PageArray

    from .node import LayoutTreeNode


class TreeAccounting(RadixCache, Generic[MetadataT]):
    """The counters, locks and eviction orders of a tree whose nodes may lie on the device, on the host, or both.

    Invariants: `evictable_size_` and `protected_size_` count the logical tokens on the device that are unlocked and
    locked, `evictable_lane_pages` the unlocked pages in each lane; `device_order` holds the nodes that can be evicted
    from the device, `host_order` those that can be deleted, `host_room` all copies that can go from the host.
    """

    root_node: LayoutTreeNode[MetadataT]

    def __init__(self, params: CacheInitParams, layout: KVLayoutStrategy[MetadataT]) -> None:
        self.layout = layout
        super().__init__(params)  # calls reset()

    def reset(self) -> None:
        """Nothing on either tier, nothing locked."""
        self.device_order: EvictionOrder[LayoutTreeNode[MetadataT]] = EvictionOrder(self.eviction_strategy.get_priority)
        self.host_room: HostRoom[MetadataT] = HostRoom(self.layout.lane_count, self.eviction_strategy.get_priority)
        self.host_order = self.host_room.alone
        self.evictable_size_ = 0
        self.evictable_lane_pages: PageArray = np.zeros(self.layout.lane_count, dtype=np.int64)
        self.protected_size_ = 0

    # On the device, and off it.

    def _put_on_device(self, node: LayoutTreeNode[MetadataT], value: torch.Tensor, slot_pages: PageArray) -> None:
        if len(slot_pages) * self.page_size != node.tokens or len(value) != node.tokens:
            raise LayoutInvariantError(
                f"node {node.id} of {node.tokens} tokens was given {len(value)} slots in {len(slot_pages)} pages"
            )
        node.set_slots(value, slot_pages)
        self._count(node, node.tokens)
        self._refresh_path(node)

    def _take_off_device(self, node: LayoutTreeNode[MetadataT]) -> PageArray:
        """Make a node leave the device; its slot pages are the caller's to free."""
        slot_pages = node.slot_pages
        self._count(node, -node.tokens)
        node.clear_slots()
        self._refresh_path(node)
        return slot_pages

    def _count(self, node: LayoutTreeNode[MetadataT], tokens: int) -> None:
        """Count `tokens`, all of the node's, none, or all of them taken away."""
        if node.lock_ref > 0:
            self.protected_size_ += tokens
            return
        self.evictable_size_ += tokens
        if tokens > 0:
            self.evictable_lane_pages += self._lane_pages(node)
        elif tokens < 0:
            self.evictable_lane_pages -= self._lane_pages(node)

    def _lane_pages(self, node: LayoutTreeNode[MetadataT]) -> PageArray:
        """Pages of the node's slots in each lane, counted once."""
        if node.lane_pages is None:
            node.lane_pages = np.bincount(self.layout.lanes_of(node.slot_pages), minlength=self.layout.lane_count)
        return node.lane_pages

    def evictable_size(self) -> int:
        """Unlocked logical tokens on the device."""
        return self.evictable_size_

    # Locks.

    def inc_lock_ref(self, node: LayoutTreeNode[MetadataT]) -> IncLockRefResult:
        """Keep `node` and its prefix from eviction. `delta` is the change of the evictable tokens (<= 0)."""
        return IncLockRefResult(delta=0 if self.disable else self._lock(node, 1))

    def dec_lock_ref(
        self,
        node: LayoutTreeNode[MetadataT],
        params: DecLockRefParams | None = None,
    ) -> DecLockRefResult:
        """Undo one `inc_lock_ref`. `delta` is the change of the evictable tokens (>= 0).

        Raises `LayoutInvariantError`, with nothing changed, if it is not locked or belongs to a tree before a reset.
        """
        return DecLockRefResult(delta=0 if self.disable else self._lock(node, -1))

    def _lock(self, node: LayoutTreeNode[MetadataT], step: int) -> int:
        before = self.evictable_size_
        self._check_lock(node, step)
        while node.parent is not None:
            if node.lock_ref == 0 or node.lock_ref + step == 0:
                on_device = node.tokens if node.value is not None else 0
                self._count(node, -on_device)
                node.lock_ref += step
                self._count(node, on_device)
                self._refresh(node)
            else:
                node.lock_ref += step
            node = node.parent
        return self.evictable_size_ - before

    def _check_lock(self, node: LayoutTreeNode[MetadataT], step: int) -> None:
        while node.parent is not None:
            if node.lock_ref + step < 0:
                raise LayoutInvariantError(f"node {node.id} is unlocked {-step} times but holds {node.lock_ref} locks")
            node = node.parent
        if node is not self.root_node:
            raise LayoutInvariantError("a node of another tree was locked or unlocked; was the cache reset?")

    # Eviction orders.

    def _refresh(self, node: LayoutTreeNode[MetadataT]) -> None:
        """Make the eviction orders right for `node` after any change of its state."""
        (self.device_order.add if node.is_device_leaf else self.device_order.discard)(node)
        self.host_room.refresh(node)

    def _refresh_path(self, node: LayoutTreeNode[MetadataT]) -> None:
        self._refresh(node)
        self._refresh(parent_of(node))

    def _touch(self, node: LayoutTreeNode[MetadataT]) -> None:
        """Move `node` in the eviction orders after a change of its time, hits or priority."""
        self.device_order.touch(node)
        self.host_room.touch(node)


def parent_of(node: LayoutTreeNode[MetadataT]) -> LayoutTreeNode[MetadataT]:
    """The node above `node`. Raises `LayoutInvariantError` for the root."""
    if node.parent is None:
        raise LayoutInvariantError(f"node {node.id} has no parent; the walk should have ended at the root")
    return node.parent
