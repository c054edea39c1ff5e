import torch
from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import KVCache
from typing_extensions import override

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
    @override
    def clear(self) -> None: ...
    @override
    def alloc(self, need_size: int) -> torch.Tensor | None: ...
    @override
    def free(self, free_index: torch.Tensor) -> None: ...
