"""What SGLang's own `ModelConfig` says about a model, as the table of `refusals` asks for it.

A server asks with the model that it is about to start, `kvlayouts plan` with a config.json.
"""

from __future__ import annotations

from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import (
    AttentionArch,
    ModelConfig,
    get_dsa_index_kpool,
    is_deepseek_dsa,
    is_minimax_sparse,
)
from sglang.srt.layers.attention.qsa.config import is_qwen_qsa

from .refusals import ModelFacts


def model_facts(model: ModelConfig) -> ModelFacts:
    """The facts of `model`. Reads its configuration, not its weights."""
    return ModelFacts(
        is_mla=model.attention_arch == AttentionArch.MLA,
        is_dsa=is_deepseek_dsa(model.hf_config),
        index_kpool=get_dsa_index_kpool(model.hf_config),
        indexes_heads=is_minimax_sparse(model.hf_config) or is_qwen_qsa(model.hf_config),
        is_hybrid_swa=model.is_hybrid_swa,
        is_recurrent=mambaish_config(model) is not None,
    )
