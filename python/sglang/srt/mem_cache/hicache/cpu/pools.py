"""SGLang's pools and slot allocator without Triton: what `platform.HostCpuPlatform` hands to SGLang.

Each overrides the few methods that launch a GPU kernel, and does the same in plain torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator, alloc_extend_naive
from sglang.srt.utils import get_num_new_pages
from typing_extensions import override

from ..device.shared_pools import INDEX, LayoutDSATokenToKVPool, LayoutIndexKeyCache, LayoutMLATokenToKVPool

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.index_key_cache import IndexKeyCache


class CpuMLATokenToKVPool(LayoutMLATokenToKVPool):
    """MLA pool in host memory.

    `index_head_dim` is what some releases of SGLang pass to every out-of-tree pool; only None has a meaning here,
    anything else raises `ValueError`.
    """

    def __init__(self, *arguments: Any, index_head_dim: int | None = None, **named: Any) -> None:  # noqa: ANN401  # SGLang's
        if index_head_dim is not None:
            raise ValueError(f"an MLA pool has no index keys: index_head_dim must be None, got {index_head_dim}")
        super().__init__(*arguments, **named)

    @override
    def _scatter_mla_rows(
        self, dst_buffer: torch.Tensor, loc: torch.Tensor, cache_k_nope: torch.Tensor, cache_k_rope: torch.Tensor
    ) -> None:
        _scatter_rows(dst_buffer, loc, cache_k_nope, cache_k_rope)

    @override
    def get_mla_kv_buffer(
        self, layer: RadixAttention, loc: torch.Tensor, dst_dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Latent and rotary parts at the slots `loc`, each ``[tokens, 1, width]``."""
        rows = self.get_key_buffer(layer.layer_id)[loc.long()].to(dst_dtype or self.dtype)
        return rows[..., : self.kv_lora_rank], rows[..., self.kv_lora_rank :]


class CpuIndexKeyCache(LayoutIndexKeyCache):
    """Index keys in host memory: a page is ``page_size`` keys, then as many scales."""

    @override
    def store_quantized(
        self, layer_id: int, loc: torch.Tensor, index_k: torch.Tensor, index_k_scale: torch.Tensor
    ) -> None:
        """Store keys, ``[tokens, width]`` of 1 byte, and float32 scales, ``[tokens, 1]``, at the slots kept here."""
        rows = self.pool.index_rows(loc)
        page_size, width = self.pool.page_size, self.pool.index_head_dim
        pages = self.buffer[layer_id - self.pool.start_layer]
        keys = index_k.view(torch.uint8).reshape(len(rows), width)
        scales = index_k_scale.contiguous().view(torch.uint8).reshape(len(rows), -1)
        in_page, row_pages = rows % page_size, rows // page_size
        for data, start in ((keys, 0), (scales, page_size * width)):
            columns = start + in_page.unsqueeze(1) * data.shape[1] + torch.arange(data.shape[1])
            pages[row_pages.unsqueeze(1), columns] = data
        self.pool.access.wrote(INDEX, layer_id)


class CpuDSATokenToKVPool(LayoutDSATokenToKVPool):
    """DSA pool in host memory. SGLang starts no DSA model on a CPU: for tests and replay."""

    @override
    def _create_index_key_cache(self) -> IndexKeyCache:
        return CpuIndexKeyCache(self, self.index_buf_size)

    @override
    def _scatter_mla_rows(
        self, dst_buffer: torch.Tensor, loc: torch.Tensor, cache_k_nope: torch.Tensor, cache_k_rope: torch.Tensor
    ) -> None:
        _scatter_rows(dst_buffer, loc, cache_k_nope, cache_k_rope)


class CpuPagedTokenToKVPoolAllocator(PagedTokenToKVPoolAllocator):
    """SGLang's paged allocator with its torch version of slot extension."""

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        """See SGLang's allocator; None, with nothing taken, if too few pages are free."""
        if num_new_pages is None:
            num_new_pages = get_num_new_pages(
                seq_lens=seq_lens_cpu, page_size=self.page_size, prefix_lens=prefix_lens_cpu
            )
        if num_new_pages > len(self.free_pages):
            self.merge_and_sort_free()
        if num_new_pages > len(self.free_pages):
            return None
        slots = torch.empty(extend_num_tokens, dtype=torch.int64, device=self.device)
        lengths = (prefix_lens.long(), seq_lens.long(), last_loc.long())
        alloc_extend_naive(*lengths, self.free_pages, slots, self.page_size, self.device)
        self.free_pages = self.free_pages[num_new_pages:]
        return slots

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """One slot for each request, shape ``[requests]``; `seq_lens` count the new token."""
        return self.alloc_extend(seq_lens - 1, seq_lens_cpu - 1, seq_lens, seq_lens_cpu, last_loc, len(seq_lens))


def _scatter_rows(buffer: torch.Tensor, rows: torch.Tensor, latent: torch.Tensor, rotary: torch.Tensor) -> None:
    count, split = len(rows), latent.shape[-1]
    rows = rows.long()
    buffer[rows, :, :split] = latent.reshape(count, 1, split)
    buffer[rows, :, split:] = rotary.reshape(count, 1, -1)
