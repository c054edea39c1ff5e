import msgspec
import torch
from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
from sglang.srt.server_args import ServerArgs

class KVCacheConfigResult(msgspec.Struct, frozen=True):
    max_total_num_tokens: int
    token_to_kv_pool_allocator: BaseTokenToKVPoolAllocator

class KVCacheConfigurator:
    device: str
    server_args: ServerArgs
    kv_cache_dtype: torch.dtype
    page_size: int
