"""`HiRadixCache`: SGLang's hierarchical radix cache with a layout strategy.

The layout strategy says where pages belong, the controller moves them, the tree of `radix_tree` remembers. The
policy is the same for every layout and on every rank::

      insert / hit           evict                     match + load_back
    ───────────────▶ device ───────▶ host only ─────────────────────────────▶ device
         │ hits reach the threshold      │ host memory is needed
         ▼                               ▼
      backup (locked until the ack)   deleted

The way down (backup, eviction) is in `tiers`; here are construction, the way back up, and the settling of
acknowledgements, which holds the one collective. Every quota and threshold is in logical tokens.
"""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, TypeAlias

from sglang.srt.disaggregation.kv_events import StorageMedium

from sglang.srt.mem_cache.layouts.errors import LayoutInvariantError
from sglang.srt.mem_cache.layouts.protocol import KVLayoutStrategy, MetadataT

from .agreement import Agreement, RankAgreement
from .controller import HiCacheController
from .environment import agreement_groups, observe_environment
from .host.pools import build_host_pool, release_host_pool
from .no_storage import NoStorageTier, refuse_storage_backend
from .slots.allocator import slot_allocator
from .tree.in_flight import InFlight
from .tree.stats import CacheStats
from .tree.tiers import TieredRadixTree, ack_seconds, ready_acks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch
    from sglang.srt.managers.cache_controller import HiCacheAck
    from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

    from sglang.srt.mem_cache.layouts.pages import PageArray

    from .settings import HiCacheSettings, ShardGroup
    from .tree.in_flight import Backup, LoadBack
    from .tree.node import LayoutTreeNode
    from .tree.request_pages import RequestPages

logger = logging.getLogger(__name__)

SchedulerRequest: TypeAlias = Any  # what has the attributes of SGLang's `Req`


class HiRadixCache(NoStorageTier, TieredRadixTree[MetadataT], Generic[MetadataT]):
    """A radix cache with a host tier whose pages a layout strategy places.

    `layout` is the one strategy object that allocator, controller and tree share; `group` the ranks that it
    shards over; `agreement` replaces SGLang's process groups as the way to compare ranks. Raises
    `LayoutConfigError`, before any host memory is taken, if the strategy refuses the pool, the allocator or the
    group, and for a storage backend.
    """

    reporter: Callable[[], None] | None = None  # called after each settling; publishes metrics in a server
    request_pages: RequestPages | None = None  # in a server: what the allocator of this cache records
    _row_pages: PageArray | None = None  # of the request that is being put into the tree

    def __init__(
        self,
        params: CacheInitParams,
        *,
        layout: KVLayoutStrategy[MetadataT],
        settings: HiCacheSettings,
        group: ShardGroup,
        agreement: Agreement | None = None,
    ) -> None:
        allocator = params.token_to_kv_pool_allocator
        self.slots = slot_allocator(allocator)
        layout.validate(observe_environment(params, self.slots, settings, group))
        refuse_storage_backend(layout, settings.storage_backend)
        self.settings = settings
        self.agreement = agreement or RankAgreement(
            agreement_groups(params),
            pp_group=params.pp_cache_group,
            pp_rank=params.pp_rank,
            pp_size=params.pp_size,
            peer_seconds=settings.peer_seconds,
        )
        self.token_to_kv_pool_host = build_host_pool(
            allocator.get_kvcache(),
            ratio=settings.host_ratio,
            size_gb=settings.host_gb,
            page_size=layout.page_size,
            mem_layout=settings.mem_layout,
            ranks_on_machine=settings.ranks_on_machine,
            budget=settings.host_budget,
        )
        self.load_cache_event = threading.Event()
        self.cache_controller: HiCacheController[MetadataT] = HiCacheController(
            layout=layout,
            params=params,
            slots=self.slots,
            host_pool=self.token_to_kv_pool_host,
            agreement=self.agreement,
            settings=settings,
            load_cache_event=self.load_cache_event,
        )
        self.in_flight: InFlight[MetadataT] = InFlight()
        self.stats = CacheStats()
        super().__init__(params, layout)

    def init_metrics_collector(self) -> None:
        """None yet: SGLang's knows no rank. A server gives the cache one that does (`metrics.traffic_collector`)."""

    def reset(self) -> None:
        """Drop the whole cache, transfers under way included, and give all host memory back.

        Slots are not freed: SGLang clears the slot allocator beside the tree.
        """
        self.cache_controller.reset()
        self.in_flight.clear()
        if self.request_pages is not None:
            self.request_pages.clear()
        super().reset()

    def release_host_resources(self) -> None:
        """Unregister pinned host memory before the process ends, when the copies under way have ended."""
        self.cache_controller.wait_for_copies()
        release_host_pool(self.token_to_kv_pool_host)

    # Requests are put into the tree: SGLang reads their rows on the device, the page numbers are known here.

    def cache_finished_req(self, req: SchedulerRequest, is_insert: bool = True, *, kv_len_to_handle: int) -> None:
        """Put the whole pages of a request that has ended into the tree, or give all back, and unlock its prefix."""
        row = req.kv.req_pool_idx
        with self._pages_known(req, kv_len_to_handle):
            super().cache_finished_req(req, is_insert, kv_len_to_handle=kv_len_to_handle)
        if self.request_pages is not None and row is not None:
            self.request_pages.end(row, -(-kv_len_to_handle // self.page_size))

    def cache_unfinished_req(self, req: SchedulerRequest, chunked: bool = False) -> None:
        """Put the whole pages of a request that goes on into the tree, and lock them for it."""
        with self._pages_known(req, len(req.get_fill_ids())):
            super().cache_unfinished_req(req, chunked)
        if self.request_pages is not None and req.kv.req_pool_idx is not None:
            self.request_pages.keep_from(req.kv.req_pool_idx, req.kv.cache_protected_len // self.page_size)

    @contextmanager
    def _pages_known(self, req: SchedulerRequest, tokens: int) -> Iterator[None]:
        """Within the block, `insert` is called with the first slots of `req`, `tokens` at most."""
        if self.request_pages is not None:
            self._row_pages = self.request_pages.of(req.kv, req.last_node, tokens)
        try:
            yield
        finally:
            self._row_pages = None

    def _slot_pages_of(self, value: torch.Tensor) -> PageArray:
        if self._row_pages is not None:
            return self._row_pages
        if self.request_pages is not None:
            self.request_pages.count_read("page numbers of a request")
        return super()._slot_pages_of(value)

    # What the scheduler asks before it calls itself idle.

    @property
    def ongoing_write_through(self) -> Mapping[int, Backup[MetadataT]]:
        """Backups whose ack is not settled, by id."""
        return self.in_flight.backups

    @property
    def ongoing_load_back(self) -> Mapping[int, LoadBack[MetadataT]]:
        """Loads whose ack is not settled, by id."""
        return self.in_flight.loads

    # Load back.

    def load_back(self, node: LayoutTreeNode[MetadataT], mem_quota: int | None = None) -> torch.Tensor | None:
        """Bring `node` and its evicted ancestors back to the device; all of them or none.

        Returns their slots, int64, shape ``[tokens]``, on the pool's device, with the copy queued until
        `ready_to_load_host_cache`, or None, with every lock as before, if the hit is below the threshold, above
        `mem_quota` (logical tokens that the caller may use), finds no room, or was deleted after the caller's match.
        Raises `LayoutInvariantError`, with nothing changed, if no ancestor is on the device.
        """
        nodes: list[LayoutTreeNode[MetadataT]] = []
        above = node
        while above.value is None:
            nodes.insert(0, above)
            if above.parent is None:
                raise LayoutInvariantError(f"node {node.id} has no ancestor on the device")
            above = above.parent
        if not nodes or any(evicted.metadata is None for evicted in nodes):
            return None
        host_hit_length = sum(evicted.host_len for evicted in nodes)
        locked = self._lock(above, 1)
        over_quota = mem_quota is not None and host_hit_length > mem_quota + locked
        if host_hit_length < self.settings.load_back_threshold or over_quota:
            self._lock(above, -1)
            return None
        slot_pages = self._load_nodes(nodes, node.id)
        self._lock(above, -1)
        if slot_pages is None:
            return None
        value = self._give_slots(nodes, slot_pages)
        self.in_flight.begin_load(node, above)
        self._lock(node, 1)
        return value

    def _load_nodes(self, nodes: Sequence[LayoutTreeNode[MetadataT]], load_id: int) -> PageArray | None:
        """Allocate and queue, evicting if a lane is short. The nodes stay protected if, and only if, it works."""
        parts = [_metadata_of(node) for node in nodes]
        for node in nodes:
            node.protect_host()
            self._refresh(node)
        slot_pages = self.cache_controller.load(parts, node_id=load_id)
        if slot_pages is None:
            self.make_device_room(self.layout.load_lanes(parts))
            slot_pages = self.cache_controller.load(parts, node_id=load_id)
        if slot_pages is None:
            logger.warning(
                "load_back: no room for %d tokens of node %d even after eviction; recomputing (%d tokens evictable)",
                sum(part.logical_len for part in parts),
                load_id,
                self.evictable_size_,
            )
            self.stats.refused_loads += 1
            self._unprotect(nodes)
        return slot_pages

    def _give_slots(self, nodes: Sequence[LayoutTreeNode[MetadataT]], slot_pages: PageArray) -> torch.Tensor:
        value = self.slots.slots(slot_pages)
        page = 0
        for node in nodes:
            pages = node.tokens // self.page_size
            own = slot_pages[page : page + pages].copy()
            self._put_on_device(node, value[page * self.page_size : (page + pages) * self.page_size].clone(), own)
            self.kv_events.record_store(node, medium=StorageMedium.GPU)
            page += pages
        return value

    def _unprotect(self, nodes: Sequence[LayoutTreeNode[MetadataT]]) -> None:
        for node in nodes:
            node.release_host()
            self._refresh(node)

    def init_load_back(self, params: InitLoadBackParams) -> tuple[torch.Tensor, LayoutTreeNode[MetadataT]]:
        """Load back what a match found on the host.

        Returns the new slots, int64, shape ``[tokens]``, on the pool's device, empty if nothing was loaded, and the
        deepest node on the device.
        """
        node: LayoutTreeNode[MetadataT] = params.best_match_node
        if node.value is None:
            value = self.load_back(node, params.mem_quota)
            if value is not None:
                return value, node
        while node.value is None and node.parent is not None:
            node = node.parent
        return self._empty_match_result.device_indices, node

    def ready_to_load_host_cache(self) -> int:
        """Start the queued loads; returns the layer counter to wait on, or -1."""
        return self.cache_controller.start_loading()

    # Acknowledgements.

    def check_hicache_events(self) -> None:
        """Settle the transfers that have finished on every rank: one reduction, whatever is pending."""
        controller = self.cache_controller
        writes, loads = self.agreement.minimum(
            [ready_acks(controller.ack_write_queue), ready_acks(controller.ack_load_queue)]
        )
        self._settle_writes(writes)
        self._settle_loads(loads)
        if self.reporter is not None:
            self.reporter()

    def loading_check(self) -> None:
        """Settle finished loads."""
        self._settle_loads(self.agreement.minimum([ready_acks(self.cache_controller.ack_load_queue)])[0])

    def _settle_loads(self, count: int) -> None:
        for _ in range(count):
            ack = self.cache_controller.ack_load_queue.pop(0)
            ack.finish_event.synchronize()
            self.stats.loads += len(ack.node_ids)
            self.stats.loaded_tokens += ack.num_tokens
            self.stats.loaded_bytes += ack.num_bytes
            for load_id in ack.node_ids:
                load = self.in_flight.end_load(load_id)
                self._unprotect(list(load.nodes()))
                self._lock(load.last, -1)
            if self.metrics_collector is not None:
                self._report_load(ack)

    def is_load_back_event_done(self, consumer_index: int) -> bool:
        """Whether this rank's load with that layer counter has ended. Local: it settles nothing."""
        if consumer_index < 0:
            return True
        return self.cache_controller.layer_done_counter.events[consumer_index].finish_event.query()

    def _report_load(self, ack: HiCacheAck) -> None:
        if self.metrics_collector is None:
            return
        for pool, tokens in (ack.num_tokens_by_pool or {}).items():
            self.metrics_collector.increment_load_back_num_tokens(num_tokens=tokens, pool=pool)
        self.metrics_collector.increment_load_back_num_bytes(ack.num_bytes)
        if ack.timing_enabled:
            self.metrics_collector.observe_load_back_duration(ack_seconds(ack))


def _metadata_of(node: LayoutTreeNode[MetadataT]) -> MetadataT:
    if node.metadata is None:
        raise LayoutInvariantError(f"node {node.id} has left the device without a host copy")
    return node.metadata
