import abc
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.managers.schedule_batch import Req, ReqKvInfo
from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.events import KVCacheEventRecorder
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.observability.metrics_collector import RadixCacheMetricsCollector
from sglang_releases import SINCE_0_5_23

# What a cache calls its nodes: any object, which only the cache that made it can read.
_NodeHandle: TypeAlias = Any

@dataclass(frozen=True)
class CacheRequestHandle:
    rid: str
    attempt_id: int

@dataclass(kw_only=True)
class MatchPrefixParams:
    key: RadixKey

# SGLang lets `key` out for caches that need none; trees do need it.
@dataclass(kw_only=True)
class InsertParams:
    key: RadixKey
    value: torch.Tensor | None = None
    if SINCE_0_5_23:
        inserted_len: int = 0
    else:
        chunked: bool = False
    priority: int = 0

@dataclass(kw_only=True)
class InsertResult:
    prefix_len: int
    last_device_node: _NodeHandle = None

@dataclass(kw_only=True)
class EvictParams:
    num_tokens: int = 0

@dataclass(kw_only=True)
class EvictResult:
    num_tokens_evicted: int = 0

@dataclass(kw_only=True)
class IncLockRefResult:
    delta: int | None = None

@dataclass(kw_only=True)
class DecLockRefParams:
    node_id: int | None = None

@dataclass(kw_only=True)
class DecLockRefResult:
    delta: int | None = None

@dataclass(kw_only=True)
class InitLoadBackParams:
    best_match_node: _NodeHandle
    host_hit_length: int
    mem_quota: int | None = None

# A named tuple is written out for each: mypy takes no condition inside one.
if SINCE_0_5_23:
    class MatchResult(NamedTuple):
        device_prefix_len: int
        last_device_node: _NodeHandle
        last_host_node: _NodeHandle
        best_match_node: _NodeHandle
        host_hit_length: int = 0

else:
    class MatchResult(NamedTuple):
        device_indices: torch.Tensor
        last_device_node: _NodeHandle
        last_host_node: _NodeHandle
        best_match_node: _NodeHandle
        host_hit_length: int = 0

class BasePrefixCache(abc.ABC):
    req_to_token_pool: ReqToTokenPool
    token_to_kv_pool_allocator: BaseTokenToKVPoolAllocator
    page_size: int
    disable: bool
    metrics_collector: RadixCacheMetricsCollector | None
    cache_controller: HiCacheController | None
    kv_events: KVCacheEventRecorder | None
    def init_metrics_collector(self) -> None: ...
    def take_events(self) -> list[object]: ...
    def release_host_resources(self) -> None: ...
    @abc.abstractmethod
    def reset(self) -> None: ...
    @abc.abstractmethod
    def match_prefix(self, params: MatchPrefixParams) -> MatchResult: ...
    def free_kv_row(self, kv: ReqKvInfo, ranges: list[tuple[int, int]]) -> None: ...
    @abc.abstractmethod
    def evict(self, params: EvictParams) -> EvictResult: ...
    @abc.abstractmethod
    def inc_lock_ref(self, node: _NodeHandle) -> IncLockRefResult: ...
    @abc.abstractmethod
    def dec_lock_ref(self, node: _NodeHandle, params: DecLockRefParams | None = None) -> DecLockRefResult: ...
    def evictable_size(self) -> int: ...
    def protected_size(self) -> int: ...
    def total_size(self) -> int: ...
    if SINCE_0_5_23:
        def init_load_back(self, params: InitLoadBackParams) -> tuple[int, _NodeHandle] | None: ...
        def path_device_indices(self, node: _NodeHandle) -> torch.Tensor: ...
        def touch_prefix(self, key: RadixKey) -> None: ...
        def lock(self, node: _NodeHandle) -> object: ...
        def unlock(self, lock: object) -> None: ...
        def checkpoint(self, req: Req, *, up_to: int) -> None: ...
        def flush_pending_backups(self) -> None: ...
        def on_release(self, req: Req, *, checkpointed: bool) -> None: ...
    else:
        def init_load_back(self, params: InitLoadBackParams) -> tuple[torch.Tensor, _NodeHandle] | None: ...
    def ready_to_load_host_cache(self) -> int: ...
    def check_hicache_events(self) -> None: ...
