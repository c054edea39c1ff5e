"""What a model keeps of a token on one rank: kind of pool, and bytes. SGLang says so itself (`sglang_model`)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvlayouts.common.errors import InputError
from kvlayouts.plan import options
from kvlayouts.plan.refusal import refuse_for_every_layout
from sglang.srt.mem_cache.hicache.server.facts import ModelFacts
from sglang.srt.mem_cache.layouts.config import PoolKind

if TYPE_CHECKING:
    from pathlib import Path

MAX_CONFIG_BYTES: Final = 2**26


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelGeometry:
    """The KV of a token on one rank, all layers. `index_bytes_per_token` is the DSA index beside the KV rows.

    `layers` is None where only a size was given.
    """

    name: str
    facts: ModelFacts
    layers: int | None
    row_bytes_per_token: int
    index_bytes_per_token: int = 0

    @property
    def kind(self) -> PoolKind:
        """The pool that SGLang makes for such a model."""
        if not self.facts.is_mla:
            return PoolKind.MHA
        return PoolKind.DSA if self.facts.is_dsa else PoolKind.MLA

    @property
    def bytes_per_token(self) -> int:
        """Rows and index together."""
        return self.row_bytes_per_token + self.index_bytes_per_token


def given_size(kind: PoolKind, bytes_per_token: int) -> ModelGeometry:
    """A model of which only these two are known."""
    facts = ModelFacts(is_mla=kind is not PoolKind.MHA, is_dsa=kind is PoolKind.DSA)
    return ModelGeometry(name="given size", facts=facts, layers=None, row_bytes_per_token=bytes_per_token)


def read_model(path: Path, *, layout: str, dtype: options.KVCacheDtype, attention_tp_size: int) -> ModelGeometry:
    """The geometry of the model whose config.json, or the folder that holds it, is `path`.

    Heads of an MHA model are dealt to `attention_tp_size` ranks. Raises `InputError`, naming the file, for one
    that cannot be read or that SGLang cannot use, and, in a server's words, for a model that one cannot load or refuses
    with every layout strategy, such as `layout`.
    """
    file = path / "config.json" if path.is_dir() else path
    _check_file(file)
    from kvlayouts.plan.sglang_model import SGLangModel

    try:
        model = SGLangModel(file, kv_cache_dtype=dtype)
        refuse_for_every_layout(model.facts, layout)
        model.check_served()
        layers, rows, index = model.kv_bytes(attention_tp_size=attention_tp_size)
    except InputError:
        raise
    except Exception as error:  # of any kind: SGLang and Transformers check little
        text = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"--model-config {file}: SGLang cannot use it: {text}") from error
    if layers < 1 or not 0 < rows + index <= options.MAX_BYTES_PER_TOKEN:
        raise InputError(
            f"--model-config {file}: {layers} layers take {rows + index} bytes a token; must be at least 1 layer, and "
            f"between 1 and {options.MAX_BYTES_PER_TOKEN} bytes"
        )
    return ModelGeometry(
        name=model.architecture, facts=model.facts, layers=layers, row_bytes_per_token=rows, index_bytes_per_token=index
    )


def _check_file(file: Path) -> None:
    """What can be said of the file before SGLang is loaded."""
    try:
        text = file.read_bytes()
    except OSError as error:
        raise InputError(f"--model-config {file}: cannot be read: {error.strerror or error}") from error
    if len(text) > MAX_CONFIG_BYTES:
        raise InputError(f"--model-config {file}: has {len(text)} bytes; must have at most {MAX_CONFIG_BYTES}")
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        raise InputError(f"--model-config {file}: is no JSON; expected a model's config.json") from None
    if not isinstance(fields, dict):
        raise InputError(f"--model-config {file}: is no JSON object; expected a model's config.json")
    if not fields.get("architectures"):
        raise InputError(
            f"--model-config {file}: architectures is missing; must name the model's class, by which SGLang knows it"
        )
