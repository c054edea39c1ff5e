from enum import IntEnum

class AttentionArch(IntEnum):
    MLA = ...
    MHA = ...

class ModelConfig:
    hf_config: object
    attention_arch: AttentionArch
    is_hybrid_swa: bool

def is_deepseek_dsa(config: object) -> bool: ...
