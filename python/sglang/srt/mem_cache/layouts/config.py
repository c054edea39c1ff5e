"""What a user selects (a layout, its settings, a rank's place in the shard group) and what the server found."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from .errors import LayoutConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_LAYOUT = "identity"
MAX_SHARD_SIZE = 32_767  # owners are kept as int16


class PoolKind(Enum):
    """What a device pool stores, as far as a layout strategy must know."""

    MHA = "mha"
    MLA = "mla"
    DSA = "dsa"
    HISPARSE = "hisparse"
    OTHER = "other"


class GroupKind(Enum):
    """Which ranks form the shard group."""

    SINGLE = "single"
    ATTENTION_CP = "attention_cp"
    ATTENTION_TP = "attention_tp"


def check_range(what: str, value: int, low: int, high: int | None = None) -> None:
    """Raise `LayoutConfigError` unless ``low <= value <= high`` (no upper bound for None)."""
    if value < low or (high is not None and value > high):
        accepted = f">= {low}" if high is None else f"in [{low}, {high}]"
        raise LayoutConfigError(f"{what} must be {accepted}, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutConfig:
    """One rank's choice of layout strategy: all that travels from the flags to the factory.

    `shard_size` ranks share the KV cache and this one is number `shard_rank`. `options` are the
    strategy's own settings, copied here. It pickles, because it travels to spawned processes. Raises
    `LayoutConfigError` for an impossible geometry.
    """

    name: str = DEFAULT_LAYOUT
    page_size: int = 1
    shard_size: int = 1
    shard_rank: int = 0
    options: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_range("page_size", self.page_size, 1)
        check_range("shard_size", self.shard_size, 1, MAX_SHARD_SIZE)
        check_range("shard_rank", self.shard_rank, 0, self.shard_size - 1)
        object.__setattr__(self, "options", dict(self.options))

    def refuse_unknown_options(self, *known: str) -> None:
        """Raise `LayoutConfigError` if `options` holds a key that is not in `known`."""
        unknown = sorted(set(self.options) - set(known))
        if unknown:
            accepted = ", ".join(known) if known else "none"
            raise LayoutConfigError(
                f"--kv-layout-config: layout {self.name!r} has no setting {unknown[0]!r}; accepted: {accepted}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutEnvironment:
    """What the serving side found, for a strategy to agree with or to refuse.

    `pool_class` is the device pool's class name, for messages. `allocator_lanes` is the number of
    free lists of the slot allocator (1 for SGLang's own). `storage_backend` is the value of
    ``--hicache-storage-backend`` or None. With `layers_differ`, ranks keep different layers of each page.
    """

    pool_kind: PoolKind
    pool_class: str
    page_size: int
    allocator_lanes: int
    group_kind: GroupKind
    shard_size: int
    shard_rank: int
    storage_backend: str | None = None
    layers_differ: bool = False
