"""What a model's config.json says about its KV: kind of pool, and bytes of a token on one rank.

Read are the keys of `text_config` where there is one, else of the file itself (`docs/plan.md` lists them)::

    kv_lora_rank                                 MLA: layers * (kv_lora_rank + qk_rope_head_dim) * itemsize
    kv_lora_rank, index_topk, index_head_dim     DSA: the same, and an index key of index_head_dim bytes with a
                                                 4-byte scale for each 128 of them in every layer
    neither                                      MHA: layers * KV heads of one rank * (head_dim + v_head_dim) * itemsize

With fp8_e4m3 a DSA row packs the latent in float8, a 4-byte scale for each 128 of it, and the rotary key in bfloat16.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvlayouts.common.errors import InputError
from sglang.srt.mem_cache.layouts.config import PoolKind

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from kvlayouts.plan.options import KVCacheDtype

QUANT_BLOCK: Final = 128
SCALE_BYTES: Final = 4
ROPE_BYTES: Final = 2
FULL_ATTENTION: Final = "full_attention"
MAX_FIELD: Final = 2**24
MIXED_MODEL_KEYS: Final = (
    "full_attention_interval",
    "linear_attn_config",
    "hybrid_override_pattern",
    "layers_block_type",
    "attn_layer_period",
    "mamba_d_state",
    "sliding_window_pattern",
    "compress_ratios",
)
"""Keys of models whose layers do not all keep a row a token: recurrent, linear, compressed or sliding attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelGeometry:
    """The KV of a token on one rank, all layers. `index_bytes_per_token` is the DSA index beside the KV rows.

    `layers` is None where only a size was given.
    """

    name: str
    kind: PoolKind
    layers: int | None
    row_bytes_per_token: int
    index_bytes_per_token: int = 0

    @property
    def bytes_per_token(self) -> int:
        """Rows and index together."""
        return self.row_bytes_per_token + self.index_bytes_per_token


def read_model(path: Path, *, dtype: KVCacheDtype, attention_tp_size: int) -> ModelGeometry:
    """The geometry of the model whose config.json, or the folder that holds it, is `path`.

    Heads of an MHA model are dealt to `attention_tp_size` ranks. Raises `InputError`, naming the file and the
    key, for a file that cannot be read, a key that is missing or no number, and layers that keep no row a token.
    """
    file = path / "config.json" if path.is_dir() else path
    fields = _Fields(file, _load(file))
    fields.refuse_mixed_layers()
    layers = fields.number("num_hidden_layers")
    item = 1 if dtype.startswith("fp8") else 2
    if fields.has("kv_lora_rank"):
        latent, rope = fields.number("kv_lora_rank"), fields.number("qk_rope_head_dim")
        if not fields.has("index_topk"):
            return ModelGeometry(
                name=fields.name, kind=PoolKind.MLA, layers=layers, row_bytes_per_token=layers * (latent + rope) * item
            )
        row = (latent + rope) * item
        if dtype == "fp8_e4m3":
            row = latent + latent // QUANT_BLOCK * SCALE_BYTES + rope * ROPE_BYTES
        index = fields.number("index_head_dim")
        return ModelGeometry(
            name=fields.name,
            kind=PoolKind.DSA,
            layers=layers,
            row_bytes_per_token=layers * row,
            index_bytes_per_token=layers * (index + index // QUANT_BLOCK * SCALE_BYTES),
        )
    heads = fields.number("num_attention_heads")
    kv_heads = fields.number("num_key_value_heads") if fields.has("num_key_value_heads") else heads
    head_dim = fields.number("head_dim") if fields.has("head_dim") else fields.head_dim(heads)
    v_head_dim = fields.number("v_head_dim") if fields.has("v_head_dim") else head_dim
    rank_heads = max(1, kv_heads // attention_tp_size)
    return ModelGeometry(
        name=fields.name,
        kind=PoolKind.MHA,
        layers=layers,
        row_bytes_per_token=layers * rank_heads * (head_dim + v_head_dim) * item,
    )


def _load(file: Path) -> Mapping[str, object]:
    try:
        fields = json.loads(file.read_bytes())
    except OSError as error:
        raise InputError(f"--model-config {file}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError):
        raise InputError(f"--model-config {file}: is no JSON; expected a model's config.json") from None
    if not isinstance(fields, dict):
        raise InputError(f"--model-config {file}: is no JSON object; expected a model's config.json")
    return fields


class _Fields:
    """The keys of one config.json; those of `text_config` come first."""

    def __init__(self, file: Path, fields: Mapping[str, object]) -> None:
        self._file = file
        text = fields.get("text_config")
        self._fields = {**fields, **text} if isinstance(text, dict) else fields
        names = fields.get("architectures")
        first = names[0] if isinstance(names, list) and names else fields.get("model_type")
        self.name = first if isinstance(first, str) and first.isprintable() else file.name

    def has(self, key: str) -> bool:
        """Whether the key has a value; null is none."""
        return self._fields.get(key) is not None

    def number(self, key: str) -> int:
        """A size."""
        if not self.has(key):
            raise InputError(f"--model-config {self._file}: {key} is missing; must be an integer of at least 1")
        value = self._fields[key]
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_FIELD:
            shown = json.dumps(value)[:40]
            raise InputError(
                f"--model-config {self._file}: {key} is {shown}; must be an integer between 1 and {MAX_FIELD}"
            )
        return value

    def head_dim(self, heads: int) -> int:
        """Width of a head where the file does not say it."""
        hidden = self.number("hidden_size")
        if hidden < heads:
            raise InputError(
                f"--model-config {self._file}: hidden_size is {hidden}; must be at least num_attention_heads, "
                f"which is {heads}"
            )
        return hidden // heads

    def refuse_mixed_layers(self) -> None:
        """Refuse a model with layers that keep something else than a row a token."""
        kinds = self._fields.get("layer_types")
        if isinstance(kinds, list) and (others := [kind for kind in kinds if kind != FULL_ATTENTION]):
            raise InputError(
                f"--model-config {self._file}: layer_types holds {json.dumps(others[0])[:40]}; "
                f"accepted: {FULL_ATTENTION} alone, since other layers do not keep a row a token"
            )
        for key in MIXED_MODEL_KEYS:
            if self.has(key):
                raise InputError(
                    f"--model-config {self._file}: has {key}; accepted: models whose layers all keep a row a token "
                    "(MLA, DSA, MHA)"
                )
