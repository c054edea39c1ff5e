"""SGLang's MLA and DSA pools, read and written by slot wherever the pages lie.

The buffers stay SGLang's: physical, of this rank, with page 0 for padding; the host tier copies them as they are.
What changes is the way in and out, in `page_reader`: writes go to the rows that this rank stores, reads come from a
tensor that slots can index. With `WholePages`, the default, that is SGLang's own behaviour, call by call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.mem_cache.index_key_cache import IndexKeyCache
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, KVWriteLoc, MLATokenToKVPool, unwrap_write_loc

from .page_reader import PageAccess, WholePages

if TYPE_CHECKING:
    import torch
    from sglang.srt.layers.radix_attention import RadixAttention

KV = "kv"
INDEX = "index"


class LayoutMLATokenToKVPool(MLATokenToKVPool):
    """SGLang's MLA pool behind a `PageAccess`."""

    access: PageAccess = WholePages()

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

    def set_mla_kv_buffer(
        self,
        layer: RadixAttention,
        loc: torch.Tensor,
        cache_k_nope: torch.Tensor,
        cache_k_rope: torch.Tensor,
        layer_id_override: int | None = None,
    ) -> None:
        """Store latent and rotary parts at the slots `loc` that this rank keeps."""
        slots, _, _ = unwrap_write_loc(loc)
        super().set_mla_kv_buffer(layer, self.access.rows(slots), cache_k_nope, cache_k_rope, layer_id_override)
        self.access.wrote(KV, layer.layer_id if layer_id_override is None else layer_id_override)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Rows of a layer, ``[slots, 1, width]``, to be indexed by the slots of the batch."""
        return self.access.readable(KV, layer_id, super().get_key_buffer(layer_id), self.page_size)

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """The latent part of `get_key_buffer`."""
        return self.get_key_buffer(layer_id)[..., : self.kv_lora_rank]


class LayoutIndexKeyCache(IndexKeyCache):
    """SGLang's index keys of a DSA pool behind the pool's `PageAccess`."""

    pool: LayoutDSATokenToKVPool

    def get_buffer(self, layer_id: int) -> torch.Tensor:
        """Pages of a layer, ``[slot pages, page bytes]``, to be indexed by the slot pages of the batch."""
        return self.pool.access.readable(INDEX, layer_id, self.get_local_buffer(layer_id), 1)

    def store_quantized(
        self, layer_id: int, loc: torch.Tensor, index_k: torch.Tensor, index_k_scale: torch.Tensor
    ) -> None:
        """Store keys and scales at the slots `loc` that this rank keeps."""
        super().store_quantized(layer_id, self.pool.access.rows(loc), index_k, index_k_scale)
        self.pool.access.wrote(INDEX, layer_id)


class LayoutDSATokenToKVPool(LayoutMLATokenToKVPool, DSATokenToKVPool):
    """SGLang's DSA pool behind a `PageAccess`: latent KV and index keys move with the same pages."""

    def _create_index_key_cache(self) -> IndexKeyCache:
        return LayoutIndexKeyCache(self, self.index_buf_size)

    def get_index_k_with_scale_buffer(self, layer_id: int) -> torch.Tensor:
        """Index pages of a layer, for readers, to be indexed by the slot pages of the batch."""
        return self.index_key_cache.get_buffer(layer_id)
