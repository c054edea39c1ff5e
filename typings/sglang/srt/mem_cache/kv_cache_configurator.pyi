import msgspec
import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
from sglang.srt.model_executor.model_runner_components.layer_setup import ModelLayerInfo
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang_releases import SINCE_0_5_23

class KVCacheConfigResult(msgspec.Struct, frozen=True):
    max_total_num_tokens: int
    token_to_kv_pool_allocator: BaseTokenToKVPoolAllocator

class KVCacheConfigurator:
    device: str
    server_args: ServerArgs
    kv_cache_dtype: torch.dtype
    page_size: int
    if SINCE_0_5_23:
        def __init__(
            self,
            *,
            device: str,
            gpu_id: int,
            attn_dp_size: int,
            pp_size: int,
            pp_group: object,
            model: object,
            model_config: ModelConfig,
            server_args: ServerArgs,
            kv_cache_dtype: torch.dtype,
            model_dtype: torch.dtype,
            page_size: int,
            sliding_window_size: int | None,
            spec_algorithm: SpeculativeAlgorithm,
            is_draft_worker: bool,
            post_capture_kv_active: bool,
            spec_aux_config: object,
            is_hybrid_swa: bool,
            is_hybrid_swa_compress: bool,
            use_mla_backend: bool,
            layer_info: ModelLayerInfo,
            forward_stream: object,
            req_to_token_pool: object,
            token_to_kv_pool_allocator: BaseTokenToKVPoolAllocator | None,
            memory_pool_config: object,
        ) -> None: ...
    else:
        def __init__(
            self,
            *,
            device: str,
            gpu_id: int,
            ps: object,
            pp_group: object,
            model: object,
            model_config: ModelConfig,
            server_args: ServerArgs,
            kv_cache_dtype: torch.dtype,
            model_dtype: torch.dtype,
            page_size: int,
            sliding_window_size: int | None,
            spec_algorithm: SpeculativeAlgorithm,
            is_draft_worker: bool,
            post_capture_kv_active: bool,
            spec_aux_config: object,
            is_hybrid_swa: bool,
            is_hybrid_swa_compress: bool,
            use_mla_backend: bool,
            layer_info: ModelLayerInfo,
            forward_stream: object,
            req_to_token_pool: object,
            token_to_kv_pool_allocator: BaseTokenToKVPoolAllocator | None,
            memory_pool_config: object,
        ) -> None: ...

def calculate_mla_kv_cache_dim(*, model_config: ModelConfig, kv_cache_dtype: torch.dtype) -> int: ...
