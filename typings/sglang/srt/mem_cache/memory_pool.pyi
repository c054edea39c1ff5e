from typing import Any, ClassVar, TypeAlias

import torch

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

class KVCache:
    layer_shard_enabled: bool
    size: int
    page_size: int
    dtype: torch.dtype
    store_dtype: torch.dtype
    device: str
    layer_num: int
    start_layer: int

class MHATokenToKVPool(KVCache):
    k_buffer: list[torch.Tensor]
    v_buffer: list[torch.Tensor]
    head_num: int
    head_dim: int
    v_head_dim: int
    kv_cache_layout: str
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

class DSATokenToKVPool(MLATokenToKVPool):
    quant_block_size: ClassVar[int]
    rope_storage_dtype: ClassVar[torch.dtype]
    index_head_dim: int
    index_kpool: int
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
    @property
    def index_k_with_scale_buffer(self) -> list[torch.Tensor]: ...
