"""The composition root: what a cache is made of, and in which order.

    strategy, slots  ─▶ checked against what the server has
    agreement        ─▶ how much the smallest host pool of the group has
    peers            ─▶ where ranks give each other pages
    host pool, ledger, transfer  ─▶ controller
    controller, slots, agreement ─▶ parts of the tree ─▶ cache

Servers, commands, benchmarks and tests all come here. Controller and cache are handed everything, and make nothing.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from sglang.srt.mem_cache.utils import get_eviction_strategy

from sglang.srt.mem_cache.layouts.checks import refuse_mismatch
from sglang.srt.mem_cache.layouts.config import GroupKind
from sglang.srt.mem_cache.layouts.errors import LayoutInvariantError
from sglang.srt.mem_cache.layouts.facts import exchanges_pages, host_lanes, page_rows
from sglang.srt.mem_cache.layouts.owner_check import refuse_lane

from .agreement import Agreement, RankAgreement
from .controller import HiCacheController
from .copies.exchange import PageExchanger
from .copies.peers import gather_beside
from .copies.transfer import HostTransfer
from .environment import agreement_groups, observe_environment
from .host.free_pages import HostPages
from .host.ledger import HostLedger
from .host.pools import build_host_pool, release_host_pool
from .no_storage import refuse_storage_backend
from .radix_cache import HiRadixCache
from .requests.insertion import RequestInsertion
from .seam.sglang import event_recorder
from .slots.allocator import slot_allocator
from .tree.parts import build_tree_parts
from .tree.report import TrafficReport

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.observability.metrics_collector import RadixCacheMetricsCollector

    from sglang.srt.mem_cache.layouts.protocol import KVLayoutStrategy, MetadataT

    from .copies.peers import PeerGather
    from .copies.transfer import Transfer
    from .host.pools import AnyHostPool
    from .requests.pages import RequestPages
    from .settings import HiCacheSettings, ShardGroup
    from .slots.allocator import SlotAllocator


def assemble_cache(
    params: CacheInitParams,
    *,
    layout: KVLayoutStrategy[MetadataT],
    settings: HiCacheSettings,
    group: ShardGroup,
    agreement: Agreement | None = None,
    peers: PeerGather | None = None,
    request_pages: RequestPages | None = None,
    collector: RadixCacheMetricsCollector | None = None,
    publish: Callable[[HiRadixCache[Any]], None] | None = None,
) -> HiRadixCache[MetadataT]:
    """A cache over SGLang's pools, with the host memory that `settings` ask for.

    `layout` is the strategy object of the allocator in `params`; `group` the ranks that it shards over; `agreement`
    replaces SGLang's process groups as the way to compare ranks, `peers` the process group over which ranks give each
    other pages, which is made for strategies that do so. `request_pages` is what that allocator records.
    `collector` and `publish` are for a server's metrics. Raises `LayoutConfigError`, before any host memory is taken,
    if the strategy refuses the pool, the allocator or the group, and for a storage backend.
    """
    allocator = params.token_to_kv_pool_allocator
    slots = slot_allocator(allocator)
    layout.validate(observe_environment(params, slots, settings, group))
    device_pool = allocator.get_kvcache()
    refuse_mismatch(layout.name, "rows a page", page_rows(layout), device_pool.page_size)
    refuse_lane(layout.name, lane_count=layout.lane_count, lane=layout.lane, shard_size=group.size)
    refuse_storage_backend(layout, settings.storage_backend)
    if agreement is None:
        agreement = RankAgreement(
            agreement_groups(params),
            pp_group=params.pp_cache_group,
            pp_rank=params.pp_rank,
            pp_size=params.pp_size,
            peer_seconds=settings.peer_seconds,
        )
    host_pool = build_host_pool(
        device_pool,
        ratio=settings.host_ratio,
        size_gb=settings.host_gb,
        page_size=page_rows(layout),
        mem_layout=settings.mem_layout,
        ranks_on_machine=settings.ranks_on_machine,
        budget=settings.host_budget,
    )
    try:
        if peers is None and exchanges_pages(layout) and group.size > 1:
            peers = gather_of_group(params, group, settings, device=torch.device(allocator.device))
        controller = assemble_controller(
            params, layout=layout, settings=settings, slots=slots, host_pool=host_pool, agreement=agreement, peers=peers
        )
    except BaseException:
        release_host_pool(host_pool)  # what stays pinned could not be registered again
        raise
    parts = build_tree_parts(
        layout=layout,
        settings=settings,
        slots=slots,
        controller=controller,
        agreement=agreement,
        priority=get_eviction_strategy(params.eviction_policy, params.eviction_policy_config).get_priority,
        events=event_recorder(params),
        report=TrafficReport(collector),
        device=torch.device(allocator.device),
        bigrams=params.is_eagle,
    )
    requests = None
    if params.req_to_token_pool is not None:
        requests = RequestInsertion(
            parts,
            rows=params.req_to_token_pool,
            allocator=allocator,
            pages=request_pages,
        )
    return HiRadixCache(
        params,
        layout=layout,
        settings=settings,
        slots=slots,
        host_pool=host_pool,
        controller=controller,
        parts=parts,
        requests=requests,
        publish=publish,
    )


def assemble_controller(
    params: CacheInitParams,
    *,
    layout: KVLayoutStrategy[MetadataT],
    settings: HiCacheSettings,
    slots: SlotAllocator,
    host_pool: AnyHostPool,
    agreement: Agreement,
    peers: PeerGather | None = None,
) -> HiCacheController[MetadataT]:
    """A controller that moves pages between the device pool of `params` and `host_pool`, all of which must be free.

    The ledger's capacity is the smallest host pool of the group, agreed on here. With `peers`, ranks give each other
    pages after a load.
    """
    device_pool = params.token_to_kv_pool_allocator.get_kvcache()
    transfer: Transfer = HostTransfer(
        host_pool=host_pool,
        device_pool=device_pool,
        io_backend=settings.io_backend,
        exchanger=None if peers is None else PageExchanger(device_pool, peers),
    )
    host_pages = HostPages(host_pool)
    capacity_pages = agreement.capacity(host_pages.free)
    return HiCacheController(
        params,
        layout=layout,
        settings=settings,
        slots=slots,
        host_pool=host_pool,
        host_pages=host_pages,
        ledger=HostLedger(lane_count=host_lanes(layout).count, capacity_pages=capacity_pages),
        transfer=transfer,
        load_cache_event=threading.Event(),
    )


def gather_of_group(
    params: CacheInitParams, group: ShardGroup, settings: HiCacheSettings, *, device: torch.device
) -> PeerGather:
    """A gather among the ranks of the shard group, over a process group of its own. Every rank of it calls this.

    `LayoutInvariantError` if SGLang's groups have none of that size.
    """
    attention = {
        GroupKind.ATTENTION_CP: params.attn_cp_cache_group,
        GroupKind.ATTENTION_TP: params.attn_tp_cache_group,
    }.get(group.kind)
    ranks = attention if attention is not None else params.tp_cache_group
    if ranks is None or dist.get_world_size(ranks) != group.size:
        raise LayoutInvariantError(f"no process group of SGLang's has the {group.size} ranks of the shard group")
    backend = dist.Backend.NCCL if device.type == "cuda" else dist.Backend.GLOO
    return gather_beside(ranks, backend=backend, seconds=settings.peer_seconds)
