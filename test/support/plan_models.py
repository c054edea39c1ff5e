"""config.json of models of many kinds: the keys that matter for their KV, as their publishers have them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

Config = dict[str, Any]

DEEPSEEK_V3_2: Config = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "hidden_size": 7168,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
    "kv_lora_rank": 512,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
}
GLM_5 = DEEPSEEK_V3_2 | {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 78,
}
DEEPSEEK_V3 = {key: value for key, value in DEEPSEEK_V3_2.items() if not key.startswith("index_")} | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
}
DEEPSEEK_V2 = DEEPSEEK_V3 | {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"}
KIMI_K2 = DEEPSEEK_V3 | {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
LONGCAT: Config = {
    "architectures": ["LongcatFlashForCausalLM"],
    "hidden_size": 6144,
    "kv_lora_rank": 512,
    "model_type": "longcat_flash",
    "num_attention_heads": 64,
    "num_layers": 28,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
}
LLAMA_70B: Config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
QWEN_3 = LLAMA_70B | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_size": 5120,
    "num_hidden_layers": 64,
}
LLAVA: Config = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "text_config": LLAMA_70B,
    "vision_config": {"model_type": "clip_vision_model"},
}
GEMMA_3: Config = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "head_dim": 256,
    "hidden_size": 3840,
    "num_attention_heads": 16,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
}
FALCON_40B: Config = {
    "architectures": ["FalconForCausalLM"],
    "model_type": "falcon",
    "hidden_size": 8192,
    "multi_query": True,
    "new_decoder_architecture": True,
    "num_attention_heads": 128,
    "num_hidden_layers": 60,
    "num_kv_heads": 8,
    "torch_dtype": "bfloat16",
}
NEMOTRON_NAS: Config = {
    "architectures": ["DeciLMForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_decilm.DeciLMConfig"},
    "model_type": "nemotron-nas",
    "block_configs": [
        {"attention": {"n_heads_in_group": 8, "no_op": False, "replace_with_linear": False}},
        {"attention": {"n_heads_in_group": None, "no_op": True, "replace_with_linear": False}},
        {"attention": {"n_heads_in_group": 8, "no_op": False, "replace_with_linear": False}},
    ],
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_hidden_layers": 3,
    "num_key_value_heads": None,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
LLAMA_4: Config = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "model_type": "llama4",
    "text_config": {
        "model_type": "llama4_text",
        "attention_chunk_size": 8192,
        "head_dim": 128,
        "hidden_size": 5120,
        "num_attention_heads": 40,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
    },
    "vision_config": {"model_type": "llama4_vision_model"},
    "torch_dtype": "bfloat16",
}
MIMO_V2: Config = {
    "architectures": ["MiMoV2FlashForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_mimo_v2_flash.MiMoV2FlashConfig"},
    "model_type": "mimo_v2_flash",
    "head_dim": 192,
    "hidden_size": 4096,
    "hybrid_layer_pattern": [0, 1, 1, 1],
    "num_attention_heads": 64,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "sliding_window": 128,
    "swa_num_key_value_heads": 8,
    "v_head_dim": 128,
    "vocab_size": 152576,
}
GPT_OSS: Config = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "head_dim": 64,
    "hidden_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "num_attention_heads": 64,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "sliding_window": 128,
}
DEEPSEEK_V4: Config = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "compress_ratios": [0, 0, 4, 128],
    "head_dim": 512,
    "hidden_size": 4096,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "num_attention_heads": 64,
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "qk_rope_head_dim": 64,
    "sliding_window": 128,
}
QWEN_3_NEXT: Config = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
}
NEMOTRON_H: Config = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "hidden_size": 4096,
    "hybrid_override_pattern": "M-M*",
    "num_attention_heads": 32,
    "num_hidden_layers": 4,
    "num_key_value_heads": 8,
}
MINIMAX_TEXT_01: Config = {
    "architectures": ["MiniMaxText01ForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_minimax_text_01.MiniMaxText01Config",
        "AutoModelForCausalLM": "modeling_minimax_text_01.MiniMaxText01ForCausalLM",
    },
    "model_type": "minimax_text_01",
    "attn_type_list": [0] * 7 + [1],
    "hidden_size": 6144,
    "num_attention_heads": 64,
    "num_hidden_layers": 8,
    "num_key_value_heads": 8,
    "vocab_size": 200064,
}
JAMBA: Config = {
    "architectures": ["JambaForCausalLM"],
    "model_type": "jamba",
    "attn_layer_offset": 4,
    "attn_layer_period": 8,
    "hidden_size": 4096,
    "mamba_d_state": 16,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
}


def write_config(folder: Path, config: Config) -> Path:
    """Write `config` as the config.json of `folder`."""
    path = folder / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path
