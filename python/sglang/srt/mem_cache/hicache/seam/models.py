"""How SGLang sizes a model's KV cache, without a server: under the same names on each release."""

from __future__ import annotations

from .features import SINCE_0_5_23

if SINCE_0_5_23:
    from .models_since_0_5_23 import kv_cache_configurator, model_layers
else:
    from .models_until_0_5_20 import kv_cache_configurator, model_layers

__all__ = ["kv_cache_configurator", "model_layers"]
