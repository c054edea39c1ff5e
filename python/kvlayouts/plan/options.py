"""What the command line offers; imports nothing, so that a mistake in it is told before PyTorch is loaded."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

KVCacheDtype: TypeAlias = Literal["auto", "bfloat16", "fp8_e4m3", "fp8_e5m2"]

MAX_GPUS: Final = 1024
MAX_BYTES_PER_TOKEN: Final = 2**32
MAX_SWEEP_POINTS: Final = 64
