"""SGLang's real device pools, built without a model: for replay, tests and benchmarks.

A server builds its pools from a model's configuration. Here a geometry says what a model would (`geometry`). All
pools have one page more than asked for: page 0 takes the writes of padding tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, KVCache, MHATokenToKVPool, MLATokenToKVPool

from sglang.srt.mem_cache.hicache.accepted import DSA_PAGE_SIZE
from sglang.srt.mem_cache.layouts import LayoutConfigError, PoolKind

from .geometry import (
    DEFAULT_GEOMETRIES,
    DSA_INDEX_HEAD_DIM,
    DsaGeometry,
    Geometry,
    MhaGeometry,
    MlaGeometry,
)

if TYPE_CHECKING:
    import torch

__all__ = [
    "DEFAULT_GEOMETRIES",
    "DSA_INDEX_HEAD_DIM",
    "DSA_PAGE_SIZE",
    "DsaGeometry",
    "Geometry",
    "MhaGeometry",
    "MlaGeometry",
    "build_device_pool",
    "bytes_of",
    "index_buffers",
    "kv_buffers",
]


def build_device_pool(
    kind: PoolKind,
    *,
    tokens: int,
    page_size: int,
    layers: int,
    device: str = "cpu",
    geometry: Geometry | None = None,
) -> KVCache:
    """SGLang's pool of `kind` for `tokens` slots on `device`, zeroed; without a geometry, that of a large model.

    Rows are ``tokens + page_size``. Raises `LayoutConfigError` for a kind that HiCache does not serve, a geometry of
    another kind, `tokens` that are no positive multiple of `page_size`, `layers` < 1, or a DSA pool with a page or an
    index width that SGLang does not have. Nothing is allocated then.
    """
    geometry = _checked_geometry(kind, geometry)
    if page_size < 1 or tokens < page_size or tokens % page_size:
        raise LayoutConfigError(f"tokens must be a positive multiple of page_size {page_size}, got {tokens}")
    if layers < 1:
        raise LayoutConfigError(f"layers must be >= 1, got {layers}")
    if isinstance(geometry, MhaGeometry):
        return MHATokenToKVPool(
            size=tokens,
            page_size=page_size,
            dtype=geometry.dtype,
            head_num=geometry.heads,
            head_dim=geometry.head_dim,
            layer_num=layers,
            device=device,
            enable_memory_saver=False,
        )
    if isinstance(geometry, MlaGeometry):
        return MLATokenToKVPool(
            size=tokens,
            page_size=page_size,
            dtype=geometry.dtype,
            kv_lora_rank=geometry.kv_lora_rank,
            qk_rope_head_dim=geometry.qk_rope_head_dim,
            layer_num=layers,
            device=device,
            enable_memory_saver=False,
        )
    if page_size != DSA_PAGE_SIZE:
        raise LayoutConfigError(f"page_size of a DSA pool must be {DSA_PAGE_SIZE}, got {page_size}")
    return DSATokenToKVPool(
        size=tokens,
        page_size=page_size,
        dtype=geometry.dtype,
        kv_lora_rank=geometry.kv_lora_rank,
        qk_rope_head_dim=geometry.qk_rope_head_dim,
        index_head_dim=geometry.index_head_dim,
        kv_cache_dim=geometry.kv_cache_dim,
        layer_num=layers,
        device=device,
        enable_memory_saver=False,
    )


def kv_buffers(device_pool: KVCache) -> list[torch.Tensor]:
    """The KV buffers, ``[rows, heads, width]`` in the storage dtype: a layer each, for MHA all K then all V.

    Raises `LayoutConfigError` for a pool of another kind.
    """
    if isinstance(device_pool, MHATokenToKVPool):
        return [*device_pool.k_buffer, *device_pool.v_buffer]
    if isinstance(device_pool, MLATokenToKVPool):
        return list(device_pool.kv_buffer)
    raise LayoutConfigError(
        f"no KV buffers known for the KV pool {type(device_pool).__name__}; accepted: MHA, MLA, DSA"
    )


def index_buffers(device_pool: KVCache) -> list[torch.Tensor]:
    """The index buffers of a DSA pool, ``[pages, page bytes]`` uint8, a layer each; empty for other pools."""
    return list(device_pool.index_k_with_scale_buffer) if isinstance(device_pool, DSATokenToKVPool) else []


def bytes_of(device_pool: KVCache) -> int:
    """Device bytes that the pool's KV and index buffers take, the padding page included."""
    return sum(buffer.nbytes for buffer in (*kv_buffers(device_pool), *index_buffers(device_pool)))


def _checked_geometry(kind: PoolKind, geometry: Geometry | None) -> Geometry:
    if kind not in DEFAULT_GEOMETRIES:
        accepted = ", ".join(known.value for known in DEFAULT_GEOMETRIES)
        raise LayoutConfigError(f"pool must be one of {accepted}, got {kind.value}")
    if geometry is None:
        return DEFAULT_GEOMETRIES[kind]
    if geometry.kind is not kind:
        raise LayoutConfigError(f"geometry of a {kind.value} pool must be of its kind, got {geometry.kind.value}")
    if isinstance(geometry, DsaGeometry) and geometry.index_head_dim != DSA_INDEX_HEAD_DIM:
        raise LayoutConfigError(f"index_head_dim must be {DSA_INDEX_HEAD_DIM}, got {geometry.index_head_dim}")
    return geometry
