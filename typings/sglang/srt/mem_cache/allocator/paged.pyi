import torch
from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import KVCache

def alloc_extend_naive(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    out_indices: torch.Tensor,
    page_size: int,
    device: str,
) -> None: ...

class PagedTokenToKVPoolAllocator(BaseTokenToKVPoolAllocator):
    num_pages: int
    free_pages: torch.Tensor
    def __init__(
        self, size: int, page_size: int, dtype: torch.dtype, device: str, kvcache: KVCache, need_sort: bool
    ) -> None: ...
    def clear(self) -> None: ...
    def alloc(self, need_size: int) -> torch.Tensor | None: ...
    def free(self, free_index: torch.Tensor) -> None: ...
