"""`Backups`: when a node is copied to the host, and what refuses it.

While the host has room, a node that is used is backed up early and can leave the device at once. When it is full, no
copy is displaced for a node that stays on the device anyway: the node is backed up shortly before it leaves (see
`copies_ahead`), or else on its way out. Each decision comes from mirrored state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic

from sglang.srt.mem_cache.layouts.capabilities import has_host_lanes
from sglang.srt.mem_cache.layouts.errors import LayoutInvariantError
from sglang.srt.mem_cache.layouts.protocol import KVLayoutStrategy, MetadataT

from ..host.ledger import HostShortfall
from .node import LayoutTreeNode, parent_of

if TYPE_CHECKING:
    from ..settings import HiCacheSettings
    from .accounting import Accounting
    from .acks import Transfers
    from .host_room import HostRoom
    from .protocols import CopyController
    from .report import TrafficReport


class Backups(Generic[MetadataT]):
    """The way from the device to the host.

    `put_off` is set when a backup had to be put off for want of host room, or came late; `CopiesAhead` clears it.
    """

    def __init__(
        self,
        controller: CopyController[MetadataT],
        *,
        layout: KVLayoutStrategy[MetadataT],
        settings: HiCacheSettings,
        accounting: Accounting[MetadataT],
        host_room: HostRoom[MetadataT],
        transfers: Transfers[MetadataT],
        report: TrafficReport,
    ) -> None:
        self._controller = controller
        self._layout = layout
        self._demand_is_known = not has_host_lanes(layout)
        self._writes_back = settings.write_policy == "write_back"
        self._threshold = settings.write_through_threshold
        self._accounting = accounting
        self._host_room = host_room
        self._transfers = transfers
        self._report = report
        self.put_off = False

    def use(self, node: LayoutTreeNode[MetadataT]) -> None:
        """A request reused, made or computed `node` again, which is backed up when that has happened often enough."""
        node.hit_count += 1
        self._accounting.touch(node)
        if not self._writes_back and not node.backuped and self.earns_a_copy(node):
            self.back_up(node)

    def earns_a_copy(self, node: LayoutTreeNode[MetadataT]) -> bool:
        """Whether a node that leaves the device without a copy is to get one."""
        return self._writes_back or node.hit_count >= self._threshold

    def back_up(self, node: LayoutTreeNode[MetadataT]) -> int:
        """Copy a node to the host. Returns its logical tokens, 0 if that is put off, with nothing changed.

        Into free host pages and below a parent that is backed up, so that host copies form prefixes; the node is
        locked until the ack. Put off on all ranks alike. Raises `LayoutInvariantError` if metadata and node contradict
        each other.
        """
        if not parent_of(node).backuped:
            return 0
        if not self._may_fit(node):
            self.put_off = True
            return 0
        outcome = self._controller.write(node.slot_pages, node_id=node.id)
        if isinstance(outcome, HostShortfall):
            self.put_off = True
            return 0
        self._begin(node, outcome, locked=True)
        return node.tokens

    def _may_fit(self, node: LayoutTreeNode[MetadataT]) -> bool:
        """Whether a plan, which costs more than a look at the ledger, is worth making.

        Where both tiers have the same owners, a plan demands what the node has in each lane.
        """
        ledger = self._controller.ledger
        if self._demand_is_known:
            return ledger.admits(self._accounting.lane_pages(node).tolist())
        return len(node.slot_pages) <= sum(ledger.free_pages)

    def back_up_leaving(self, leaf: LayoutTreeNode[MetadataT]) -> int:
        """`back_up_path` of a leaf that is about to leave the device, and waits for it. Returns its tokens, or 0."""
        self.put_off = True
        nodes = self.back_up_path(leaf)
        self._report.stats.late_backups += nodes
        self._report.stats.refused_backups += not nodes
        return leaf.tokens if nodes else 0

    def back_up_path(self, leaf: LayoutTreeNode[MetadataT]) -> int:
        """Copy a leaf of the device without locking it, making room on the host if needed.

        Returns the nodes copied, or 0, with nothing changed, if refused. Except under write_back, host copies form
        prefixes: what has none above it is copied too. The slots of all these nodes are read until the acks are
        settled. Raises `LayoutInvariantError` if ledger, metadata and node contradict each other.
        """
        nodes = [leaf]
        while not self._writes_back and not parent_of(nodes[-1]).backuped:
            nodes.append(parent_of(nodes[-1]))
        nodes.reverse()
        plans = [self._layout.plan_backup(node.slot_pages) for node in nodes]
        demand = [sum(pages) for pages in zip(*(plan.demand_pages for plan in plans), strict=True)]
        if not self._host_room.make(demand, below=parent_of(nodes[0])):
            return 0
        for node, plan in zip(nodes, plans, strict=True):
            outcome = self._controller.write_plan(plan, node_id=node.id)
            if isinstance(outcome, HostShortfall):
                raise LayoutInvariantError(
                    f"room was made for {plan.demand_pages} pages, yet {outcome.missing_pages} are missing"
                )
            self._begin(node, outcome, locked=False)
        return len(nodes)

    def submit(self) -> None:
        """See `Transfers.submit_backups`."""
        self._transfers.submit_backups()

    def _begin(self, node: LayoutTreeNode[MetadataT], metadata: MetadataT, *, locked: bool) -> None:
        if metadata.logical_len != node.tokens:
            raise LayoutInvariantError(f"metadata of {metadata.logical_len} tokens for node {node.id} of {node.tokens}")
        self._accounting.host_copies.hold(node)
        node.set_metadata(metadata)
        self._accounting.refresh_path(node)
        self._transfers.begin_backup(node, locked=locked)
