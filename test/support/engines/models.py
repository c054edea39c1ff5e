"""Tiny models with random weights that matter: made on the spot, saved, served like any other.

SGLang's dummy weights lie within 1e-3 of zero: attention then adds nothing, and a broken gather goes unseen. These
are drawn from N(0, 0.15), so one wrong page changes the log-probabilities by more than 0.1.
"""

from __future__ import annotations

import json
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pathlib import Path

VOCABULARY = 320
# Neither is typed for our purposes.
_tokenizers: Any = import_module("tokenizers")
_transformers: Any = import_module("transformers")
_WEIGHT_STD = 0.15
_SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "tie_word_embeddings": False,
}
# SGLang's DeepSeek models need a yarn scaling.
_YARN: dict[str, Any] = {
    "type": "yarn",
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def make_llama(folder: Path) -> Path:
    """A Llama of two layers with grouped-query attention."""
    config = _transformers.LlamaConfig(**_SHAPE, num_key_value_heads=2, head_dim=16)
    return _save(_transformers.LlamaForCausalLM(config), folder, {})


def make_deepseek(folder: Path, *, kv_lora_rank: int = 64, rope_dim: int = 16) -> Path:
    """A DeepSeek-V2 of two dense layers: multi-head latent attention. A GPU's kernels want 512 and 64."""
    config = _transformers.DeepseekV2Config(
        **_SHAPE,
        num_key_value_heads=4,
        kv_lora_rank=kv_lora_rank,
        q_lora_rank=None,
        qk_rope_head_dim=rope_dim,
        qk_nope_head_dim=32,
        v_head_dim=32,
        moe_intermediate_size=32,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        first_k_dense_replace=2,
        rope_scaling=_YARN,
    )
    # What SGLang reads and transformers renames or leaves out.
    kept = {"rope_theta": 10000.0, "rope_scaling": _YARN, "first_k_dense_replace": 2, "moe_layer_freq": 1}
    return _save(_transformers.DeepseekV2ForCausalLM(config), folder, kept)


def _save(model: Any, folder: Path, kept: dict[str, Any]) -> Path:  # noqa: ANN401  # a transformers model
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.float().parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, _WEIGHT_STD, generator=generator)
    model.save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config.pop("dtype", None)
    path.write_text(json.dumps({**config, **kept, "torch_dtype": "float32"}, indent=1), encoding="utf-8")
    _byte_tokenizer().save_pretrained(folder)
    return folder


def _byte_tokenizer() -> Any:  # noqa: ANN401  # a transformers tokenizer
    levels = _tokenizers.pre_tokenizers.ByteLevel
    vocabulary = {symbol: number for number, symbol in enumerate(sorted(levels.alphabet()))}
    tokenizer = _tokenizers.Tokenizer(_tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = levels(add_prefix_space=False)
    tokenizer.decoder = _tokenizers.decoders.ByteLevel()
    return _transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
