"""`HiCacheController`: ask the strategy for a plan, check it against the ledger, submit it, settle the ack.

Nothing here knows which layout it has. The order of every step is the same on all ranks, and each step's
outcome is computed from mirrored state:

    write   plan -> ledger admits? -> host pages -> queue          (or a `HostShortfall`, nothing changed)
    load    plan -> lanes have room? -> slots -> queue             (or None, nothing changed)
    start_writing, start_loading   one submission for all that is queued -> one ack with all their ids
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic

from sglang.srt.managers import cache_controller
from sglang.srt.managers.cache_controller import HiCacheAck
from sglang.srt.managers.cache_controller import HiCacheController as SGLangHiCacheController
from sglang.srt.mem_cache.hicache_storage import PoolName
from typing_extensions import override

from sglang.srt.mem_cache.layouts.errors import LayoutInvariantError
from sglang.srt.mem_cache.layouts.plans import CopyPlan
from sglang.srt.mem_cache.layouts.protocol import KVLayoutStrategy, MetadataT

from .host.ledger import HostShortfall

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence

    import torch
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.l2_transfer import TransferCompletion

    from sglang.srt.mem_cache.layouts.pages import PageArray
    from sglang.srt.mem_cache.layouts.plans import BackupPlan

    from .copies.transfer import Transfer
    from .host.free_pages import HostPages
    from .host.ledger import HostLedger
    from .host.pools import AnyHostPool
    from .settings import HiCacheSettings
    from .slots.allocator import SlotAllocator


@dataclass(frozen=True, slots=True, kw_only=True)
class _QueuedCopy:
    node_id: int
    logical_tokens: int
    copies: CopyPlan


class HiCacheController(SGLangHiCacheController, Generic[MetadataT]):
    """SGLang's controller with the layout's plans in place of "every index is copied".

    `ledger` has the capacity of the smallest host pool of the group, `host_pages` the free pages of this rank's, and
    `transfer` copies. Raises `LayoutInvariantError` if host pool and ledger ever disagree.
    """

    def __init__(
        self,
        params: CacheInitParams,
        *,
        layout: KVLayoutStrategy[MetadataT],
        settings: HiCacheSettings,
        slots: SlotAllocator,
        host_pool: AnyHostPool,
        host_pages: HostPages,
        ledger: HostLedger,
        transfer: Transfer,
        load_cache_event: threading.Event,
    ) -> None:
        super().__init__(
            params.token_to_kv_pool_allocator,
            host_pool,
            layout.page_size,
            params.tp_cache_group,
            load_cache_event=load_cache_event,
            attn_cp_group=params.attn_cp_cache_group,
            attn_tp_group=params.attn_tp_cache_group,
            pp_group=params.pp_cache_group,
            write_policy=settings.write_policy,
            io_backend=settings.io_backend,
            storage_backend=None,
            model_name=settings.model_name,
        )
        self.layout = layout
        self.slots = slots
        self.transfer = transfer
        self.l2_transfer_engine = transfer.engine
        self.host_pages = host_pages
        self.ledger = ledger
        self._surplus_pages = host_pages.free - ledger.capacity_pages
        self._queued_backups: list[_QueuedCopy] = []
        self._queued_loads: list[_QueuedCopy] = []
        self._forward_done = cache_controller.device_module.Event()  # one: a wait means the last record before it

    # Device to host.

    # Only our tree calls `write` and `load` of this class, so they take pages and metadata, not SGLang's index tensors.
    @override
    def write(self, slot_pages: PageArray, *, node_id: int) -> MetadataT | HostShortfall:  # type: ignore[override]
        """Back up a node whose logical pages are `slot_pages`, shape ``[pages]``, and queue its copy.

        Returns the node's metadata, or a `HostShortfall`, with nothing changed. The copy starts with `start_writing`,
        which acknowledges `node_id` on every rank, also where the rank owns nothing.
        """
        return self.write_plan(self.layout.plan_backup(slot_pages), node_id=node_id)

    def write_plan(self, plan: BackupPlan, *, node_id: int) -> MetadataT | HostShortfall:
        """`write` for a node whose plan is made: one that was not admitted before."""
        if not self.ledger.admits(plan.demand_pages):
            return HostShortfall(plan=plan, missing_pages=self.ledger.missing_pages(plan.demand_pages))
        host_pages = self._alloc_host(plan.owned_pages)
        self.ledger.take(plan.demand_pages)
        self._check_ledger()
        metadata = self.layout.finish_backup(plan, host_pages)
        copies = plan.bind(host_pages)
        self._queued_backups.append(
            _QueuedCopy(node_id=node_id, logical_tokens=plan.logical_tokens, copies=copies),
        )
        return metadata

    @override
    def start_writing(self) -> None:
        """Submit every queued backup as one copy; one ack carries all their ids."""
        if not self._queued_backups:
            return
        backups, self._queued_backups = self._queued_backups, []
        # A forward pass under way may still write the last row of a request that has ended: it was in the next batch.
        self._after_forward(self.transfer.engine.device_to_host_stream)
        copies = self._merged(backups)
        self.ack_write_queue.append(self._ack(self.transfer.back_up(copies), backups, copies))

    # Host to device.

    @override
    def load(self, parts: Sequence[MetadataT], *, node_id: int) -> PageArray | None:  # type: ignore[override]  # ditto
        """Allocate slots for the nodes that `parts` describe, in order, and queue their copy.

        Returns the logical pages of all nodes, shape ``[pages]``, or None, with nothing changed, if a lane is
        short. The copy starts with `start_loading`, which acknowledges `node_id`.
        """
        slot_pages = self.slots.alloc_lanes(self.layout.load_lanes(parts))
        if slot_pages is None:
            return None
        plan = self.layout.plan_load(parts, slot_pages)
        self._queued_loads.append(
            _QueuedCopy(node_id=node_id, logical_tokens=plan.logical_tokens, copies=plan.copies),
        )
        return slot_pages

    @override
    def start_loading(self) -> int:
        """Submit every queued load as one transfer; one ack carries all their ids.

        Returns the index of the layer counter that a forward pass must wait on, or -1 if nothing is queued.
        """
        if not self._queued_loads:
            return -1
        loads, self._queued_loads = self._queued_loads, []
        producer_index = self.layer_done_counter.update_producer()
        producer = self.layer_done_counter.events[producer_index]
        producer.start_event.record()
        # A forward pass under way may still write pages that were freed and handed out again.
        self._after_forward(self.transfer.engine.host_to_device_stream)
        copies = self._merged(loads)
        self.ack_load_queue.append(self._ack(self.transfer.load(copies, producer), loads, copies))
        return producer_index

    # Both tiers.

    def has_inflight_device_transfers(self) -> bool:
        """Whether a copy that is queued, or not settled, still needs its rows on the device."""
        return bool(self._queued_backups or self._queued_loads or self.ack_write_queue or self.ack_load_queue)

    def release_host(self, metadata: MetadataT) -> int:
        """Free the host pages of a node on every rank. Returns its logical tokens.

        Raises `LayoutInvariantError` if the pool and the ledger disagree afterwards.
        """
        self.host_pages.give(metadata.host_pages)
        self.ledger.give(metadata.pages_per_lane)
        self._check_ledger()
        return metadata.logical_len

    @override
    def reset(self) -> None:
        """Wait for the copies under way, drop queued work and acks, and give all host memory back."""
        self.wait_for_copies()
        super().reset()
        self._queued_backups.clear()
        self._queued_loads.clear()
        self.mem_pool_host.clear()
        self.ledger.clear()
        self._check_ledger()

    def wait_for_copies(self) -> None:
        """Wait until the copies that were submitted have ended. Their acks stay where they are."""
        for ack in (*self.ack_write_queue, *self.ack_load_queue):
            ack.finish_event.synchronize()

    def _after_forward(self, stream: torch.Stream) -> None:
        """Whatever `stream` is given from now on comes after the forward passes that were launched so far.

        The scheduler says on which stream they are; overlap scheduling leaves one under way. Nothing waits here.
        """
        if self.load_fence_stream is not None:
            self._forward_done.record(self.load_fence_stream)
            self._forward_done.wait(stream)

    def _alloc_host(self, pages: int) -> PageArray:
        host_pages = self.host_pages.take(pages)
        if host_pages is None:
            raise LayoutInvariantError(
                f"ledger admitted {pages} host pages with {self.ledger.free_pages} free, "
                f"but the host pool has {self.host_pages.free}"
            )
        return host_pages

    def _check_ledger(self) -> None:
        booked = self.ledger.free_in(self.layout.lane) + self._surplus_pages
        actual = self.host_pages.free
        if booked != actual:
            raise LayoutInvariantError(f"ledger has {booked} free host pages for this rank, its host pool {actual}")

    def _merged(self, queued: Sequence[_QueuedCopy]) -> CopyPlan:
        return CopyPlan.concat([each.copies for each in queued], page_size=self.page_size)

    def _ack(self, completion: TransferCompletion, queued: Sequence[_QueuedCopy], copies: CopyPlan) -> HiCacheAck:
        """Tokens are logical, equal on all ranks; bytes are what this rank moves."""
        tokens = sum(each.logical_tokens for each in queued)
        return HiCacheAck(
            start_event=completion.start_event,
            finish_event=completion.finish_event,
            node_ids=[each.node_id for each in queued],
            num_tokens=tokens,
            timing_enabled=completion.timing_enabled,
            num_tokens_by_pool={PoolName.KV.value: tokens},
            num_bytes=copies.tokens * self.transfer.bytes_per_token,
        )
