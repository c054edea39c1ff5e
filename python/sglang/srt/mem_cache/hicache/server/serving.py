"""Our hooks inside a scheduler: pools, allocator, capacity, cache, and which pages a forward pass reads.

Each looks for the choice that travels with the server args, or for what an earlier one of them made because of it,
and otherwise hands on what SGLang does. One strategy object is made, with the allocator; pool, controller and tree
share it::

    build_pool ─▶ build_allocator ─▶ report_logical_capacity ─▶ build_cache
    (SGLang's)    (strategy, lanes)  (N x the rows of a rank)   (tree, controller, host tier)

    every batch:  extend_batch, decode_batch (bases of the chains; pages of the requests, recorded in host memory)
                  ─▶ begin_forward (pages that attention will read)
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from sglang.srt.runtime_context import get_parallel

from sglang.srt.mem_cache import kv_cache_configurator
from sglang.srt.mem_cache.layouts.config import GroupKind
from sglang.srt.mem_cache.layouts.errors import LayoutConfigError, LayoutInvariantError
from sglang.srt.mem_cache.layouts.owners import shares_pools

from ..device.page_reader import SharedPages, group_sum
from ..device.pools import bytes_of
from ..device.shared_pools import LayoutDSATokenToKVPool, LayoutMLATokenToKVPool
from ..environment import refuse_lanes_that_ranks_share
from ..host.pools import host_bytes_of
from ..radix_cache import HiRadixCache
from ..settings import HiCacheSettings, ShardGroup, peer_seconds
from ..tree.request_pages import RequestPages
from .allocator import ServingSlotAllocator
from .choice import choice_of
from .metrics import LayoutMetrics, ReportingRank, traffic_collector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sglang.srt.distributed.parallel_state import GroupCoordinator
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigResult, KVCacheConfigurator
    from sglang.srt.mem_cache.memory_pool import KVCache
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang.srt.mem_cache.layouts.registry import AnyKVLayoutStrategy

logger = logging.getLogger(__name__)


# Start-up.


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
    from .plugin import refuse_missing_hooks

    choice = choice_of(context.server_args)
    if choice is None:
        raise LayoutConfigError(
            "--radix-cache-backend kv_layout is set by --kv-layout-strategy; drop it and give --kv-layout-strategy NAME"
        )
    refuse_missing_hooks(choice.asked)
    allocator = context.params.token_to_kv_pool_allocator
    if not isinstance(allocator, ServingSlotAllocator):
        raise LayoutInvariantError(f"{choice.asked}: the slot allocator is {type(allocator).__name__}, not ours")
    group = shard_group()
    cache: HiRadixCache[Any] = HiRadixCache(
        context.params, layout=allocator.layout, settings=HiCacheSettings.from_server(), group=group
    )
    allocator.evict_with(cache.make_device_room)
    mirror_requests(cache, allocator)
    if context.params.enable_metrics:
        rank = ReportingRank.at(context.tp_worker.ps)
        cache.metrics_collector = traffic_collector(type(cache).__name__, rank)
        cache.reporter = LayoutMetrics(cache, allocator, rank).publish
    context.tp_worker.register_hicache_layer_transfer_counter(cache.cache_controller.layer_done_counter)
    _log_start(cache, allocator, group, context.tp_size)
    return cache


def mirror_requests(cache: HiRadixCache[Any], allocator: ServingSlotAllocator) -> None:
    """From now on the pages of requests are known on the host: `allocator` records them, `cache` asks for them."""
    cache.request_pages = allocator.request_pages = RequestPages(cache.req_to_token_pool, cache.page_size)


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

    Raises `LayoutConfigError` if pages lie on several ranks and the pool's class, or the strategy, has no way to
    bring them together.
    """
    name, lane_count, page_size = layout.name, layout.lane_count, layout.page_size
    if lane_count == 1:
        return
    if not isinstance(pool, LayoutMLATokenToKVPool):
        raise LayoutConfigError(
            f"--kv-layout-strategy {name} does not support the KV pool {type(pool).__name__}: "
            "its pages cannot be gathered from other ranks; accepted: MLA pools"
        )
    if not shares_pools(layout):
        raise LayoutConfigError(
            f"--kv-layout-strategy {name} has {lane_count} lanes but no local_rows (ShardedPoolLayout); "
            "accepted in a server: strategies with one lane, or with local_rows"
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
        layout.logical_tokens(host_tokens),
        host_tokens,
        _gigabytes(bytes_of(pool)),
        _gigabytes(host_bytes),
        _gigabytes(host_bytes * ranks),
        ranks,
    )


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.6g} GB"


# Every batch.


def extend_batch(
    original: Callable[..., Any],
    batch: ScheduleBatch,
    *positional: Any,  # noqa: ANN401
    **named: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """Around `alloc_for_extend`: slots for prompts, or chunks of them."""
    with _allocation(batch, lambda: (batch.prefix_lens, batch.seq_lens_cpu.tolist())):
        return original(batch, *positional, **named)


def decode_batch(original: Callable[..., Any], batch: ScheduleBatch, token_per_req: int) -> Any:  # noqa: ANN401
    """Around `alloc_for_decode`: slots for the next tokens."""
    lengths = batch.seq_lens_cpu
    with _allocation(batch, lambda: (lengths.tolist(), (lengths + token_per_req).tolist())):
        return original(batch, token_per_req)


@contextmanager
def _allocation(batch: ScheduleBatch, spans: Callable[[], tuple[Sequence[int], Sequence[int]]]) -> Iterator[None]:
    """The allocator is told where each chain begins, and the cache which pages each request was given.

    `spans` are the tokens that each request has, and those that it is to have.
    """
    allocator = batch.tree_cache.token_to_kv_pool_allocator
    if not isinstance(allocator, ServingSlotAllocator):
        yield
        return
    begins = [not request.kv.holds_kv for request in batch.reqs]
    firsts, ends = spans()
    with allocator.chain_bases(_chain_bases(allocator, batch.reqs)) as allocated:
        yield
    requests, page_size = allocator.request_pages, allocator.page_size
    if requests is None or not allocated:
        return
    pages, at = np.concatenate(allocated), 0
    for request, begun, first, end in zip(batch.reqs, begins, firsts, ends, strict=True):
        first_page, end_page = -(-first // page_size), -(-end // page_size)
        if end_page > first_page and request.kv.req_pool_idx is not None:
            own = pages[at : at + end_page - first_page]
            requests.record(request.kv.req_pool_idx, first_page, own, begins=begun)
            at += len(own)
    if at != len(pages):
        raise LayoutInvariantError(f"{len(pages)} pages were allocated for a batch that was to have {at}")


def _chain_bases(allocator: ServingSlotAllocator, requests: Sequence[Req]) -> list[int]:
    """Lane of each request's first page, from its tokens: the same for equal prefixes, on every rank."""
    bases = []
    for request in requests:
        if request.kv_rotation_base is None:  # SGLang's field for this; it clears it when a request starts over
            tokens = np.asarray(request.origin_input_ids[: allocator.page_size], dtype=np.int64)
            request.kv_rotation_base = allocator.layout.chain_base(tokens.tobytes(), request.extra_key or "")
        bases.append(request.kv_rotation_base)
    return bases


def begin_forward(
    original: Callable[..., Any],
    runner: ModelRunner,
    forward_batch: ForwardBatch,
    *positional: Any,  # noqa: ANN401
    **named: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """Around `ModelRunner.forward`: the pool learns which pages attention will ask for."""
    pool = runner.token_to_kv_pool
    if isinstance(pool, LayoutMLATokenToKVPool) and pool.access.lane_count > 1:
        pool.access.begin_batch(_pages_of_batch(runner, forward_batch, pool.page_size))
        with pool.sized_by_slots():
            return original(runner, forward_batch, *positional, **named)
    return original(runner, forward_batch, *positional, **named)


def _pages_of_batch(runner: ModelRunner, batch: ForwardBatch, page_size: int) -> torch.Tensor:
    """Logical pages of every request of the batch, new tokens included: int64, on the pool's device.

    Lengths are known on the host, so the shape is too; the pages themselves are looked up on the device.
    """
    lengths = batch.seq_lens_cpu if batch.seq_lens_cpu is not None else batch.seq_lens.cpu()
    counts = -(-np.asarray(lengths, dtype=np.int64) // page_size)
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    places = torch.from_numpy(np.stack([np.repeat(np.arange(len(counts)), counts), within * page_size]))
    table = runner.req_to_token_pool.req_to_token
    if table.is_cuda:
        places = places.pin_memory()  # a copy from pageable memory can wait for the device
    ordinals, positions = places.to(table.device, non_blocking=True)
    slots: torch.Tensor = table[batch.req_pool_indices.to(torch.int64)[ordinals], positions]
    return slots.to(torch.int64).div(page_size, rounding_mode="floor")
