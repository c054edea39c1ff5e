"""Shapes of the rows that a KV pool keeps, by kind of pool::

    pool    bytes of a slot in one layer
    MHA     heads * head_dim * 2 (K and V) * itemsize
    MLA     (kv_lora_rank + qk_rope_head_dim) * itemsize
    DSA     the same, plus an index key of index_head_dim bytes and a 4-byte scale per 128 of them

A server takes them from a model's configuration. Nothing here imports SGLang.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import torch

from sglang.srt.mem_cache.layouts import PoolKind

if TYPE_CHECKING:
    from collections.abc import Mapping

DSA_INDEX_HEAD_DIM = 128
_QUANT_BLOCK = 128  # elements that share a float32 scale, in SGLang's index keys and its packed rows


@dataclass(frozen=True, slots=True, kw_only=True)
class MhaGeometry:
    """Keys and values of `heads` heads on this rank, `head_dim` wide."""

    kind: ClassVar[PoolKind] = PoolKind.MHA
    heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16

    @property
    def kv_bytes(self) -> int:
        """Bytes of a slot's keys and values in one layer."""
        return 2 * self.heads * self.head_dim * self.dtype.itemsize

    @property
    def index_bytes(self) -> int:
        """There is no index."""
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaGeometry:
    """One latent row and one rotary key for all heads (DeepSeek-V2/V3)."""

    kind: ClassVar[PoolKind] = PoolKind.MLA
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    dtype: torch.dtype = torch.bfloat16

    @property
    def kv_bytes(self) -> int:
        """Bytes of a slot's row in one layer."""
        return (self.kv_lora_rank + self.qk_rope_head_dim) * self.dtype.itemsize

    @property
    def index_bytes(self) -> int:
        """There is no index."""
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DsaGeometry:
    """An MLA row plus an index key (DeepSeek-V3.2, GLM-5). SGLang accepts no other `index_head_dim` than 128."""

    kind: ClassVar[PoolKind] = PoolKind.DSA
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    index_head_dim: int = DSA_INDEX_HEAD_DIM
    dtype: torch.dtype = torch.bfloat16

    @property
    def kv_cache_dim(self) -> int:
        """Elements of a row; a float8 row packs latent, a float32 scale per 128 of it, and the bf16 rotary key."""
        if self.dtype != torch.float8_e4m3fn:
            return self.kv_lora_rank + self.qk_rope_head_dim
        scales = self.kv_lora_rank // _QUANT_BLOCK
        return self.kv_lora_rank + scales * 4 + self.qk_rope_head_dim * torch.bfloat16.itemsize

    @property
    def kv_bytes(self) -> int:
        """Bytes of a slot's row in one layer."""
        return self.kv_cache_dim * self.dtype.itemsize

    @property
    def index_bytes(self) -> int:
        """Bytes of a slot's index key in one layer, with its scales."""
        return index_key_bytes(self.index_head_dim)


Geometry: TypeAlias = MhaGeometry | MlaGeometry | DsaGeometry

DEFAULT_GEOMETRIES: Mapping[PoolKind, Geometry] = {
    geometry.kind: geometry for geometry in (MhaGeometry(), MlaGeometry(), DsaGeometry())
}


def index_key_bytes(index_head_dim: int) -> int:
    """Bytes of one token's index key in one layer, with its scales."""
    return index_head_dim + index_head_dim // _QUANT_BLOCK * 4
