"""What a rank reports of a replay: plain values, since reading a class of SGLang's package would load SGLang."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvlayouts.replay.results import HitPoint


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """What one rank found with one layout. Token counts and pages in use are equal on all ranks if they agree.

    `device_pages` and `host_pages` are those of this rank; `_capacity_pages` are those of one lane.
    Backups, loads and evictions are those of `CacheStats`.
    """

    requests: int
    device_hit_tokens: int
    host_hit_tokens: int
    computed_tokens: int
    logical_capacity_tokens: int
    host_capacity_tokens: int
    device_bytes: int
    host_bytes: int
    device_pages: int
    host_pages: int
    device_pages_per_lane: tuple[int, ...]
    host_pages_per_lane: tuple[int, ...]
    device_capacity_pages: int
    host_capacity_pages: int
    backups: int
    backed_up_bytes: int
    refused_backups: int
    loads: int
    loaded_bytes: int
    received_bytes: int
    evicted_device_tokens: int
    evicted_host_tokens: int
    digests_equal: bool
    tree_digest: str
    verified_tokens: int
    mismatched_tokens: int
    hit_series: tuple[HitPoint, ...]
