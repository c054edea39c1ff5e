"""What a rank reports of a replay. Imports no SGLang class, so that the starting process stays light."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache.cli.replay.results import HitPoint
    from sglang.srt.mem_cache.hicache.stats import CacheStats


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """What one rank found with one layout. Token counts are equal on all ranks if they agree."""

    requests: int
    device_hit_tokens: int
    host_hit_tokens: int
    computed_tokens: int
    logical_capacity_tokens: int
    device_bytes: int
    host_bytes: int
    used_pages_per_rank: tuple[int, ...]
    stats: CacheStats
    digests_equal: bool
    verified_tokens: int
    mismatched_tokens: int
    hit_series: tuple[HitPoint, ...]
