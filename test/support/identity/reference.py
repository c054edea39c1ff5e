"""Two caches with the same content to come: ours with `IdentityLayout`, and SGLang's own `HiRadixCache`.

SGLang's class is used as it is, or as far as the subclasses of `policy` and the one below say.
"""

from __future__ import annotations

import atexit
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, EvictResult
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

from sglang.srt.mem_cache.hicache.assemble import assemble_cache
from sglang.srt.mem_cache.hicache.device.pools import DsaGeometry, Geometry, MhaGeometry, MlaGeometry, build_device_pool
from sglang.srt.mem_cache.hicache.runtime import standalone_runtime
from sglang.srt.mem_cache.hicache.settings import HiCacheSettings, ShardGroup
from sglang.srt.mem_cache.hicache.slots.allocator import LaneSlotAllocator
from sglang.srt.mem_cache.layouts import IdentityLayout, PoolKind
from support.identity.policy import LetsMirrorsGiveWay

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import KVCache
    from sglang.srt.server_args import ServerArgs

    from sglang.srt.mem_cache.hicache.accepted import WritePolicy
    from sglang.srt.mem_cache.hicache.tree.stats import CacheStats

GEOMETRIES: dict[PoolKind, Geometry] = {
    PoolKind.MHA: MhaGeometry(heads=1, head_dim=4, dtype=torch.float32),
    PoolKind.MLA: MlaGeometry(kv_lora_rank=8, qk_rope_head_dim=8, dtype=torch.float32),
    PoolKind.DSA: DsaGeometry(),
}


# A fault of SGLang's.


class EvictsOnlyTheMissingSlots(LetsMirrorsGiveWay):
    """Fault: to load n tokens back, `load_back` evicts n tokens from the device, however many slots are free."""

    _loading = False

    def load_back(self, node: Any, mem_quota: int | None = None) -> torch.Tensor | None:  # noqa: ANN401
        self._loading = True
        try:
            value: torch.Tensor | None = super().load_back(node, mem_quota)
            return value
        finally:
            self._loading = False

    def evict(self, params: EvictParams) -> EvictResult:
        free = self.token_to_kv_pool_allocator.available_size() if self._loading else 0
        result: EvictResult = super().evict(EvictParams(num_tokens=params.num_tokens - free))
        return result


CorrectedHiRadixCache = EvictsOnlyTheMissingSlots

DrivenCache: TypeAlias = Any  # ours, or SGLang's own of 0.5.20


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Pools and policies that both caches get.

    Keys are chains of at most `depth` pages, each one of `symbols`; the fewer there are, the more is shared. `lanes`
    gives ours the allocator of this package instead of SGLang's. `reference` is SGLang's class or a subclass of it.
    """

    pool: PoolKind = PoolKind.MLA
    page_size: int = 16
    device_pages: int = 12
    host_ratio: float = 1.5
    write_policy: WritePolicy = "write_through"
    eviction: str = "lru"
    mem_layout: str = "layer_first"
    lanes: bool = False
    reference: Any = CorrectedHiRadixCache
    symbols: int = 4
    depth: int = 5


@dataclass(slots=True, kw_only=True)
class Side:
    """One cache with pools of its own, and what its caller holds: locked nodes, begun inserts, running requests."""

    cache: DrivenCache
    allocator: BaseTokenToKVPoolAllocator
    pool: KVCache
    requests: ReqToTokenPool
    page_size: int
    stats: CacheStats | None = None
    held: list[Any] = field(default_factory=list)
    begun: list[Any] = field(default_factory=list)
    running: list[Any] = field(default_factory=list)
    load_queued: bool = False


@contextmanager
def both_sides(case: Case) -> Iterator[tuple[Side, Side]]:
    """Ours and SGLang's, in this order. Needs an initialised process group."""
    with standalone_runtime(
        page_size=case.page_size,
        hicache_ratio=case.host_ratio,
        hicache_size=0,
        hicache_mem_layout=case.mem_layout,
        hicache_write_policy=case.write_policy,
    ) as server_args:
        ours, theirs = _our_side(case), _their_side(case, server_args)
        try:
            yield ours, theirs
        finally:
            ours.cache.release_host_resources()
            theirs.cache.release_host_resources()


def _our_side(case: Case) -> Side:
    layout = IdentityLayout(page_size=case.page_size)
    pool = _device_pool(case)
    requests = _request_pool(case)
    allocator = _lane_allocator(case, pool, layout) if case.lanes else _stock_allocator(case, pool)
    cache = assemble_cache(
        _params(case, requests, allocator),
        layout=layout,
        settings=HiCacheSettings(
            write_policy=case.write_policy, mem_layout=case.mem_layout, host_ratio=case.host_ratio
        ),
        group=ShardGroup(),
    )
    return Side(
        cache=cache,
        allocator=allocator,
        pool=pool,
        requests=requests,
        page_size=case.page_size,
        stats=cache.stats,
    )


def _their_side(case: Case, server_args: ServerArgs) -> Side:
    pool = _device_pool(case)
    requests = _request_pool(case)
    allocator = _stock_allocator(case, pool)
    cache = case.reference(_params(case, requests, allocator), server_args)
    atexit.unregister(cache.shutdown)  # it would keep every cache of this process alive
    return Side(cache=cache, allocator=allocator, pool=pool, requests=requests, page_size=case.page_size)


def _device_pool(case: Case) -> KVCache:
    return build_device_pool(
        case.pool,
        tokens=case.device_pages * case.page_size,
        page_size=case.page_size,
        layers=2,
        geometry=GEOMETRIES[case.pool],
    )


def _request_pool(case: Case) -> ReqToTokenPool:
    return ReqToTokenPool(
        size=8, max_context_len=(case.depth + 4) * case.page_size, device="cpu", enable_memory_saver=False
    )


def _stock_allocator(case: Case, pool: KVCache) -> PagedTokenToKVPoolAllocator:
    return PagedTokenToKVPoolAllocator(
        case.device_pages * case.page_size, case.page_size, pool.dtype, "cpu", pool, need_sort=False
    )


def _lane_allocator(case: Case, pool: KVCache, layout: IdentityLayout) -> LaneSlotAllocator:
    return LaneSlotAllocator(
        layout=layout, physical_size=case.device_pages * case.page_size, dtype=pool.dtype, device="cpu", kvcache=pool
    )


def _params(case: Case, requests: ReqToTokenPool, allocator: BaseTokenToKVPoolAllocator) -> CacheInitParams:
    return CacheInitParams(
        disable=False,
        req_to_token_pool=requests,
        token_to_kv_pool_allocator=allocator,
        page_size=case.page_size,
        tp_cache_group=dist.group.WORLD,
        eviction_policy=case.eviction,
    )
