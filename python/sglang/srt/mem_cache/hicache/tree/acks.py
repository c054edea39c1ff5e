"""`Transfers`: copies from submission until their acks are settled, and the locks that they hold meanwhile.

Transfers end at different times on different ranks, so an ack is settled when every rank has seen the end of its copy.
That takes the one collective of the cache, in every turn of the event loop, whatever is pending.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic

from sglang.srt.disaggregation.kv_events import StorageMedium

from sglang.srt.mem_cache.layouts.protocol import MetadataT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang.srt.managers.cache_controller import HiCacheAck
    from sglang.srt.mem_cache.events import KVCacheEventRecorder

    from ..agreement import Agreement
    from .accounting import Accounting
    from .in_flight import InFlight
    from .node import LayoutTreeNode
    from .protocols import CopyController
    from .report import TrafficReport


class Transfers(Generic[MetadataT]):
    """Backups and loads under way. `in_flight` lists them."""

    def __init__(
        self,
        controller: CopyController[MetadataT],
        *,
        agreement: Agreement,
        accounting: Accounting[MetadataT],
        in_flight: InFlight[MetadataT],
        events: KVCacheEventRecorder,
        report: TrafficReport,
    ) -> None:
        self.in_flight = in_flight
        self._controller = controller
        self.agreement = agreement
        self._accounting = accounting
        self._events = events
        self._report = report

    # Queued and submitted.

    def begin_backup(self, node: LayoutTreeNode[MetadataT], *, locked: bool) -> None:
        """The copy of `node` to the host was queued; with `locked`, the node is kept until it is settled."""
        self.in_flight.begin_backup(node, locked=locked)
        if locked:
            self._accounting.lock(node)

    def begin_load(self, last: LayoutTreeNode[MetadataT], above: LayoutTreeNode[MetadataT]) -> None:
        """The nodes from `last` up to, but without, `above` are to be loaded; they are kept until it is settled."""
        self.in_flight.begin_load(last, above)
        self._accounting.lock(last)

    def submit_backups(self) -> None:
        """Submit the queued backups as one copy. Every rank does so at the same points, so their acks are alike."""
        self._controller.start_writing()

    # Settled.

    def settle(self) -> None:
        """Submit what is queued, and settle what has finished on every rank: one reduction, whatever is pending."""
        controller = self._controller
        controller.start_writing()
        backups, loads = self.agreement.minimum(
            [ready_acks(controller.ack_write_queue), ready_acks(controller.ack_load_queue)]
        )
        self._settle_backups(backups)
        self._settle_loads(loads)

    def settle_backups(self) -> None:
        """`settle` for backups alone, by a reduction of their own."""
        self._controller.start_writing()
        self._settle_backups(self.agreement.minimum([ready_acks(self._controller.ack_write_queue)])[0])

    def settle_loads(self) -> None:
        """Settle the loads that have finished on every rank, by a reduction of their own."""
        self._settle_loads(self.agreement.minimum([ready_acks(self._controller.ack_load_queue)])[0])

    def finish_backups(self) -> None:
        """Wait for all backups and settle them, without a reduction: every rank does so."""
        self._controller.start_writing()
        self._settle_backups(len(self._controller.ack_write_queue))

    def finish_backup(self, node: LayoutTreeNode[MetadataT]) -> None:
        """Wait for a backup of `node` that is under way, and settle it and those before it. No reduction either."""
        self._controller.start_writing()
        while self.in_flight.is_copied(node):
            self._settle_backups(1)

    def _settle_backups(self, count: int) -> None:
        _settle(self._controller.ack_write_queue, count, report=self._report.backed_up, end=self._end_backup)

    def _settle_loads(self, count: int) -> None:
        _settle(self._controller.ack_load_queue, count, report=self._report.loaded, end=self._end_load)

    def _end_backup(self, backup_id: int) -> None:
        backup = self.in_flight.end_backup(backup_id)
        if not any(part.metadata is not None and len(part.metadata.host_pages) for part in backup.parts):
            self._report.stats.zero_owned_backups += 1
        for part in backup.parts:
            self._events.record_store(part, medium=StorageMedium.CPU)
        self._accounting.host_copies.release(backup.node)
        if backup.locked:
            self._accounting.unlock(backup.node)

    def _end_load(self, load_id: int) -> None:
        load = self.in_flight.end_load(load_id)
        self._accounting.host_copies.release(load.last)
        self._accounting.unlock(load.last)


def _settle(
    queue: list[HiCacheAck], count: int, *, report: Callable[[HiCacheAck], None], end: Callable[[int], None]
) -> None:
    """The first `count` acks: wait for the copy, count it, and end each transfer that it stands for."""
    for _ in range(count):
        ack = queue.pop(0)
        ack.finish_event.synchronize()
        report(ack)
        for transfer_id in ack.node_ids:
            end(transfer_id)


def ready_acks(queue: Sequence[HiCacheAck]) -> int:
    """Acks at the head of the queue whose copies have finished on this rank."""
    for ready, ack in enumerate(queue):
        if not ack.finish_event.query():
            return ready
    return len(queue)
