"""`Accounting`: what a tree counts. Tokens on the device, locks, and who may be evicted from which tier.

Whoever changes a node's state tells it here, so that sums and eviction orders never have to be recounted;
`check.invariants` recounts them in tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic

import numpy as np

from sglang.srt.mem_cache.layouts.errors import LayoutInvariantError
from sglang.srt.mem_cache.layouts.facts import host_lanes
from sglang.srt.mem_cache.layouts.protocol import KVLayoutStrategy, MetadataT

from .host_copies import HostCopies
from .leaf_heap import EvictionOrder
from .node import LayoutTreeNode, parent_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from sglang.srt.mem_cache.layouts.pages import PageArray


class Accounting(Generic[MetadataT]):
    """The counters, locks and eviction orders of a tree whose nodes may lie on the device, on the host, or both.

    Invariants: `evictable_tokens` and `protected_tokens` count the logical tokens on the device that are unlocked and
    locked, `evictable_lane_pages` the unlocked pages in each lane; `device_order` holds the nodes that can be evicted
    from the device, `host_order` those that can be deleted, `host_copies` all copies that can go from the host.
    `priority` is that of SGLang's eviction strategies.
    """

    def __init__(
        self, layout: KVLayoutStrategy[MetadataT], priority: Callable[[LayoutTreeNode[MetadataT]], Any]
    ) -> None:
        self._layout = layout
        self._page_size = layout.page_size
        self.device_order: EvictionOrder[LayoutTreeNode[MetadataT]] = EvictionOrder(priority)
        self.host_copies: HostCopies[MetadataT] = HostCopies(host_lanes(layout).count, priority)
        self.host_order = self.host_copies.alone
        self._root: LayoutTreeNode[MetadataT] | None = None
        self._forget_all()

    def reset(self, root: LayoutTreeNode[MetadataT]) -> None:
        """The tree begins anew below `root`: nothing on either tier, nothing locked."""
        self._root = root
        self._forget_all()

    def _forget_all(self) -> None:
        self.device_order.clear()
        self.host_copies.clear()
        self.evictable_tokens = 0
        self.protected_tokens = 0
        self.evictable_lane_pages: PageArray = np.zeros(self._layout.lane_count, dtype=np.int64)

    # On the device, and off it.

    def put_on_device(self, node: LayoutTreeNode[MetadataT], value: torch.Tensor, slot_pages: PageArray) -> None:
        """Give a node its slots, `value`, int64, shape ``[tokens]``, and the same as pages.

        `LayoutInvariantError`, with nothing changed, if they are not as many as the node has tokens.
        """
        if len(slot_pages) * self._page_size != node.tokens or len(value) != node.tokens:
            raise LayoutInvariantError(
                f"node {node.id} of {node.tokens} tokens was given {len(value)} slots in {len(slot_pages)} pages"
            )
        node.set_slots(value, slot_pages)
        self._count(node)
        self.refresh_path(node)

    def take_off_device(self, node: LayoutTreeNode[MetadataT]) -> PageArray:
        """Make a node leave the device; its slot pages are the caller's to free."""
        slot_pages = node.slot_pages
        self._uncount(node)
        node.clear_slots()
        self.refresh_path(node)
        return slot_pages

    def lane_pages(self, node: LayoutTreeNode[MetadataT]) -> PageArray:
        """Pages of the node's slots in each lane, counted once."""
        if node.lane_pages is None:
            node.lane_pages = np.bincount(self._layout.lanes_of(node.slot_pages), minlength=self._layout.lane_count)
        return node.lane_pages

    def _count(self, node: LayoutTreeNode[MetadataT]) -> None:
        if node.lock_ref > 0:
            self.protected_tokens += node.tokens
        else:
            self.evictable_tokens += node.tokens
            self.evictable_lane_pages += self.lane_pages(node)

    def _uncount(self, node: LayoutTreeNode[MetadataT]) -> None:
        if node.lock_ref > 0:
            self.protected_tokens -= node.tokens
        else:
            self.evictable_tokens -= node.tokens
            self.evictable_lane_pages -= self.lane_pages(node)

    # Locks.

    def lock(self, node: LayoutTreeNode[MetadataT]) -> int:
        """Keep `node` and its prefix from eviction. Returns the change of the evictable tokens (<= 0)."""
        return self._lock(node, 1)

    def unlock(self, node: LayoutTreeNode[MetadataT]) -> int:
        """Undo one `lock`. Returns the change of the evictable tokens (>= 0).

        Raises `LayoutInvariantError`, with nothing changed, if it is not locked or belongs to a tree before a reset.
        """
        return self._lock(node, -1)

    def _lock(self, node: LayoutTreeNode[MetadataT], step: int) -> int:
        before = self.evictable_tokens
        self._check_lock(node, step)
        while node.parent is not None:
            if node.lock_ref == 0 or node.lock_ref + step == 0:
                on_device = node.value is not None
                if on_device:
                    self._uncount(node)
                node.lock_ref += step
                if on_device:
                    self._count(node)
                if not node.device_children:  # else it is no candidate, locked or not
                    self.refresh(node)
            else:
                node.lock_ref += step
            node = node.parent
        return self.evictable_tokens - before

    def _check_lock(self, node: LayoutTreeNode[MetadataT], step: int) -> None:
        while node.parent is not None:
            if node.lock_ref + step < 0:
                raise LayoutInvariantError(f"node {node.id} is unlocked {-step} times but holds {node.lock_ref} locks")
            node = node.parent
        if node is not self._root:
            raise LayoutInvariantError("a node of another tree was locked or unlocked; was the cache reset?")

    # Eviction orders.

    def refresh(self, node: LayoutTreeNode[MetadataT]) -> None:
        """Make the eviction orders right for `node` after any change of its state."""
        if node.is_device_leaf:
            self.device_order.add(node)
        else:
            self.device_order.discard(node)
        self.host_copies.refresh(node)

    def refresh_path(self, node: LayoutTreeNode[MetadataT]) -> None:
        """`refresh` for `node` and its parent, which may have become a leaf or ceased to be one."""
        self.refresh(node)
        self.refresh(parent_of(node))

    def touch(self, node: LayoutTreeNode[MetadataT]) -> None:
        """Move `node` in the eviction orders after a change of its time, hits or priority."""
        self.device_order.touch(node)
        self.host_copies.touch(node)
