"""What SGLang's own `ModelConfig` says about a model, as the table of `refusals` asks for it.

A server asks with the model that it is about to start, `kvlayouts plan` with a config.json.
"""

from __future__ import annotations

import torch
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import (
    AttentionArch,
    ModelConfig,
    get_dsa_index_kpool,
    is_deepseek_dsa,
    is_minimax_sparse,
)
from sglang.srt.layers.attention.qsa.config import is_qwen_qsa

from ..device.geometry import DsaGeometry, index_key_bytes
from .facts import ModelFacts


def model_facts(model: ModelConfig, kv_cache_dtype: str) -> ModelFacts:
    """The facts of `model` with SGLang's `--kv-cache-dtype`. Reads its configuration, not its weights."""
    is_dsa = is_deepseek_dsa(model.hf_config)
    return ModelFacts(
        is_mla=model.attention_arch == AttentionArch.MLA,
        has_uneven_heads=model.head_dim != model.v_head_dim,
        is_dsa=is_dsa,
        index_kpool=get_dsa_index_kpool(model.hf_config),
        index_share=_index_share(model, kv_cache_dtype) if is_dsa else 0.0,
        indexes_heads=is_minimax_sparse(model.hf_config) or is_qwen_qsa(model.hf_config),
        is_hybrid_swa=model.is_hybrid_swa,
        is_recurrent=mambaish_config(model) is not None,
    )


def _index_share(model: ModelConfig, kv_cache_dtype: str) -> float:
    """Host bytes of a DSA model's index beside one byte of its KV.

    Float8 rows are taken as packed, the larger of the two ways to keep them: a server is not refused in vain.
    """
    row = DsaGeometry(
        kv_lora_rank=model.kv_lora_rank,
        qk_rope_head_dim=model.qk_rope_head_dim,
        dtype=torch.float8_e4m3fn if "fp8" in kv_cache_dtype else model.dtype,
    )
    return index_key_bytes(model.index_head_dim) / row.kv_bytes
