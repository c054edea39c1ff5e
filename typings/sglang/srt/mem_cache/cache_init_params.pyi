from dataclasses import dataclass
from typing import Any

from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang_releases import SINCE_0_5_23
from torch.distributed import ProcessGroup

if SINCE_0_5_23:
    from sglang.srt.mem_cache.events import KvEventLoraNames

@dataclass(kw_only=True)
class CacheInitParams:
    disable: bool
    req_to_token_pool: ReqToTokenPool | None
    token_to_kv_pool_allocator: BaseTokenToKVPoolAllocator
    page_size: int
    is_eagle: bool = False
    tp_cache_group: ProcessGroup | None = None
    attn_cp_cache_group: ProcessGroup | None = None
    attn_tp_cache_group: ProcessGroup | None = None
    pp_cache_group: ProcessGroup | None = None
    eviction_policy: str = "lru"
    eviction_policy_config: dict[str, Any] | None = None
    if not SINCE_0_5_23:
        disable_finished_insert: bool = False
    enable_metrics: bool = False
    enable_kv_cache_events: bool = False
    if SINCE_0_5_23:
        dynamo_kv_event_format: bool = False
        kv_event_lora_names: KvEventLoraNames = ...
    pp_rank: int = 0
    pp_size: int = 1
