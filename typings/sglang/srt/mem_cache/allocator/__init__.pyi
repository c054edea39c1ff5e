import torch
from sglang.srt.mem_cache.memory_pool import KVCache

class PagedTokenToKVPoolAllocator:
    def __init__(
        self, size: int, page_size: int, dtype: torch.dtype, device: str, kvcache: KVCache, need_sort: bool
    ) -> None: ...
    def alloc(self, need_size: int) -> torch.Tensor | None: ...
