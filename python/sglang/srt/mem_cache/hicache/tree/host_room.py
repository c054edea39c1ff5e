"""`HostRoom`: who leaves the host. Room is made lane by lane, by deleting leaves that only the host has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic

from sglang.srt.disaggregation.kv_events import StorageMedium

from sglang.srt.mem_cache.layouts.errors import LayoutInvariantError
from sglang.srt.mem_cache.layouts.protocol import MetadataT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang.srt.mem_cache.events import KVCacheEventRecorder

    from .accounting import Accounting
    from .node import LayoutTreeNode
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

    def make(self, demand_pages: Sequence[int]) -> bool:
        """Delete host-only leaves until every lane has room for `demand_pages`; False if that cannot be.

        Progress is physical room in each lane, whatever the logical length of the nodes that go.
        """
        ledger = self._controller.ledger
        if not ledger.ever_admits(demand_pages):
            return False
        while not ledger.admits(demand_pages):
            node = self._accounting.host_order.pop_first()
            if node is None:
                return False
            self._delete_leaf(node)
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
        tokens = self._controller.release_host(node.metadata)
        self._report.stats.evicted_host_tokens += tokens
        node.clear_metadata()
        self._accounting.refresh(node)
        return tokens

    def _delete_leaf(self, node: LayoutTreeNode[MetadataT]) -> int:
        tokens = self.drop_copy(node)
        self._tree.unlink(node)
        return tokens
