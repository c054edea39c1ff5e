"""What the tree needs of the copies below it. `controller.HiCacheController` is it; who only counts may be too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from sglang.srt.mem_cache.layouts.protocol import MetadataT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang.srt.managers.cache_controller import HiCacheAck

    from sglang.srt.mem_cache.layouts.pages import PageArray
    from sglang.srt.mem_cache.layouts.plans import BackupPlan

    from ..host.ledger import HostLedger, HostShortfall


class CopyController(Protocol[MetadataT]):
    """Host memory that holds nodes, and copies to it and back. Every outcome is the same on all ranks.

    `ledger` is asked, never changed. Each ack queue has the acks of submitted copies, in order; who settles one removes
    it.
    """

    ledger: HostLedger
    ack_write_queue: list[HiCacheAck]
    ack_load_queue: list[HiCacheAck]

    def write(self, slot_pages: PageArray, *, node_id: int) -> MetadataT | HostShortfall:
        """Queue a copy of pages to the host: their metadata, or a shortfall, with nothing changed."""
        ...

    def write_plan(self, plan: BackupPlan, *, node_id: int) -> MetadataT | HostShortfall:
        """`write` for pages whose plan is made."""
        ...

    def start_writing(self) -> None:
        """Submit the queued backups as one copy with one ack, if there are any."""
        ...

    def load(self, parts: Sequence[MetadataT], *, node_id: int) -> PageArray | None:
        """Slot pages for nodes on the host, with their copy queued, or None, with nothing changed."""
        ...

    def release_host(self, metadata: MetadataT) -> int:
        """Free a node's host pages. Returns its logical tokens."""
        ...
