"""A model as SGLang sees it, from its config.json alone: no weights, no tokenizer, no network, no foreign code.

SGLang's `ModelConfig` says what the layers are, its registry of models whether a server has the model, and its pool
configurator how many bytes of KV a token takes on one rank. Loading the three takes about two seconds, so this module
is imported only where a config is given.

A config.json that names a Python class beside it (`auto_map`) is read without that class where Transformers and SGLang
do not know its `model_type`: its keys become the attributes that SGLang asks for.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from typing_extensions import override

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of kernels that this machine does not have
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.configs.model_config_parser_registry import (
        ModelConfigParserBase,
        get_model_config_parser,
        register_model_config_parser,
    )
    from sglang.srt.mem_cache.kv_cache_configurator import calculate_mla_kv_cache_dim
    from sglang.srt.model_executor.pool_configurator import create_memory_pool_configurator
    from sglang.srt.model_loader.utils import get_model_architecture
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from transformers import CONFIG_MAPPING, PretrainedConfig

    from sglang.srt.mem_cache.hicache.runtime import standalone_runtime
    from sglang.srt.mem_cache.hicache.seam.models import kv_cache_configurator, model_layers
    from sglang.srt.mem_cache.hicache.server.models import model_facts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvlayouts.plan.options import KVCacheDtype
    from sglang.srt.mem_cache.hicache.server.facts import ModelFacts

_PARSER: Final = "kvlayouts"
_BUDGET_BYTES: Final = 2**60
_STORED_AS: Final[Mapping[str, torch.dtype]] = {
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""As SGLang's `configure_kv_cache_dtype` on an NVIDIA GPU, which refuses one of them where there is none."""


class SGLangModel:
    """SGLang's answers about the model of `config_file`. With `auto` its KV is stored in the model's own dtype.

    Making one raises whatever SGLang and Transformers raise for a file that they cannot use.
    """

    def __init__(self, config_file: Path, *, kv_cache_dtype: KVCacheDtype) -> None:
        with quiet(), tempfile.TemporaryDirectory() as folder:
            shutil.copyfile(config_file, Path(folder, "config.json"))
            try:
                self._model = ModelConfig(folder, trust_remote_code=False, model_config_parser=_PARSER)
            except Exception as error:
                raise ValueError(" ".join(str(error).replace(folder, str(config_file)).split())) from error
        self._stored = _STORED_AS.get(kv_cache_dtype, self._model.dtype)
        self.facts: ModelFacts = model_facts(self._model, kv_cache_dtype)

    @property
    def architecture(self) -> str:
        """The model's class."""
        return (self._model.hf_config.architectures or [""])[0]

    def check_served(self) -> None:
        """Raise SGLang's ``ValueError`` for a model that a server of this release cannot load."""
        self._model.hf_config.auto_map = None  # SGLang would load what it names, and that is code
        with quiet():
            get_model_architecture(self._model)

    def kv_bytes(self, *, attention_tp_size: int) -> tuple[int, int, int]:
        """Layers with KV, and the bytes of a token on one of `attention_tp_size` ranks: of KV rows, of a DSA index."""
        with quiet(), standalone_runtime(world_size=attention_tp_size) as server_args:
            layers = model_layers(self._model)
            count = layers.num_effective_layers
            if count < 1:
                return count, 0, 0
            configurator = kv_cache_configurator(
                device="cpu",
                gpu_id=0,
                pp_group=None,
                model=None,
                model_config=self._model,
                server_args=server_args,
                kv_cache_dtype=self._stored,
                model_dtype=self._model.dtype,
                page_size=1,
                sliding_window_size=None,
                spec_algorithm=SpeculativeAlgorithm.NONE,
                is_draft_worker=False,
                post_capture_kv_active=False,
                spec_aux_config=None,
                is_hybrid_swa=False,
                is_hybrid_swa_compress=False,
                use_mla_backend=self.facts.is_mla,
                layer_info=layers,
                forward_stream=None,
                req_to_token_pool=None,
                token_to_kv_pool_allocator=None,
                memory_pool_config=None,
            )
            sizes = create_memory_pool_configurator(configurator).calculate_pool_sizes(_BUDGET_BYTES, 1)
            token = round(_BUDGET_BYTES / sizes.max_total_num_tokens)  # exact: a token is far below the budget's root
            rows = token
            if self.facts.is_mla:
                row = calculate_mla_kv_cache_dim(model_config=self._model, kv_cache_dtype=self._stored)
                rows = row * count * self._stored.itemsize
        return count, rows, token - rows


@register_model_config_parser(_PARSER)
class ConfigFileParser(ModelConfigParserBase):
    """Reads a config.json as SGLang does, but runs no code that lies beside it."""

    @override
    def parse(
        self,
        model: str | Path,
        trust_remote_code: bool,
        revision: str | None = None,
        **others: Any,  # Transformers' keywords
    ) -> PretrainedConfig:
        """The configuration in the folder `model`."""
        fields, _ = PretrainedConfig.get_config_dict(model, revision=revision)
        if fields.get("model_type") in CONFIG_MAPPING or "AutoConfig" not in (fields.get("auto_map") or {}):
            parser = get_model_config_parser("hf")
            return parser.parse(model, trust_remote_code=False, revision=revision, **others)
        return PretrainedConfig(**{name: _with_attributes(value) for name, value in fields.items()})


class _Section(dict[str, Any]):
    """A JSON object inside the file, whose keys can be asked for as attributes too, as of a class."""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # JSON
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def _with_attributes(value: Any) -> Any:  # noqa: ANN401  # JSON
    if isinstance(value, dict):
        return _Section({name: _with_attributes(inner) for name, inner in value.items()})
    return [_with_attributes(inner) for inner in value] if isinstance(value, list) else value


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings of SGLang and Transformers, which are about this machine and not about the question."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
