from enum import IntEnum

import torch
from transformers import PretrainedConfig

class AttentionArch(IntEnum):
    MLA = ...
    MHA = ...

class ModelConfig:
    hf_config: PretrainedConfig
    attention_arch: AttentionArch
    is_hybrid_swa: bool
    dtype: torch.dtype
    def __init__(
        self, model_path: str, trust_remote_code: bool = True, *, model_config_parser: str = "auto"
    ) -> None: ...
    head_dim: int
    v_head_dim: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    index_head_dim: int

def get_dsa_index_kpool(config: object) -> int: ...
def is_deepseek_dsa(config: object) -> bool: ...
def is_minimax_sparse(config: object) -> bool: ...
