"""SGLang 0.5.23: see `seam.models`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.model_executor.model_runner_components.layer_setup import resolve_layer_indices

from .features import SINCE_0_5_23

assert SINCE_0_5_23

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_executor.model_runner_components.layer_setup import ModelLayerInfo


def model_layers(model: ModelConfig) -> ModelLayerInfo:
    """The layers of `model` in one pipeline stage, without a draft."""
    return resolve_layer_indices(model=None, model_config=model, is_draft_worker=False)


def kv_cache_configurator(**fields: Any) -> KVCacheConfigurator:  # noqa: ANN401  # SGLang's
    """SGLang's configurator of a rank in one pipeline stage, without data parallelism."""
    return KVCacheConfigurator(attn_dp_size=1, pp_size=1, **fields)
