"""What must hold of one rank's cache between any two operations, checked from scratch.

Slow (O(tokens in the tree)) and independent of the counters that the cache keeps for itself: everything is
recounted from the nodes. Used by tests and by the soak, not on a hot path. Equality between ranks is
`digest.tree_digest`'s business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sglang.srt.mem_cache.layouts.facts import host_lanes, page_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sglang.srt.mem_cache.layouts.pages import PageArray

    from ..radix_cache import HiRadixCache
    from ..tree.host_copies import HostCopies
    from ..tree.node import LayoutTreeNode


def violations(cache: HiRadixCache[Any], *, held_slot_pages: int = 0) -> list[str]:
    """Every broken invariant, one line each; empty if all hold.

    `held_slot_pages` are logical pages that requests have and the tree does not.
    """
    nodes = list(cache.nodes())
    return [
        *_accounting(cache, nodes, held_slot_pages),
        *_device_pages(cache, nodes),
        *_host_pages(cache, nodes),
        *(line for node in nodes for line in _node(cache, node)),
        *_node_counters(cache.root_node),
    ]


def _accounting(cache: HiRadixCache[Any], nodes: list[LayoutTreeNode[Any]], held_pages: int) -> Iterator[str]:
    on_device = [node for node in nodes if node.value is not None]
    evictable = sum(node.tokens for node in on_device if node.lock_ref == 0)
    protected = sum(node.tokens for node in on_device if node.lock_ref > 0)
    yield from _differ("evictable tokens", cache.evictable_size(), evictable)
    yield from _differ("protected tokens", cache.protected_size(), protected)
    unlocked = _concat([node.slot_pages for node in on_device if node.lock_ref == 0])
    by_lane = np.bincount(cache.layout.lanes_of(unlocked), minlength=cache.layout.lane_count)
    yield from _differ(
        "evictable pages by lane", cache.parts.accounting.evictable_lane_pages.tolist(), by_lane.tolist()
    )
    allocator = cache.token_to_kv_pool_allocator
    total = allocator.available_size() + evictable + protected + held_pages * cache.page_size
    yield from _differ("slots: available + evictable + protected + held", total, allocator.size)


def _device_pages(cache: HiRadixCache[Any], nodes: list[LayoutTreeNode[Any]]) -> Iterator[str]:
    held = _concat([node.slot_pages for node in nodes])
    if len(np.unique(held)) != len(held):
        yield f"slot pages are held by two nodes: {_repeated(held)}"
    free = cache.token_to_kv_pool_allocator.get_all_free_pages()
    if free is not None:
        both = np.intersect1d(held, free.cpu().numpy())
        if len(both):
            yield f"slot pages are held by a node and free: {both}"


def _host_pages(cache: HiRadixCache[Any], nodes: list[LayoutTreeNode[Any]]) -> Iterator[str]:
    controller = cache.cache_controller
    metadata = [node.metadata for node in nodes if node.metadata is not None]
    own = _concat([part.host_pages for part in metadata])
    if len(np.unique(own)) != len(own):
        yield f"host pages are held by two nodes: {_repeated(own)}"
    lanes = host_lanes(cache.layout)
    booked = np.zeros(lanes.count, dtype=np.int64)
    for part in metadata:
        booked += part.pages_per_lane
    yield from _differ("host pages in use by lane", controller.ledger.used_pages, tuple(booked.tolist()))
    yield from _differ("host pages of this rank's lane", len(own), 0 if lanes.own is None else int(booked[lanes.own]))
    unheld = np.zeros(lanes.count, dtype=np.int64)
    for node in nodes:
        if node.metadata is not None and node.host_ref_counter == 0:
            unheld += node.metadata.pages_per_lane
    yield from _differ(
        "host pages that can be given up by lane", cache.parts.accounting.host_copies.lane_pages, unheld.tolist()
    )
    pool = cache.token_to_kv_pool_host
    pool_used = (pool.size - pool.available_size()) // page_rows(cache.layout)
    yield from _differ("host pages in use in the pool", pool_used, len(own))


def _node(cache: HiRadixCache[Any], node: LayoutTreeNode[Any]) -> Iterator[str]:
    name, parent = f"node {node.id}", node.parent
    if parent is None:
        yield f"{name} is in the tree without a parent"
        return
    if parent.children.get(node.key.child_key(cache.page_size)) is not node:
        yield f"{name} is not its parent's child under its own key"
    if node.tokens == 0 or node.tokens % cache.page_size:
        yield f"{name} has {node.tokens} tokens, no positive multiple of a page"
    if node.value is None and node.metadata is None:
        yield f"{name} lies on neither tier"
    if node.value is not None:
        yield from _differ(f"{name}: slots", len(node.value), node.tokens)
        yield from _differ(f"{name}: tokens of slot pages", len(node.slot_pages) * cache.page_size, node.tokens)
        if parent.value is None:
            yield f"{name} is on the device, its parent is not"
    if node.metadata is not None:
        yield from _differ(f"{name}: tokens of metadata", node.metadata.logical_len, node.tokens)
        if cache.settings.write_policy != "write_back" and not parent.backuped:
            yield f"{name} is backed up, its parent is not"
    orders = cache.parts.accounting
    if (node in orders.device_order) != node.is_device_leaf:
        yield f"{name}: device leaf is {node.is_device_leaf}, but it is in the order: {node in orders.device_order}"
    if (node in orders.host_order) != node.is_host_leaf:
        yield f"{name}: host leaf is {node.is_host_leaf}, but it is in the order: {node in orders.host_order}"
    mirrors = _copies(cache).mirrors
    if (node in mirrors) != node.is_mirror_leaf:
        yield f"{name}: mirror leaf is {node.is_mirror_leaf}, but it is in the order: {node in mirrors}"
    if node.lock_ref < 0 or node.host_ref_counter < 0:
        yield f"{name} has {node.lock_ref} locks and {node.host_ref_counter} host holds"
    yield from _node_counters(node)


def _node_counters(node: LayoutTreeNode[Any]) -> Iterator[str]:
    children = list(node.children.values())
    yield from _differ(
        f"node {node.id}: children on the device", node.device_children, sum(c.value is not None for c in children)
    )
    yield from _differ(
        f"node {node.id}: children on the host", node.host_children, sum(c.metadata is not None for c in children)
    )
    for what, own, below in (
        ("locks", node.lock_ref, sum(child.lock_ref for child in children)),
        ("host holds", node.host_ref_counter, sum(child.host_ref_counter for child in children)),
    ):
        if node.parent is not None and own < below:
            yield f"node {node.id} has {own} {what}, its children {below}"


def _copies(cache: HiRadixCache[Any]) -> HostCopies[Any]:
    return cache.parts.accounting.host_copies


def _concat(arrays: list[PageArray]) -> PageArray:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype=np.int64)


def _repeated(pages: PageArray) -> PageArray:
    values, counts = np.unique(pages, return_counts=True)
    repeated: PageArray = values[counts > 1]
    return repeated


def _differ(what: str, found: object, expected: object) -> Iterator[str]:
    if found != expected:
        yield f"{what}: {found}, but recounted: {expected}"
