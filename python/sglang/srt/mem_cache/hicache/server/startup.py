"""Our hooks while a scheduler starts: pools, allocator, capacity and cache.

Each looks for the choice that travels with the server args, or for what an earlier one of them made because of it,
and otherwise hands on what SGLang does. One strategy object is made, with the allocator; pool, controller and tree
share it::

    build_pool ─▶ build_allocator ─▶ report_logical_capacity ─▶ build_cache
    (SGLang's)    (strategy, lanes)  (N x the rows of a rank)   (tree, controller, host tier: see `assemble`)
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
from sglang.srt.runtime_context import get_parallel

from sglang.srt.mem_cache import kv_cache_configurator
from sglang.srt.mem_cache.layouts.config import GroupKind
from sglang.srt.mem_cache.layouts.errors import LayoutConfigError, LayoutInvariantError
from sglang.srt.mem_cache.layouts.facts import host_lanes, shares_pages_out

from ..assemble import assemble_cache
from ..device.page_reader import SharedPages, group_sum
from ..device.pools import bytes_of
from ..device.shared_pools import LayoutDSATokenToKVPool, LayoutMLATokenToKVPool
from ..environment import refuse_lanes_that_ranks_share
from ..host.pools import host_bytes_of
from ..radix_cache import HiRadixCache
from ..requests.pages import RequestPages
from ..seam.sglang import place_of
from ..settings import HiCacheSettings, ShardGroup, peer_seconds
from .allocator import ServingSlotAllocator
from .choice import choice_of
from .hooks import refuse_missing_hooks
from .metrics import LayoutMetrics, ReportingRank, traffic_collector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sglang.srt.distributed.parallel_state import GroupCoordinator
    from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigResult, KVCacheConfigurator
    from sglang.srt.mem_cache.memory_pool import KVCache
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

    from sglang.srt.mem_cache.layouts.protocol import AnyKVLayoutStrategy

logger = logging.getLogger(__name__)


def build_pool(original: Callable[..., KVCache], configurator: KVCacheConfigurator, **sizes: Any) -> KVCache:  # noqa: ANN401
    """Around `_build_token_to_kv_pool`: SGLang's pools, in the classes that a `PageAccess` can be put into."""
    if choice_of(configurator.server_args) is None:
        return original(configurator, **sizes)
    with _our_pool_classes():
        return original(configurator, **sizes)


def build_allocator(
    original: Callable[..., BaseTokenToKVPoolAllocator],
    configurator: KVCacheConfigurator,
    *,
    sizes: Any,  # noqa: ANN401  # SGLang's record of sizes
    token_to_kv_pool: KVCache,
    **others: Any,  # noqa: ANN401
) -> BaseTokenToKVPoolAllocator:
    """Around `_build_token_to_kv_pool_allocator`: lanes instead of one free list, and the pool shared out alike."""
    choice = choice_of(configurator.server_args)
    if choice is None:
        return original(configurator, sizes=sizes, token_to_kv_pool=token_to_kv_pool, **others)
    group = shard_group()
    layout = choice.create(page_size=configurator.page_size, shard_size=group.size, shard_rank=group.rank)
    if group.size > 1:
        refuse_lanes_that_ranks_share(layout, _shard_ranks().cpu_group, peer_seconds=peer_seconds())
    share_pool(token_to_kv_pool, layout)
    return ServingSlotAllocator(
        layout=layout,
        physical_size=sizes.max_total_num_tokens,
        dtype=configurator.kv_cache_dtype,
        device=configurator.device,
        kvcache=token_to_kv_pool,
    )


def report_logical_capacity(
    result: KVCacheConfigResult, _configurator: KVCacheConfigurator, **_arguments: object
) -> KVCacheConfigResult:
    """After `configure`: the scheduler counts slots, of which all ranks together have more than one has rows."""
    allocator = result.token_to_kv_pool_allocator
    if not isinstance(allocator, ServingSlotAllocator):
        return result
    return msgspec.structs.replace(result, max_total_num_tokens=allocator.size)


def build_cache(context: TreeCacheBuildContext) -> HiRadixCache[Any]:
    """The radix cache backend `kv_layout`.

    Raises `LayoutConfigError` if it is reached by any other way, `LayoutInvariantError` if the slot allocator is
    SGLang's.
    """
    choice = choice_of(context.server_args)
    if choice is None:
        raise LayoutConfigError(
            "--radix-cache-backend kv_layout is set by --kv-layout-strategy; drop it and give --kv-layout-strategy NAME"
        )
    refuse_missing_hooks(choice.asked)
    allocator = context.params.token_to_kv_pool_allocator
    if not isinstance(allocator, ServingSlotAllocator):
        raise LayoutInvariantError(f"{choice.asked}: the slot allocator is {type(allocator).__name__}, not ours")
    layout, params, group = allocator.layout, context.params, shard_group()
    pages = None if params.req_to_token_pool is None else RequestPages(params.req_to_token_pool, layout.page_size)
    rank = ReportingRank.at(place_of(context.tp_worker)) if params.enable_metrics else None
    cache: HiRadixCache[Any] = assemble_cache(
        params,
        layout=layout,
        settings=HiCacheSettings.from_server(),
        group=group,
        request_pages=pages,
        collector=None if rank is None else traffic_collector(HiRadixCache.__name__, rank),
        publish=None if rank is None else LayoutMetrics(layout, allocator, rank).publish,
    )
    allocator.serve(cache.make_device_room, pages)
    context.tp_worker.register_hicache_layer_transfer_counter(cache.cache_controller.layer_done_counter)
    _log_start(cache, allocator, group, context.tp_size)
    return cache


def shard_group() -> ShardGroup:
    """The ranks that share pages out, and this one's place: attention-CP if it has peers, else attention-TP."""
    parallel = get_parallel()
    if parallel.attn_cp_size > 1:
        return ShardGroup(kind=GroupKind.ATTENTION_CP, size=parallel.attn_cp_size, rank=parallel.attn_cp_rank)
    if parallel.attn_tp_size > 1:
        return ShardGroup(kind=GroupKind.ATTENTION_TP, size=parallel.attn_tp_size, rank=parallel.attn_tp_rank)
    return ShardGroup()


def share_pool(pool: KVCache, layout: AnyKVLayoutStrategy) -> None:
    """Make `pool` readable and writable by the slots of `layout`.

    Raises `LayoutConfigError` if pages lie on several ranks and the pool's class has no way to bring them together.
    """
    if not shares_pages_out(layout):
        return
    name, lane_count, page_size = layout.name, layout.lane_count, layout.page_size
    if not isinstance(pool, LayoutMLATokenToKVPool):
        raise LayoutConfigError(
            f"--kv-layout-strategy {name} does not support the KV pool {type(pool).__name__}: "
            "its pages cannot be gathered from other ranks; accepted: MLA pools"
        )
    reduce = group_sum(_shard_ranks().device_group, peer_seconds=peer_seconds())
    pool.access = SharedPages(layout, page_size=page_size, lane_count=lane_count, reduce=reduce)


def _shard_ranks() -> GroupCoordinator:
    parallel = get_parallel()
    return parallel.attn_cp_group if parallel.attn_cp_size > 1 else parallel.attn_tp_group


@contextmanager
def _our_pool_classes() -> Iterator[None]:
    """SGLang's configurator names its pool classes as module globals; while it builds a pool they are ours."""
    ours = {"MLATokenToKVPool": LayoutMLATokenToKVPool, "DSATokenToKVPool": LayoutDSATokenToKVPool}
    theirs = {name: getattr(kv_cache_configurator, name) for name in ours}
    for name, pool_class in ours.items():
        setattr(kv_cache_configurator, name, pool_class)
    try:
        yield
    finally:
        for name, pool_class in theirs.items():
            setattr(kv_cache_configurator, name, pool_class)


def _log_start(cache: HiRadixCache[Any], allocator: ServingSlotAllocator, group: ShardGroup, ranks: int) -> None:
    layout = cache.layout
    host_bytes = host_bytes_of(cache.token_to_kv_pool_host)
    host_tokens = cache.cache_controller.ledger.capacity_pages * layout.page_size
    pool = allocator.get_kvcache()
    logger.info(
        "KV layout %s: shard group %s of %d (rank %d), page size %d, device %d tokens (%d a rank), host %d tokens "
        "(%d a rank), device memory %s a rank, host memory %s a rank and %s for %d ranks",
        layout.name,
        group.kind.value,
        group.size,
        group.rank,
        layout.page_size,
        allocator.size,
        allocator.physical_size,
        host_tokens * host_lanes(layout).count,
        host_tokens,
        _gigabytes(bytes_of(pool)),
        _gigabytes(host_bytes),
        _gigabytes(host_bytes * ranks),
        ranks,
    )


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.6g} GB"
