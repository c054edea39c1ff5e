"""`EvictionOrder`: which leaf goes first, kept up to date instead of being rebuilt at every eviction.

A binary heap with stale entries. A node has at most one valid entry; to move it, a new entry is pushed and
the old one becomes stale and is dropped when it surfaces. Adding, moving, removing and taking the first cost
O(log n) amortised, whatever the number of leaves.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class _HasId(Protocol):
    id: int


NodeT = TypeVar("NodeT", bound=_HasId)

_COMPACT_ABOVE = 64


class EvictionOrder(Generic[NodeT]):
    """Candidates for eviction, smallest `priority` first, ties by node id.

    `priority` is a pure function of the node's state (SGLang's eviction strategies); call `touch` after a
    change of that state. Two ranks with equal trees hold equal orders.
    """

    def __init__(self, priority: Callable[[NodeT], Any]) -> None:
        self._priority = priority
        self._heap: list[tuple[Any, int, int, NodeT]] = []
        self._valid: dict[NodeT, int] = {}
        self._pushes = 0

    def __len__(self) -> int:
        return len(self._valid)

    def __contains__(self, node: object) -> bool:
        return node in self._valid

    def __iter__(self) -> Iterator[NodeT]:
        """Candidates in no particular order."""
        return iter(self._valid)

    def add(self, node: NodeT) -> None:
        """Make `node` a candidate; no effect if it is one."""
        if node not in self._valid:
            self._push(node)

    def discard(self, node: NodeT) -> None:
        """Remove `node`; no effect if it is no candidate."""
        self._valid.pop(node, None)

    def touch(self, node: NodeT) -> None:
        """Move `node` to where its present priority puts it; no effect if it is no candidate."""
        if node in self._valid:
            self._push(node)

    def pop_first(self) -> NodeT | None:
        """Remove and return the candidate that goes first, or None if there is none."""
        while self._heap:
            _, _, push, node = heapq.heappop(self._heap)
            if self._valid.get(node) == push:
                del self._valid[node]
                return node
        return None

    def pop_first_that(self, wanted: Callable[[NodeT], bool], *, look_past: int) -> NodeT | None:
        """`pop_first` among the candidates that are `wanted`; None if the first `look_past` and one are not."""
        passed: list[NodeT] = []
        while (node := self.pop_first()) is not None and not wanted(node):
            passed.append(node)
            if len(passed) > look_past:
                node = None
                break
        for other in passed:
            self._push(other)
        return node

    def first_until(self, enough: Callable[[NodeT], bool]) -> list[NodeT]:
        """The candidates that go first, in order, up to the first that is `enough`. All remain candidates."""
        first: list[NodeT] = []
        while (node := self.pop_first()) is not None:
            first.append(node)
            if enough(node):
                break
        for node in first:
            self._push(node)
        return first

    def clear(self) -> None:
        """Forget every candidate."""
        self._heap.clear()
        self._valid.clear()

    def _push(self, node: NodeT) -> None:
        self._pushes += 1
        self._valid[node] = self._pushes
        heapq.heappush(self._heap, (self._priority(node), node.id, self._pushes, node))
        if len(self._heap) > _COMPACT_ABOVE + 2 * len(self._valid):
            self._heap = [entry for entry in self._heap if self._valid.get(entry[3]) == entry[2]]
            heapq.heapify(self._heap)
