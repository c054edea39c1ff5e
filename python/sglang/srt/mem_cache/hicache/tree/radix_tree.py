"""`LayoutRadixTree`: the structure. Nodes, matching, insertion and splitting.

Two tiers are known here only as states of the nodes. Who moves them between tiers stands in `backups`, `device_room`,
`host_room` and `load_backs`, and all of these ask the tree, never the other way round: whoever inserts says what is to
happen to nodes that are used. All state is a function of the calls made, never of a clock or of this rank, so equal
calls give equal trees on all ranks.
"""

from __future__ import annotations

import sys
from array import array
from collections import deque
from typing import TYPE_CHECKING, Generic

import torch
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import compute_node_hash_values, split_node_hash_value

from sglang.srt.mem_cache.layouts.errors import LayoutInvariantError
from sglang.srt.mem_cache.layouts.pages import PageArray, pages_of_tokens, tokens_of_pages
from sglang.srt.mem_cache.layouts.protocol import MetadataT

from .calls import Inserted, Match
from .node import LayoutTreeNode, parent_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sglang.srt.mem_cache.events import KVCacheEventRecorder

    from .accounting import Accounting
    from .calls import Insertion
    from .in_flight import InFlight


class LayoutRadixTree(Generic[MetadataT]):
    """A radix tree over whole pages whose nodes may lie on the device, on the host, or both.

    `accounting` hears of every change of a node's state, `in_flight` of nodes that are split, `events` of what is
    stored. With `bigrams` keys are pairs of neighbouring tokens, as for EAGLE. `device` is where slots lie.

    Invariant: a node on the device has its whole prefix on the device.
    """

    def __init__(
        self,
        *,
        page_size: int,
        accounting: Accounting[MetadataT],
        in_flight: InFlight[MetadataT],
        events: KVCacheEventRecorder,
        device: torch.device,
        bigrams: bool = False,
    ) -> None:
        self.page_size = page_size
        self.bigrams = bigrams
        self._accounting = accounting
        self._in_flight = in_flight
        self._events = events
        self._device = device
        self.reset()

    def reset(self) -> None:
        """An empty tree. Slots and host pages are the caller's to free."""
        self._tick = 0
        self._next_id = 0
        self.root = self._new_node(RadixKey(array("q")), priority=-sys.maxsize)
        no_slots = torch.empty(0, dtype=torch.int64, device=self._device)
        self.root.value = no_slots
        self.root.lock_ref = 1
        self.root.hash_value = []
        self.nothing_found = Match(slots=no_slots, device_node=self.root, host_node=self.root)
        self._in_flight.clear()
        self._accounting.reset(self.root)

    # Matching.

    def match(self, key: RadixKey) -> Match[MetadataT]:
        """Longest cached prefix of a key, on the device and, below that, on the host.

        A node is split if the match ends inside it. Whatever matched is the most recently used now.
        """
        key, _ = key.maybe_to_bigram_view(self.bigrams)
        key = whole_pages_of(key, self.page_size)
        if len(key) == 0:
            return self.nothing_found
        values: list[torch.Tensor] = []
        last_node = self._walk(key, values)
        host_tokens = 0
        device_node = last_node
        while device_node.value is None:
            host_tokens += device_node.host_len
            device_node = parent_of(device_node)
        host_node = last_node
        while not host_node.backuped:
            host_node = parent_of(host_node)
        return Match(
            slots=torch.cat(values) if values else self.nothing_found.slots,
            device_node=device_node,
            host_node=host_node,
            host_tokens=host_tokens,
        )

    def slots_down_to(self, node: LayoutTreeNode[MetadataT]) -> torch.Tensor:
        """Slots from the root down to `node`, int64, shape ``[tokens]``. `LayoutInvariantError` if one is elsewhere."""
        values: list[torch.Tensor] = []
        while node.parent is not None:
            if node.value is None:
                raise LayoutInvariantError(f"node {node.id} was asked for its slots, but is not on the device")
            values.append(node.value)
            node = node.parent
        return torch.cat(values[::-1]) if values else self.nothing_found.slots

    def _walk(self, key: RadixKey, values: list[torch.Tensor]) -> LayoutTreeNode[MetadataT]:
        tick = self._now()
        node = self.root
        node.last_access_time = tick
        matched, end = 0, len(key)
        while matched < end:
            child = node.children.get(key.child_key_at(matched, self.page_size))
            if child is None:
                break
            shared = child.key.match_at(key, matched, self.page_size)
            child.last_access_time = tick
            self._accounting.touch(child)
            node = self._split_node(child.key, child, shared) if shared < child.tokens else child
            matched += shared
            if node.value is not None:
                values.append(node.value)
            if node is not child:
                break
        return node

    # Insertion.

    def insert(self, insertion: Insertion, on_use: Callable[[LayoutTreeNode[MetadataT]], None]) -> Inserted[MetadataT]:
        """Put a chain of slots into the tree, up to its last whole page.

        Nodes that had left the device get the new slots. What the tree did not know belongs to it from now on. `on_use`
        is called with each node of the chain that the insertion is a use of, before the next one is looked at. Raises
        `LayoutInvariantError`, with the tree unchanged, for fewer slots or pages than tokens, or parts of pages.
        """
        key, _ = insertion.key.maybe_to_bigram_view(self.bigrams)
        key = whole_pages_of(key, self.page_size)
        if len(key) == 0:
            return Inserted(known_tokens=0, node=self.root)
        value, pages = insertion.value, insertion.slot_pages
        if len(value) < len(key):
            raise LayoutInvariantError(f"insert of {len(key)} tokens came with {len(value)} slots")
        if pages is None:
            pages = read_slot_pages(value[: len(key)], self.page_size)
        if len(pages) * self.page_size < len(key):
            raise LayoutInvariantError(f"insert of {len(key)} tokens came with {len(pages)} slot pages")
        counted = 0 if insertion.use is None else insertion.use.counted
        result = self._insert_slots(key, pages, insertion, counted, on_use if insertion.is_use else _no_use)
        if insertion.use is not None and insertion.is_use:
            insertion.use.counted = max(counted, len(key))
        return result

    def _insert_slots(
        self,
        key: RadixKey,
        pages: PageArray,
        insertion: Insertion,
        counted: int,
        on_use: Callable[[LayoutTreeNode[MetadataT]], None],
    ) -> Inserted[MetadataT]:
        tick, value, priority = self._now(), insertion.value, insertion.priority
        node = self.root
        at, known, end = 0, 0, len(key)
        while at < end:
            child = node.children.get(key.child_key_at(at, self.page_size))
            if child is None:
                break
            shared = child.key.match_at(key, at, self.page_size)
            child.last_access_time = tick
            child.priority = max(child.priority, priority)
            self._accounting.touch(child)
            node = self._split_node(child.key, child, shared) if shared < child.tokens else child
            if node.value is None:
                own = self._page_range(pages, at, at + shared)
                self._accounting.put_on_device(node, value[at : at + shared].clone(), own)
                self._events.record_store(node)
            else:
                known += shared
            if at >= counted:
                on_use(node)
            at += shared
        if at < end:
            node = self._add_leaf(node, key[at:], priority)
            self._accounting.put_on_device(node, value[at:end].clone(), self._page_range(pages, at, end))
            self._events.record_store(node)
            on_use(node)  # also where the request was here before, and what it had left is gone
        return Inserted(known_tokens=known, node=node)

    def _page_range(self, pages: PageArray, start: int, stop: int) -> PageArray:
        return pages[start // self.page_size : stop // self.page_size].copy()

    def _add_leaf(self, parent: LayoutTreeNode[MetadataT], key: RadixKey, priority: int) -> LayoutTreeNode[MetadataT]:
        # A tick of its own: it is younger than the sibling that a split has just left beside it.
        leaf = self._new_node(key, priority=priority, tick=self._now())
        leaf.parent = parent
        parent.children[key.child_key(self.page_size)] = leaf
        if self._events.enabled:
            leaf.hash_value = compute_node_hash_values(leaf, self.page_size)
        return leaf

    # Structure.

    def _split_node(self, key: RadixKey, child: LayoutTreeNode[MetadataT], split_len: int) -> LayoutTreeNode[MetadataT]:
        """Insert a node above `child` that takes over its first `split_len` tokens, and return it.

        Slots and metadata are divided, by the strategy where it is metadata; locks and host holds count
        for both halves; hit count and priority are inherited.
        """
        upper = self._new_node(key[:split_len], priority=child.priority, tick=self._tick)
        upper.hit_count = child.hit_count
        upper.lock_ref = child.lock_ref
        upper.host_ref_counter = child.host_ref_counter
        upper.hash_value, child.hash_value = split_node_hash_value(child.hash_value, split_len, self.page_size)
        upper.event_hash_value, child.event_hash_value = split_node_hash_value(
            child.event_hash_value, split_len, self.page_size
        )
        value, slot_pages, metadata = child.value, child.slot_pages, child.metadata
        child.clear_slots()
        child.clear_metadata()
        upper.parent = child.parent
        parent_of(child).children[key.child_key(self.page_size)] = upper
        child.parent = upper
        child.key = key[split_len:]
        upper.children[child.key.child_key(self.page_size)] = child
        if value is not None:
            pages = split_len // self.page_size
            upper.set_slots(value[:split_len].clone(), slot_pages[:pages].copy())
            child.set_slots(value[split_len:].clone(), slot_pages[pages:].copy())
        if metadata is not None:
            first, rest = metadata.split(split_len)
            upper.set_metadata(first)
            child.set_metadata(rest)
        self._in_flight.split(upper, child)
        self._accounting.refresh(upper)
        self._accounting.refresh(child)
        return upper

    def unlink(self, node: LayoutTreeNode[MetadataT]) -> None:
        """Take a node that holds nothing out of the tree, and with it all below.

        Raises `LayoutInvariantError` if its parent does not know it under its key.
        """
        parent = parent_of(node)
        removed = parent.children.pop(node.key.child_key(self.page_size), None)
        if removed is not node:
            raise LayoutInvariantError(f"node {node.id} is not the child of node {parent.id} under its own key")
        self._accounting.refresh(parent)

    # Inspection.

    def nodes(self) -> Iterator[LayoutTreeNode[MetadataT]]:
        """Every node but the root, parents first, children in order of insertion."""
        stack = list(reversed(self.root.children.values()))
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children.values()))

    def nodes_below(self, top: LayoutTreeNode[MetadataT]) -> Iterator[LayoutTreeNode[MetadataT]]:
        """Every node below `top`, level by level."""
        waiting = deque(top.children.values())
        while waiting:
            node = waiting.popleft()
            yield node
            waiting.extend(node.children.values())

    def total_size(self) -> int:
        """Logical tokens on the device."""
        return sum(node.tokens for node in self.nodes() if node.value is not None)

    def all_values_flatten(self) -> torch.Tensor:
        """Every slot that the tree holds: int64, shape ``[tokens]``, on the pool's device."""
        values = [node.value for node in self.nodes() if node.value is not None]
        return torch.cat(values) if values else self.nothing_found.slots

    def _new_node(self, key: RadixKey, *, priority: int, tick: int | None = None) -> LayoutTreeNode[MetadataT]:
        self._next_id += 1
        return LayoutTreeNode(
            node_id=self._next_id, tick=self._tick if tick is None else tick, key=key, priority=priority
        )

    def _now(self) -> int:
        self._tick += 1
        return self._tick


def _no_use(_node: object) -> None:
    """A chunk of a prompt uses nothing."""


def whole_pages_of(key: RadixKey, page_size: int) -> RadixKey:
    """`key` up to its last whole page, sharing its tokens: SGLang's `page_aligned` copies them."""
    tokens = len(key) // page_size * page_size
    if tokens == len(key):
        return key
    if tokens == 0:
        return key[:0]
    raw_tokens = tokens + 1 if key.is_bigram else tokens
    return RadixKey(key.token_ids, key.extra_key, key.is_bigram, raw_tokens, key.cache_salt)


def read_slot_pages(value: torch.Tensor, page_size: int) -> PageArray:
    """Page numbers of the slots `value`, int64, shape ``[tokens]``, read from their device, which waits for it.

    `LayoutInvariantError` if a slot is not where it belongs.
    """
    slots = value.to("cpu", torch.int64)
    pages = pages_of_tokens(slots, page_size)
    if not torch.equal(slots, tokens_of_pages(pages, page_size)):
        raise LayoutInvariantError(f"{len(slots)} slots to insert are no whole pages of {page_size}")
    return pages
