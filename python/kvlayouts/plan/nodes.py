"""A radix tree over pages whose nodes hold no KV: structure, locks and eviction orders.

The counterpart of `radix_tree.LayoutRadixTree`, and equal to it in every decision: the same ticks, node ids, counters
and orders, with SGLang's own eviction strategies. A node is a stretch of pages of the prompt that created it, so it
keeps no key of its own. `test_plan_simulation.py` compares the two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from sglang.srt.mem_cache.evict_policy import (
    EvictionStrategy,
    FIFOStrategy,
    FILOStrategy,
    LFUStrategy,
    LRUStrategy,
    MRUStrategy,
    PriorityStrategy,
    SLRUStrategy,
)

from kvlayouts.plan.prompts import Prompt
from sglang.srt.mem_cache.hicache.tree.eviction_order import EvictionOrder

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvlayouts.plan.chains import ChainLanes
    from sglang.srt.mem_cache.layouts.pages import PageArray

EVICTION_STRATEGIES: Final[dict[str, Callable[[], EvictionStrategy]]] = {
    "lru": LRUStrategy,
    "lfu": LFUStrategy,
    "fifo": FIFOStrategy,
    "mru": MRUStrategy,
    "filo": FILOStrategy,
    "priority": PriorityStrategy,
    "slru": SLRUStrategy,
}

_NO_PROMPT: Final = Prompt(tokens=0, prefix_ids=(), first_page=-1)


class PageNode:
    """Pages ``first_page .. end_page - 1`` of the chain of `prompt`; what of `LayoutTreeNode` the decisions read."""

    __slots__ = (
        "children",
        "creation_time",
        "device_children",
        "end_page",
        "first_page",
        "hit_count",
        "host_children",
        "host_ref_counter",
        "id",
        "lane_pages",
        "last_access_time",
        "listed",
        "lock_ref",
        "on_device",
        "on_host",
        "parent",
        "priority",
        "prompt",
    )

    def __init__(self, *, node_id: int, tick: int, prompt: Prompt, first_page: int, end_page: int) -> None:
        self.id = node_id
        self.parent: PageNode | None = None
        self.children: dict[int, PageNode] = {}
        self.prompt = prompt
        self.first_page = first_page
        self.end_page = end_page
        self.lane_pages: PageArray = np.empty(0, dtype=np.int64)
        self.on_device = False
        self.on_host = False
        self.listed: EvictionOrder[PageNode] | None = None  # the order that it is in
        self.lock_ref = 0
        self.host_ref_counter = 0
        self.device_children = 0
        self.host_children = 0
        self.hit_count = 0
        self.priority = 0
        self.last_access_time = tick
        self.creation_time = tick

    @property
    def pages(self) -> int:
        """Pages of the node."""
        return self.end_page - self.first_page

    @property
    def above(self) -> PageNode:
        """The parent; not for the root."""
        assert self.parent is not None
        return self.parent


class PageTree:
    """The tree, its locks and the two eviction orders. All counts are pages, by lane."""

    def __init__(self, chains: ChainLanes, *, page_size: int, block_tokens: int, eviction_policy: str) -> None:
        self._chains = chains
        self._page_size = page_size
        self._block_tokens = block_tokens
        priority = EVICTION_STRATEGIES[eviction_policy]().get_priority
        self.device_order: EvictionOrder[PageNode] = EvictionOrder(priority)  # type: ignore[arg-type]  # SGLang's node
        self.host_order: EvictionOrder[PageNode] = EvictionOrder(priority)  # type: ignore[arg-type]  # SGLang's node
        self.evictable_pages: PageArray = np.zeros(chains.lane_count, dtype=np.int64)
        self._tick = 0
        self._next_id = 0
        self.root = self._new_node(_NO_PROMPT, 0, 0, tick=0)
        self.root.on_device = self.root.on_host = True
        self.root.lock_ref = 1

    # Structure.

    def tick(self) -> int:
        """The next tick of the logical clock."""
        self._tick += 1
        return self._tick

    def step(self, node: PageNode, prompt: Prompt, at: int, end: int, tick: int) -> PageNode | None:
        """The child of `node` that agrees with `prompt` from page `at` on, split where it stops agreeing before `end`.

        None if there is none. The child that was found counts as used at `tick`.
        """
        child = node.children.get(self._prefix_id(prompt, at))
        if child is None:
            return None
        shared_end = self._shared_end(child, prompt, end)
        child.last_access_time = tick
        self.touch(child)
        return self._split(child, shared_end) if shared_end < child.end_page else child

    def add_leaf(self, parent: PageNode, prompt: Prompt, first_page: int, end_page: int) -> PageNode:
        """A new node below `parent`, on neither tier, with a tick of its own."""
        leaf = self._new_node(prompt, first_page, end_page, tick=self.tick())
        leaf.lane_pages = self._chains.count(prompt.first_page, first_page, end_page)
        leaf.parent = parent
        parent.children[self._prefix_id(prompt, first_page)] = leaf
        return leaf

    def unlink(self, node: PageNode) -> None:
        """Take a node, and all below it, out of the tree."""
        del node.above.children[self._prefix_id(node.prompt, node.first_page)]
        self.refresh(node.above)

    def _prefix_id(self, prompt: Prompt, page: int) -> int:
        return prompt.prefix_ids[((page + 1) * self._page_size - 1) // self._block_tokens]

    def _shared_end(self, child: PageNode, prompt: Prompt, end: int) -> int:
        """The page at which `child` and `prompt`, which agree in the child's first page, stop agreeing."""
        agreed, differs = child.first_page + 1, min(child.end_page, end) + 1
        probe = differs - 1  # most often they agree to the end
        while agreed < differs - 1:
            if self._prefix_id(child.prompt, probe - 1) == self._prefix_id(prompt, probe - 1):
                agreed = probe
            else:
                differs = probe
            probe = (agreed + differs) // 2
        return agreed

    def _split(self, child: PageNode, at: int) -> PageNode:
        """Put a node above `child` that takes over its pages before page `at`, and return it."""
        upper = self._new_node(child.prompt, child.first_page, at, tick=self._tick)
        upper.priority = child.priority
        upper.hit_count = child.hit_count
        upper.lock_ref = child.lock_ref
        upper.host_ref_counter = child.host_ref_counter
        upper.lane_pages = self._chains.count(child.prompt.first_page, child.first_page, at)
        upper.on_device, upper.on_host = child.on_device, child.on_host
        upper.device_children, upper.host_children = int(child.on_device), int(child.on_host)
        upper.parent = child.parent
        child.above.children[self._prefix_id(child.prompt, child.first_page)] = upper
        child.parent = upper
        child.first_page = at
        child.lane_pages = child.lane_pages - upper.lane_pages
        upper.children[self._prefix_id(child.prompt, at)] = child
        self.refresh(upper)
        return upper

    def _new_node(self, prompt: Prompt, first_page: int, end_page: int, *, tick: int) -> PageNode:
        self._next_id += 1
        return PageNode(node_id=self._next_id, tick=tick, prompt=prompt, first_page=first_page, end_page=end_page)

    # Tiers, as states of a node.

    def put_on_device(self, node: PageNode) -> None:
        """The node has slots now."""
        node.on_device = True
        node.above.device_children += 1
        if not node.lock_ref:
            self.evictable_pages += node.lane_pages
        self._refresh_path(node)

    def take_off_device(self, node: PageNode) -> None:
        """The node has no slots any more."""
        node.on_device = False
        node.above.device_children -= 1
        if not node.lock_ref:
            self.evictable_pages -= node.lane_pages
        self._refresh_path(node)

    def put_on_host(self, node: PageNode) -> None:
        """The node has a host copy now."""
        node.on_host = True
        node.above.host_children += 1
        self._refresh_path(node)

    def take_off_host(self, node: PageNode) -> None:
        """The node has no host copy any more. Its parent is refreshed when the node is unlinked."""
        node.on_host = False
        node.above.host_children -= 1
        self.refresh(node)

    # Locks.

    def lock(self, node: PageNode, step: int) -> None:
        """Keep `node` and its prefix on the device (`step` 1), or undo that (-1)."""
        while node.parent is not None:
            was_free = node.lock_ref == 0
            node.lock_ref += step
            is_free = node.lock_ref == 0
            if was_free != is_free:
                if node.on_device and is_free:
                    self.evictable_pages += node.lane_pages
                elif node.on_device:
                    self.evictable_pages -= node.lane_pages
                self.refresh(node)
            node = node.parent

    def protect(self, node: PageNode, step: int) -> None:
        """Keep the host copy of `node` (`step` 1), or undo that (-1)."""
        node.host_ref_counter += step
        self.refresh(node)

    # Eviction orders.

    def refresh(self, node: PageNode) -> None:
        """Make both eviction orders right for `node` after a change of its state."""
        order: EvictionOrder[PageNode] | None = None
        if not node.lock_ref:
            if node.on_device:
                order = self.device_order if not node.device_children else None
            elif node.on_host and not node.host_ref_counter and not node.host_children:
                order = self.host_order
        if order is not node.listed:
            if node.listed is not None:
                node.listed.discard(node)
            if order is not None:
                order.add(node)
            node.listed = order

    def _refresh_path(self, node: PageNode) -> None:
        self.refresh(node)
        self.refresh(node.above)

    def touch(self, node: PageNode) -> None:
        """Move `node` in its eviction order after a change of its time or hits."""
        if node.listed is not None:
            node.listed.touch(node)

    def first_to_leave(self, order: EvictionOrder[PageNode]) -> PageNode | None:
        """Take the candidate that goes first out of `order`; None if there is none."""
        node = order.pop_first()
        if node is not None:
            node.listed = None
        return node
