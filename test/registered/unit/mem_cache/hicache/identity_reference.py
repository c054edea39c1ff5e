"""Two caches with the same content to come: ours with `IdentityLayout`, and SGLang's own `HiRadixCache`.

SGLang's class is used as it is, or with its faults corrected by the small subclasses below, one a fault.
"""

from __future__ import annotations

import atexit
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, EvictResult
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache as SGLangHiRadixCache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

from sglang.srt.mem_cache.hicache.allocator import CPSharedPagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.hicache.device_pools import DsaGeometry, Geometry, MhaGeometry, MlaGeometry, build_device_pool
from sglang.srt.mem_cache.hicache.radix_cache import HiRadixCache
from sglang.srt.mem_cache.hicache.runtime import standalone_runtime
from sglang.srt.mem_cache.hicache.settings import HiCacheSettings, ShardGroup, WritePolicy
from sglang.srt.mem_cache.layouts import IdentityLayout, PoolKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams, InsertParams, MatchPrefixParams
    from sglang.srt.mem_cache.memory_pool import KVCache

GEOMETRIES: dict[PoolKind, Geometry] = {
    PoolKind.MHA: MhaGeometry(heads=1, head_dim=4, dtype=torch.float32),
    PoolKind.MLA: MlaGeometry(kv_lora_rank=8, qk_rope_head_dim=8, dtype=torch.float32),
    PoolKind.DSA: DsaGeometry(),
}


# SGLang's faults.


class DeletesOnlyTheMissingHostTokens(SGLangHiRadixCache):
    """Fault: to back up n tokens, `write_backup` deletes n tokens of host copies, however many are free already."""

    def evict_host(self, num_tokens: int) -> None:
        super().evict_host(num_tokens - self.token_to_kv_pool_host.available_size())


class DeletesNothingForANodeThatCannotFit(DeletesOnlyTheMissingHostTokens):
    """Fault: a node larger than the whole host tier makes `write_backup` delete every host copy, and then fail."""

    def evict_host(self, num_tokens: int) -> None:
        if num_tokens <= self.token_to_kv_pool_host.size:
            super().evict_host(num_tokens)


class EvictsOnlyTheMissingSlots(DeletesNothingForANodeThatCannotFit):
    """Fault: to load n tokens back, `load_back` evicts n tokens from the device, however many slots are free."""

    _loading = False

    def load_back(self, node: Any, mem_quota: int | None = None) -> torch.Tensor | None:  # noqa: ANN401
        self._loading = True
        try:
            return super().load_back(node, mem_quota)
        finally:
            self._loading = False

    def evict(self, params: EvictParams) -> EvictResult:
        free = self.token_to_kv_pool_allocator.available_size() if self._loading else 0
        return super().evict(EvictParams(num_tokens=params.num_tokens - free))


CorrectedHiRadixCache = EvictsOnlyTheMissingSlots


# What is driven, and what is compared.


class DrivenCache(Protocol):
    """The calls that the scheduler makes; both classes have them."""

    root_node: Any
    token_to_kv_pool_host: Any

    def match_prefix(self, params: MatchPrefixParams) -> Any: ...  # noqa: ANN401
    def insert(self, params: InsertParams) -> Any: ...  # noqa: ANN401
    def inc_lock_ref(self, node: Any) -> Any: ...  # noqa: ANN401
    def dec_lock_ref(self, node: Any) -> Any: ...  # noqa: ANN401
    def init_load_back(self, params: InitLoadBackParams) -> tuple[torch.Tensor, Any]: ...
    def ready_to_load_host_cache(self) -> int: ...
    def check_hicache_events(self) -> None: ...
    def evict(self, params: EvictParams) -> EvictResult: ...
    def cache_finished_req(self, req: Any, is_insert: bool = True, *, kv_len_to_handle: int) -> None: ...  # noqa: ANN401
    def cache_unfinished_req(self, req: Any, chunked: bool = False) -> None: ...  # noqa: ANN401
    def reset(self) -> None: ...
    def evictable_size(self) -> int: ...
    def protected_size(self) -> int: ...
    def release_host_resources(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Pools and policies that both caches get.

    Keys are chains of at most `depth` pages, each one of `symbols`; the fewer there are, the more is shared.
    """

    pool: PoolKind = PoolKind.MLA
    page_size: int = 16
    device_pages: int = 12
    host_ratio: float = 1.5
    write_policy: WritePolicy = "write_through"
    eviction: str = "lru"
    mem_layout: str = "layer_first"
    lanes: bool = False
    corrected: bool = True
    symbols: int = 4
    depth: int = 5


@dataclass(slots=True, kw_only=True)
class Side:
    """One cache with pools of its own."""

    cache: DrivenCache
    allocator: Any
    pool: KVCache
    requests: ReqToTokenPool
    page_size: int
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
        layout = IdentityLayout(page_size=case.page_size)
        pool = _device_pool(case)
        requests = _request_pool(case)
        allocator = _lane_allocator(case, pool, layout) if case.lanes else _stock_allocator(case, pool)
        settings = HiCacheSettings(
            write_policy=case.write_policy, mem_layout=case.mem_layout, host_ratio=case.host_ratio
        )
        cache = HiRadixCache(
            _params(case, requests, allocator), layout=layout, settings=settings, group=ShardGroup()
        )
        ours = Side(cache=cache, allocator=allocator, pool=pool, requests=requests, page_size=case.page_size)

        pool = _device_pool(case)
        requests = _request_pool(case)
        allocator = _stock_allocator(case, pool)
        reference = CorrectedHiRadixCache if case.corrected else SGLangHiRadixCache
        sglang = reference(_params(case, requests, allocator), server_args)
        atexit.unregister(sglang.shutdown)  # it would keep every cache of this process alive
        theirs = Side(cache=sglang, allocator=allocator, pool=pool, requests=requests, page_size=case.page_size)
        try:
            yield ours, theirs
        finally:
            ours.cache.release_host_resources()
            theirs.cache.release_host_resources()


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


def _lane_allocator(case: Case, pool: KVCache, layout: IdentityLayout) -> CPSharedPagedTokenToKVPoolAllocator:
    return CPSharedPagedTokenToKVPoolAllocator(
        layout=layout, physical_size=case.device_pages * case.page_size, dtype=pool.dtype, device="cpu", kvcache=pool
    )


def _params(case: Case, requests: ReqToTokenPool, allocator: Any) -> CacheInitParams:  # noqa: ANN401
    return CacheInitParams(
        disable=False,
        req_to_token_pool=requests,
        token_to_kv_pool_allocator=allocator,
        page_size=case.page_size,
        tp_cache_group=dist.group.WORLD,
        eviction_policy=case.eviction,
    )
