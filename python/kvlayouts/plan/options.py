"""What the command line offers; imports nothing heavy, so that a mistake in it is told before PyTorch is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

if TYPE_CHECKING:
    from pathlib import Path

    from kvlayouts.common.values import EvictionPolicy, PoolName, WritePolicy

KVCacheDtype: TypeAlias = Literal["auto", "bfloat16", "fp8_e4m3", "fp8_e5m2"]

DEFAULT_GPUS: Final = 8
DEFAULT_SWEEP_POINTS: Final = 9
MAX_GPUS: Final = 1024
MAX_BYTES_PER_TOKEN: Final = 2**32
MAX_SWEEP_POINTS: Final = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """What was given, option by option; None where it was not. `trace` and the paths are files."""

    trace: Path | None
    layouts: tuple[str, ...]
    layout_config: str | None
    model_config: Path | None
    kv_bytes_per_token: int | None
    pool: PoolName | None
    kv_cache_dtype: KVCacheDtype
    gpus: int | None
    cp_size: int | None
    page_size: int
    device_gb: float | None
    device_tokens: int | None
    host_gb: float | None
    host_ratio: float | None
    host_memory_gb: float | None
    ranks_per_machine: int | None
    policy: WritePolicy
    eviction_policy: EvictionPolicy
    requests: int | None
    block_tokens: int
    restore_tokens: int | None
    link_gb_per_s: float
    json_path: Path | None
    plot_path: Path | None
    sweep_points: int | None

    @property
    def all_gpus(self) -> int:
        """GPUs of one model copy."""
        return self.gpus or self.cp_size or DEFAULT_GPUS

    @property
    def points(self) -> int:
        """Sizes of host memory to simulate beside the chosen one."""
        return self.sweep_points or (DEFAULT_SWEEP_POINTS if self.plot_path is not None else 0)
