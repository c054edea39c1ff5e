"""Which family of releases this is, by what SGLang has. mypy reads the branches of one release at a time."""

from __future__ import annotations

from typing import Final

from sglang.srt.mem_cache.base_prefix_cache import MatchResult

SINCE_0_5_23: Final[bool] = "device_prefix_len" in MatchResult._fields
