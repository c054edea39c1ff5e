"""`Backups`: when a node is copied to the host, and what refuses it. Each decision comes from mirrored state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic

from sglang.srt.mem_cache.layouts.errors import LayoutInvariantError
from sglang.srt.mem_cache.layouts.protocol import MetadataT

from ..host.ledger import HostShortfall

if TYPE_CHECKING:
    from ..settings import HiCacheSettings
    from .accounting import Accounting
    from .host_room import HostRoom
    from .node import LayoutTreeNode
    from .protocols import CopyController
    from .report import TrafficReport
    from .transfers import Transfers


class Backups(Generic[MetadataT]):
    """The way from the device to the host."""

    def __init__(
        self,
        controller: CopyController[MetadataT],
        *,
        settings: HiCacheSettings,
        accounting: Accounting[MetadataT],
        host_room: HostRoom[MetadataT],
        transfers: Transfers[MetadataT],
        report: TrafficReport,
    ) -> None:
        self._controller = controller
        self._counts_uses = settings.write_policy != "write_back"
        self._threshold = settings.write_through_threshold
        self._accounting = accounting
        self._host_room = host_room
        self._transfers = transfers
        self._report = report

    def use(self, node: LayoutTreeNode[MetadataT]) -> None:
        """A request reused or made `node`, which is backed up when that has happened often enough."""
        if not self._counts_uses:
            return
        node.hit_count += 1
        self._accounting.touch(node)
        if not node.backuped and node.hit_count >= self._threshold:
            self.back_up(node)

    def back_up(self, node: LayoutTreeNode[MetadataT], *, leaving: bool = False) -> int:
        """Copy a node to the host, making room there if needed. Returns its logical tokens, 0 if refused.

        The node is locked until the ack, and its parent must be backed up already, so that host copies form prefixes;
        neither holds for one that is `leaving` the device. Refused on all ranks alike, with the node unchanged. Raises
        `LayoutInvariantError` if ledger, metadata and node contradict each other.
        """
        if not leaving and node.parent is not None and not node.parent.backuped:
            return 0
        outcome = self._controller.write(node.slot_pages, node_id=node.id)
        if isinstance(outcome, HostShortfall):
            if not self._host_room.make(outcome.plan.demand_pages):
                self._report.stats.refused_backups += 1
                return 0
            outcome = self._controller.write_plan(outcome.plan, node_id=node.id)
        if isinstance(outcome, HostShortfall):
            raise LayoutInvariantError(
                f"room was made for {outcome.plan.demand_pages} pages, yet {outcome.missing_pages} are missing"
            )
        if outcome.logical_len != node.tokens:
            raise LayoutInvariantError(f"metadata of {outcome.logical_len} tokens for node {node.id} of {node.tokens}")
        node.set_metadata(outcome)
        self._accounting.refresh_path(node)
        self._transfers.begin_backup(node, locked=not leaving)
        return node.tokens
