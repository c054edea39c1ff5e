"""SGLang's MLA and DSA pools, read and written by slot wherever the pages lie.

The buffers stay SGLang's: physical, of this rank, with page 0 for padding; the host tier copies them as they are.
What changes is the way in and out, in `page_reader`: writes go to the rows that this rank stores, reads come from a
tensor that slots can index. With `WholePages`, the default, that is SGLang's own behaviour, call by call.

SGLang's attention gets at KV through `get_key_buffer` and the two setters, so those do the translation. Its DSA
indexer reads through the pool too, but its kernels take the buffer and the slots to write to as they are: see
`index_writes` for how they are given rows. What addresses rows by slot in any other way is refused.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.index_key_cache import IndexKeyCache
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, KVWriteLoc, MLATokenToKVPool, unwrap_write_loc
from typing_extensions import override

from .page_reader import PageAccess, WholePages

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from sglang.srt.layers.radix_attention import RadixAttention

KV = "kv"
INDEX = "index"


class LayoutMLATokenToKVPool(MLATokenToKVPool):
    """SGLang's MLA pool behind a `PageAccess`."""

    access: PageAccess = WholePages()

    @override
    def set_kv_buffer(
        self,
        layer: RadixAttention,
        loc_info: KVWriteLoc | torch.Tensor,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        layer_id_override: int | None = None,
    ) -> None:
        """Store whole rows, ``[tokens, 1, width]``, at the slots of `loc_info` that this rank keeps."""
        slots, _, _ = unwrap_write_loc(loc_info)
        super().set_kv_buffer(layer, self.access.rows(slots), cache_k, cache_v, layer_id_override)
        self.access.wrote(KV, layer.layer_id if layer_id_override is None else layer_id_override)

    @override
    def set_mla_kv_buffer(
        self,
        layer: RadixAttention,
        loc_info: KVWriteLoc | torch.Tensor,
        cache_k_nope: torch.Tensor,
        cache_k_rope: torch.Tensor,
        layer_id_override: int | None = None,
    ) -> None:
        """Store latent and rotary parts, ``[tokens, 1, width]`` each, at the slots of `loc_info` that this rank keeps.

        SGLang gives the slots by position: their name differs between its releases.
        """
        slots, _, _ = unwrap_write_loc(loc_info)
        super().set_mla_kv_buffer(layer, self.access.rows(slots), cache_k_nope, cache_k_rope, layer_id_override)
        self.access.wrote(KV, layer.layer_id if layer_id_override is None else layer_id_override)

    @override
    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Rows of a layer, ``[slots, 1, width]``, to be indexed by the slots of the batch."""
        return self.access.readable(KV, layer_id, super().get_key_buffer(layer_id), self.page_size)

    @override
    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """The latent part of `get_key_buffer`: ``[slots, 1, kv_lora_rank]``."""
        return self.get_key_buffer(layer_id)[..., : self.kv_lora_rank]

    @contextmanager
    def sized_by_slots(self) -> Iterator[None]:
        """Within the block `size` is that of what readers get: attention checks the slots of a batch against it."""
        rows = self.size
        self.size = self.access.readable_rows(rows + self.page_size) - self.page_size
        try:
            yield
        finally:
            self.size = rows

    @override
    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """SGLang's; `LayoutInvariantError`, with nothing moved, where pages are shared out."""
        self.access.refuse_slots_as_rows("move_kv_cache")
        super().move_kv_cache(tgt_loc, src_loc)

    @override
    def get_cpu_copy(
        self, indices: torch.Tensor, mamba_indices: torch.Tensor | None = None, req_pool_index: int | None = None
    ) -> object:
        """SGLang's; `LayoutInvariantError` where pages are shared out."""
        self.access.refuse_slots_as_rows("get_cpu_copy")
        return super().get_cpu_copy(indices, mamba_indices=mamba_indices, req_pool_index=req_pool_index)

    @override
    def load_cpu_copy(
        self,
        kv_cache_cpu: object,
        indices: torch.Tensor,
        mamba_indices: torch.Tensor | None = None,
        req_pool_index: int | None = None,
    ) -> None:
        """SGLang's; `LayoutInvariantError`, with nothing written, where pages are shared out."""
        self.access.refuse_slots_as_rows("load_cpu_copy")
        super().load_cpu_copy(kv_cache_cpu, indices, mamba_indices=mamba_indices, req_pool_index=req_pool_index)


class LayoutIndexKeyCache(IndexKeyCache):
    """SGLang's index keys of a DSA pool behind the pool's `PageAccess`."""

    pool: LayoutDSATokenToKVPool

    @override
    def get_buffer(self, layer_id: int) -> torch.Tensor:
        """Pages of a layer, ``[slot pages, page bytes]``, to be indexed by the slot pages of the batch."""
        return self.pool.access.readable(INDEX, layer_id, self.get_local_buffer(layer_id), 1)

    @override
    def store_quantized(
        self, layer_id: int, loc: torch.Tensor, index_k: torch.Tensor, index_k_scale: torch.Tensor
    ) -> None:
        """Store keys, ``[tokens, width]``, and scales at the slots `loc` that this rank keeps."""
        super().store_quantized(layer_id, self.pool.index_rows(loc), index_k, index_k_scale)
        self.pool.access.wrote(INDEX, layer_id)


class LayoutDSATokenToKVPool(LayoutMLATokenToKVPool, DSATokenToKVPool):
    """SGLang's DSA pool behind a `PageAccess`: latent KV and index keys move with the same pages."""

    writes_index_rows = False

    @override
    def _create_index_key_cache(self) -> IndexKeyCache:
        return LayoutIndexKeyCache(self, self.index_buf_size)

    def get_broadcastable_index_k_with_scale_buffer(self, layer_id: int) -> torch.Tensor:
        """Index pages of a layer, ``[slot pages, page bytes]``, for readers: indexed by the slot pages of the batch.

        SGLang's indexer reads here if the pool has the method, and takes the other one for writing.
        """
        return self.index_key_cache.get_buffer(layer_id)

    @override
    def get_index_k_with_scale_buffer(self, layer_id: int) -> torch.Tensor:
        """Index pages of a layer on this rank, ``[row pages, page bytes]``, for writers.

        Raises `LayoutInvariantError` where pages are shared out, unless it is called within `writing_index_rows`:
        SGLang's kernels would write to slots, and these are no rows.
        """
        if not self.writes_index_rows:
            self.access.refuse_slots_as_rows("get_index_k_with_scale_buffer")
        return self.index_key_cache.get_local_buffer(layer_id)

    def index_rows(self, loc: torch.Tensor) -> torch.Tensor:
        """Rows to write the keys of `loc` to, of its shape: `loc` itself within `writing_index_rows`."""
        return loc if self.writes_index_rows else self.access.rows(loc)

    @contextmanager
    def writing_index_rows(self, layer_id: int) -> Iterator[None]:
        """Within the block the writers of a layer's index keys give rows, not slots."""
        self.writes_index_rows = True
        try:
            yield
        finally:
            self.writes_index_rows = False
            self.access.wrote(INDEX, layer_id)
