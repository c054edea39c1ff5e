"""`HostRoom`: making room on the host, lane by lane: mirrors are given up, then leaves that only the host has.

Which copies may go, and in which order, is `host_copies`' to say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic

from sglang.srt.disaggregation.kv_events import StorageMedium

from sglang.srt.mem_cache.layouts.errors import LayoutInvariantError
from sglang.srt.mem_cache.layouts.protocol import MetadataT

from .node import LayoutTreeNode, parent_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang.srt.mem_cache.events import KVCacheEventRecorder

    from .accounting import Accounting
    from .protocols import CopyController
    from .radix_tree import LayoutRadixTree
    from .report import TrafficReport


class HostRoom(Generic[MetadataT]):
    """Host memory of a tree, from the side that gives it up."""

    def __init__(
        self,
        controller: CopyController[MetadataT],
        *,
        tree: LayoutRadixTree[MetadataT],
        accounting: Accounting[MetadataT],
        events: KVCacheEventRecorder,
        report: TrafficReport,
    ) -> None:
        self._controller = controller
        self._tree = tree
        self._accounting = accounting
        self._events = events
        self._report = report

    def make(self, demand_pages: Sequence[int], *, below: LayoutTreeNode[MetadataT]) -> bool:
        """Give up host copies until every lane has room for `demand_pages`; False, with none gone, if that cannot be.

        Not those of `below` and above it, under which the pages will lie. Progress is physical room in each lane,
        whatever the logical length of the nodes that go.
        """
        if self._controller.ledger.admits(demand_pages):
            return True
        copies = self._accounting.host_copies
        copies.hold(below)
        made = self._give_up_copies(demand_pages)
        copies.release(below)
        return made

    def _give_up_copies(self, demand_pages: Sequence[int]) -> bool:
        ledger, copies = self._controller.ledger, self._accounting.host_copies
        if not copies.can_make(ledger.missing_pages(demand_pages)):
            return False
        while not ledger.admits(demand_pages):
            node = copies.pop_first(ledger.missing_pages(demand_pages))
            if node is None:
                return False
            if node.value is None:
                self._delete_leaf(node)
            else:
                self.drop_copy(node)
                self._accounting.refresh(parent_of(node))
        return True

    def evict(self, num_tokens: int) -> int:
        """Delete host-only leaves of at least `num_tokens` logical tokens. Returns the tokens deleted."""
        deleted = 0
        while deleted < num_tokens and (node := self._accounting.host_order.pop_first()) is not None:
            deleted += self._delete_leaf(node)
        return deleted

    def drop_copy(self, node: LayoutTreeNode[MetadataT]) -> int:
        """Free the host pages of `node`, which forgets its copy. Returns its logical tokens.

        Raises `LayoutInvariantError` if it has none.
        """
        if node.metadata is None:
            raise LayoutInvariantError(f"node {node.id} has no host copy to drop")
        self._events.record_remove(node, medium=StorageMedium.CPU)
        self._accounting.host_copies.dropped(node)
        tokens = self._controller.release_host(node.metadata)
        self._report.stats.evicted_host_tokens += tokens
        node.clear_metadata()
        self._accounting.refresh(node)
        return tokens

    def _delete_leaf(self, node: LayoutTreeNode[MetadataT]) -> int:
        tokens = self.drop_copy(node)
        self._tree.unlink(node)
        return tokens
