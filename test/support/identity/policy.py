"""Where `identity` is meant to differ from SGLang 0.5.20, said in terms of SGLang's class: one difference a subclass.

Brute force instead of counters and kept orders, so that ours is compared with what it means, not with itself.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from sglang.srt.mem_cache.radix_cache import RadixKey

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sglang.srt.mem_cache.base_prefix_cache import InsertResult

SGLangHiRadixCache: Any = import_module("sglang.srt.mem_cache.hiradix_cache").HiRadixCache  # our stub has little of it


class CountsARequestOnce(SGLangHiRadixCache):  # type: ignore[misc]  # SGLang's class, as Any
    """SGLang counts a hit at each insert of one request, none where a node is computed again or under write_back."""

    def __init__(self, *positional: Any, **named: Any) -> None:  # noqa: ANN401
        self._counted: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._request: Any = None
        super().__init__(*positional, **named)

    def cache_finished_req(self, req: Any, *positional: Any, **named: Any) -> None:  # noqa: ANN401
        self._request = req
        super().cache_finished_req(req, *positional, **named)
        self._request = None

    def cache_unfinished_req(self, req: Any, chunked: bool = False) -> None:  # noqa: ANN401
        self._request = req
        super().cache_unfinished_req(req, chunked)
        self._request = None

    def insert(self, params: Any) -> InsertResult:  # noqa: ANN401  # of that release
        result: InsertResult
        if params.chunked:
            result = super().insert(params)
            return result
        whole = len(params.key) // self.page_size * self.page_size
        tokens, extra_key = params.key.token_ids[:whole], params.key.extra_key
        known = sum(shared for _, _, shared in self._path(RadixKey(tokens, extra_key)))
        counted = self._counted.get(self._request, 0) if self._request is not None else 0
        result = super().insert(replace(params, chunked=True))
        for node, start, _ in list(self._path(RadixKey(tokens, extra_key))):
            if start >= min(known, counted):
                self._count(node)
        if self._request is not None:
            self._counted[self._request] = max(counted, whole)
        return result

    def _count(self, node: Any) -> None:  # noqa: ANN401
        if self.cache_controller.write_policy == "write_back":
            node.hit_count += 1
        else:
            self._inc_hit_count(node)

    def _path(self, key: RadixKey) -> Iterator[tuple[Any, int, int]]:
        """The nodes along a key, where each starts, and how many of its tokens agree."""
        node, start = self.root_node, 0
        while len(key):
            node = node.children.get(key.child_key(self.page_size))
            if node is None:
                return
            shared = node.key.match(key, page_size=self.page_size)
            yield node, start, shared
            if shared < len(node.key):
                return
            start, key = start + shared, key[shared:]


class LetsMirrorsGiveWay(CountsARequestOnce):
    """SGLang cannot take back the host copy of a node that is on the device, so that a full host tier serves nothing.

    Ours backs a hit up into free host memory only, and what has earned it on its way out of the device, with what
    lacks a copy above it. Room for that is made of mirrors, then of host-only leaves, or not at all.
    """

    def __init__(self, *positional: Any, **named: Any) -> None:  # noqa: ANN401
        self._locked: set[int] = set()  # ids of the backups that lock their node
        super().__init__(*positional, **named)

    def reset(self) -> None:
        super().reset()
        self.ongoing_write_through.clear()
        self.ongoing_load_back.clear()
        self._locked.clear()

    def write_backup(self, node: Any, write_back: bool = False) -> int:  # noqa: ANN401
        free = self.token_to_kv_pool_host.available_size()
        if not write_back:
            backed_up = super().write_backup(node) if len(node.key) <= free else 0
            self._locked.update([node.id] if backed_up else [])
            return backed_up
        if self.cache_controller.write_policy != "write_back" and node.hit_count < self.write_through_threshold:
            return 0
        nodes = [node]
        above = node.parent
        while self.cache_controller.write_policy != "write_back" and above is not self.root_node and not above.backuped:
            nodes.insert(0, above)
            above = above.parent
        if not self._make_room(sum(len(each.key) for each in nodes) - free, above):
            return 0
        return sum(super(LetsMirrorsGiveWay, self).write_backup(each, write_back=True) for each in nodes)

    def _finish_write_through_ack(self, ack_id: int, *, release_lock: bool) -> None:
        super()._finish_write_through_ack(ack_id, release_lock=ack_id in self._locked)
        self._locked.discard(ack_id)

    def _make_room(self, missing: int, above: Any) -> bool:  # noqa: ANN401
        held = self._held(above)
        copies = [node for node in self._nodes() if node.backuped and node not in held]
        if sum(len(node.key) for node in copies) < missing:
            return False
        while missing > 0:
            leaves = [node for node in copies if not any(child.backuped for child in node.children.values())]
            first = min(leaves, key=lambda node: (node.evicted, self.eviction_strategy.get_priority(node)))
            missing -= len(first.key)
            copies.remove(first)
            self.cache_controller.evict_host(first.host_value)
            first.host_value = None
            if first.evicted:
                first.parent.children.pop(first.key.child_key(self.page_size))
                self.evictable_host_leaves.discard(first)
            self._update_host_leaf_status(first.parent)
        return True

    def _held(self, above: Any) -> set[Any]:  # noqa: ANN401
        """`above`, what a transfer concerns, and the nodes above those."""
        starts = [above, *self.ongoing_load_back.values(), *(n for n in self._nodes() if n.host_ref_counter)]
        starts += [node for _, _, nodes in self.ongoing_write_through.values() for node in nodes]
        held: set[Any] = set()
        for node in starts:
            while node is not None and node not in held:
                held.add(node)
                node = node.parent
        return held

    def _nodes(self) -> list[Any]:
        nodes: list[Any] = list(self.root_node.children.values())
        for node in nodes:
            nodes.extend(node.children.values())
        return nodes

    def _evict_write_through(self, num_tokens: int) -> int:
        return self._evict_write_back(num_tokens)

    def _evict_write_back(self, num_tokens: int) -> int:
        staged: list[Any] = []
        kept: set[Any] = set()
        evicted = 0

        def flush() -> None:
            if staged:
                self.writing_check(write_back=True)
            for slots in staged:
                self.cache_controller.evict_device(slots)
            staged.clear()

        while evicted < num_tokens:
            leaves = [leaf for leaf in self.evictable_leaves if leaf not in kept]
            if not leaves and staged:
                flush()  # and look again: what older copies had locked can go now
                continue
            if not leaves:
                break
            node = min(leaves, key=self.eviction_strategy.get_priority)
            if not node.backuped and not self.write_backup(node, write_back=True):
                flush()
                dropped = self._drop_subtree_no_host(node)
                evicted += dropped
                kept.update([] if dropped else [node])
            elif node.write_through_pending_id is None:
                evicted += self._evict_backuped(node)
            else:
                staged.append(node.value)
                evicted += self._detach_backuped(node)
        flush()
        return evicted
