"""`HostCopies`: which host copies may go, in which order, and how much room that would make in each lane.

    held    a copy that a transfer reads or writes, or that lies above one
    mirror  the node is on the device too: giving the copy up costs another backup, if the node leaves the device
    alone   the node is only on the host: giving the copy up loses the prefix

A copy may go if it is not held and no child has one, so that host copies still form prefixes. Mirrors go first. Since
what is above a held copy is held too, every copy that is not can be reached from its leaves: the room that can be made
is the sum of them, and it is known before anything is given up.
"""

from __future__ import annotations

from operator import add, le, sub
from typing import TYPE_CHECKING, Any, Final, Generic

from sglang.srt.mem_cache.layouts.errors import LayoutInvariantError
from sglang.srt.mem_cache.layouts.protocol import MetadataT

from .leaf_heap import EvictionOrder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .node import LayoutTreeNode

LOOK_PAST: Final = 16
"""Candidates without a page in a short lane that are passed over, of each kind, before one of them goes after all."""


class HostCopies(Generic[MetadataT]):
    """The host copies of one tree, as candidates and as pages. Equal on all ranks whose trees are equal.

    `lane_pages` are the pages of copies that are not held, in each lane.
    """

    def __init__(self, lane_count: int, priority: Callable[[LayoutTreeNode[MetadataT]], Any]) -> None:
        self.mirrors: EvictionOrder[LayoutTreeNode[MetadataT]] = EvictionOrder(priority)
        self.alone: EvictionOrder[LayoutTreeNode[MetadataT]] = EvictionOrder(priority)
        self.lane_pages = [0] * lane_count

    def clear(self) -> None:
        """There are no copies."""
        self.mirrors.clear()
        self.alone.clear()
        self.lane_pages = [0] * len(self.lane_pages)

    # Who may go.

    def refresh(self, node: LayoutTreeNode[MetadataT]) -> None:
        """Make both orders right for `node` after any change of its state."""
        (self.mirrors.add if node.is_mirror_leaf else self.mirrors.discard)(node)
        (self.alone.add if node.is_host_leaf else self.alone.discard)(node)

    def touch(self, node: LayoutTreeNode[MetadataT]) -> None:
        """Move `node` in its order after a change of its time, hits or priority."""
        self.mirrors.touch(node)
        self.alone.touch(node)

    def pop_first(self, missing_pages: Sequence[int]) -> LayoutTreeNode[MetadataT] | None:
        """Take the copy that goes first for pages in the lanes where `missing_pages` is above 0; None without any.

        One that has no page there is passed over, for it would go in vain, unless the first of both orders are all
        like that: then one goes, since what lies above it may have.
        """

        short = [lane for lane, missing in enumerate(missing_pages) if missing]

        def helps(node: LayoutTreeNode[MetadataT]) -> bool:
            return any(map(node.copy_pages.__getitem__, short))

        for order in (self.mirrors, self.alone):
            node = order.pop_first_that(helps, look_past=LOOK_PAST)
            if node is not None:
                return node
        return self.mirrors.pop_first() or self.alone.pop_first()

    # How much room that makes.

    def can_make(self, missing_pages: Sequence[int]) -> bool:
        """Whether giving up copies makes `missing_pages` more room in each lane."""
        return all(map(le, missing_pages, self.lane_pages))

    def hold(self, node: LayoutTreeNode[MetadataT]) -> None:
        """Keep the copy of `node` and those above it, or the one that `node` is about to get."""
        while node.parent is not None:
            if node.host_ref_counter == 0:
                self._count(node, sub)
            node.host_ref_counter += 1
            if node.host_ref_counter == 1 and not node.host_children:
                self.refresh(node)
            node = node.parent

    def release(self, node: LayoutTreeNode[MetadataT]) -> None:
        """Undo one `hold`. Raises `LayoutInvariantError` if there is none to undo."""
        while node.parent is not None:
            if node.host_ref_counter <= 0:
                raise LayoutInvariantError(f"the host copy of node {node.id} is released, but it is not held")
            node.host_ref_counter -= 1
            if node.host_ref_counter == 0:
                self._count(node, add)
                if not node.host_children:
                    self.refresh(node)
            node = node.parent

    def dropped(self, node: LayoutTreeNode[MetadataT]) -> None:
        """The copy of `node` is about to be given up."""
        if node.host_ref_counter == 0:
            self._count(node, sub)

    def _count(self, node: LayoutTreeNode[MetadataT], step: Callable[[int, int], int]) -> None:
        if node.metadata is not None:
            self.lane_pages = list(map(step, self.lane_pages, node.copy_pages))
