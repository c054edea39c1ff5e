from typing import Any, TypeAlias

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.index_key_cache import IndexKeyCache
from sglang_releases import SINCE_0_5_23

if SINCE_0_5_23:
    from sglang.srt.mem_cache.device_pool_info import DevicePoolInfo

# Anything that has the attributes of SGLang's `Req` that are read.
_Request: TypeAlias = Any

class ReqToTokenPool:
    req_to_token: torch.Tensor
    def __init__(self, size: int, max_context_len: int, device: str, enable_memory_saver: bool) -> None: ...
    def write(self, indices: tuple[object, slice], values: torch.Tensor) -> None: ...
    def available_size(self) -> int: ...
    def alloc(self, reqs: list[_Request]) -> list[int] | None: ...
    def free(self, req: _Request) -> None: ...
    def clear(self) -> None: ...

class KVWriteLoc:
    loc: torch.Tensor

def unwrap_write_loc(
    loc_info: KVWriteLoc | torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]: ...

class KVCache:
    layer_shard_enabled: bool
    size: int
    page_size: int
    dtype: torch.dtype
    store_dtype: torch.dtype
    device: str
    layer_num: int
    start_layer: int
    end_layer: int
    if SINCE_0_5_23:
        host_capacity_tokens: int | None
        def get_device_pool_infos(self) -> tuple[DevicePoolInfo, ...]: ...

class MHATokenToKVPool(KVCache):
    k_buffer: list[torch.Tensor]
    v_buffer: list[torch.Tensor]
    head_num: int
    head_dim: int
    v_head_dim: int
    kv_cache_layout: str
    if SINCE_0_5_23:
        hicache_write_back_staging: tuple[torch.Tensor, torch.Tensor] | None
    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        head_num: int,
        head_dim: int,
        layer_num: int,
        device: str,
        enable_memory_saver: bool,
        v_head_dim: int | None = None,
    ) -> None: ...
    @property
    def is_quantized_kv_cache(self) -> bool: ...

class MLATokenToKVPool(KVCache):
    kv_buffer: list[torch.Tensor]
    kv_lora_rank: int
    qk_rope_head_dim: int
    kv_cache_dim: int
    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        layer_num: int,
        device: str,
        enable_memory_saver: bool,
        start_layer: int | None = None,
        end_layer: int | None = None,
        use_dsa: bool = False,
        override_kv_cache_dim: int | None = None,
    ) -> None: ...
    def set_kv_buffer(
        self,
        layer: RadixAttention,
        loc_info: KVWriteLoc | torch.Tensor,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        layer_id_override: int | None = None,
    ) -> None: ...
    if SINCE_0_5_23:
        def set_mla_kv_buffer(
            self,
            layer: RadixAttention,
            loc_info: torch.Tensor,
            cache_k_nope: torch.Tensor,
            cache_k_rope: torch.Tensor,
            layer_id_override: int | None = None,
        ) -> None: ...
    else:
        def set_mla_kv_buffer(
            self,
            layer: RadixAttention,
            loc: torch.Tensor,
            cache_k_nope: torch.Tensor,
            cache_k_rope: torch.Tensor,
            layer_id_override: int | None = None,
        ) -> None: ...
    def get_key_buffer(self, layer_id: int) -> torch.Tensor: ...
    def get_value_buffer(self, layer_id: int) -> torch.Tensor: ...
    def get_mla_kv_buffer(
        self, layer: RadixAttention, loc: torch.Tensor, dst_dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None: ...
    def get_cpu_copy(
        self, indices: torch.Tensor, mamba_indices: torch.Tensor | None = None, req_pool_index: int | None = None
    ) -> object: ...
    def load_cpu_copy(
        self,
        kv_cache_cpu: object,
        indices: torch.Tensor,
        mamba_indices: torch.Tensor | None = None,
        req_pool_index: int | None = None,
    ) -> None: ...
    def _scatter_mla_rows(
        self, dst_buffer: torch.Tensor, loc: torch.Tensor, cache_k_nope: torch.Tensor, cache_k_rope: torch.Tensor
    ) -> None: ...

class DSATokenToKVPool(MLATokenToKVPool):
    index_head_dim: int
    index_kpool: int
    index_buf_size: int
    index_key_cache: IndexKeyCache
    def __init__(
        self,
        size: int,
        page_size: int,
        kv_lora_rank: int,
        dtype: torch.dtype,
        qk_rope_head_dim: int,
        layer_num: int,
        device: str,
        index_head_dim: int,
        enable_memory_saver: bool,
        kv_cache_dim: int,
        start_layer: int | None = None,
        end_layer: int | None = None,
        index_buf_size: int | None = None,
        index_kpool: int = 1,
    ) -> None: ...
    def _create_index_key_cache(self) -> IndexKeyCache: ...
    def get_index_k_with_scale_buffer(self, layer_id: int) -> torch.Tensor: ...
    def set_index_k_scale_buffer(
        self, layer_id: int, loc: torch.Tensor, index_k: torch.Tensor, index_k_scale: torch.Tensor
    ) -> None: ...
    @property
    def index_k_with_scale_buffer(self) -> list[torch.Tensor]: ...
