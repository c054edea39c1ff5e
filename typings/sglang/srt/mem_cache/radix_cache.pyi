from array import array
from collections.abc import Hashable

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    DecLockRefParams,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
    _NodeHandle,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.events import KVCacheEventRecorder
from sglang.srt.mem_cache.evict_policy import EvictionStrategy
from sglang.srt.mem_cache.memory_pool import _Request
from sglang_releases import SINCE_0_5_23
from typing_extensions import override

class RadixKey:
    token_ids: array[int]
    extra_key: str | None
    cache_salt: str | None
    is_bigram: bool
    def __init__(
        self,
        token_ids: array[int],
        extra_key: str | None = None,
        is_bigram: bool = False,
        limit: int | None = None,
        cache_salt: str | None = None,
    ) -> None: ...
    def __len__(self) -> int: ...
    def __getitem__(self, idx: int | slice) -> RadixKey: ...
    def page_aligned(self, page_size: int) -> RadixKey: ...
    def maybe_to_bigram_view(
        self, is_eagle: bool, value: torch.Tensor | None = None
    ) -> tuple[RadixKey, torch.Tensor | None]: ...
    def match_at(self, other: RadixKey, offset: int, page_size: int = 1) -> int: ...
    def child_key(self, page_size: int = 1) -> Hashable: ...
    def child_key_at(self, offset: int, page_size: int = 1) -> Hashable: ...

# `parent`, `children`, `host_value` and `backuped` are left out: our nodes have their own.
class TreeNode:
    id: int
    key: RadixKey
    value: torch.Tensor | None
    lock_ref: int
    if not SINCE_0_5_23:
        host_ref_counter: int
    hit_count: int
    priority: int
    last_access_time: float
    creation_time: float
    hash_value: list[str] | None
    event_hash_value: list[str] | None
    def __init__(self, id: int | None = None, priority: int = 0) -> None: ...

class RadixCache(BasePrefixCache):
    is_eagle: bool
    device: torch.device
    eviction_strategy: EvictionStrategy
    if not SINCE_0_5_23:
        disable_finished_insert: bool
    kv_events: KVCacheEventRecorder
    root_node: TreeNode
    evictable_size_: int
    protected_size_: int
    _empty_match_result: MatchResult
    def __init__(self, params: CacheInitParams) -> None: ...
    @override
    def reset(self) -> None: ...
    @override
    def match_prefix(self, params: MatchPrefixParams) -> MatchResult: ...
    def insert(self, params: InsertParams) -> InsertResult: ...
    if not SINCE_0_5_23:
        def cache_finished_req(self, req: _Request, is_insert: bool = True, *, kv_len_to_handle: int) -> None: ...
        def cache_unfinished_req(self, req: _Request, chunked: bool = False) -> None: ...
    @override
    def evict(self, params: EvictParams) -> EvictResult: ...
    @override
    def inc_lock_ref(self, node: _NodeHandle) -> IncLockRefResult: ...
    @override
    def dec_lock_ref(self, node: _NodeHandle, params: DecLockRefParams | None = None) -> DecLockRefResult: ...
    def all_values_flatten(self) -> torch.Tensor: ...
