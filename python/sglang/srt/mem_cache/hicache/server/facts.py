"""What is known about a server that is about to start, as the rules of `refusals` ask for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the model's configuration says about its KV pool."""

    is_mla: bool = True
    has_uneven_heads: bool = False  # keys and values of other widths
    is_dsa: bool = False
    index_kpool: int = 1  # tokens that share an index key of a DSA model
    indexes_heads: bool = False  # index keys beside KV heads
    index_share: float = 0.0  # bytes of its index keys beside one byte of KV
    is_hybrid_swa: bool = False
    is_recurrent: bool = False


class SettingUnknownError(Exception):
    """`ServerFacts.args` of a server that is only planned does not have a setting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """A server about to start. `args` answers with SGLang's resolved value of each of its fields.

    It may raise `SettingUnknownError`: rows that ask for the setting do not apply.
    """

    args: Any
    model: ModelFacts
    shard_size: int
    on_cpu: bool
    on_nvidia: bool = False
    graphs_on: bool = False
    graphs_asked_for: bool = False
    pool_shrinks: bool = False  # once graphs are captured
