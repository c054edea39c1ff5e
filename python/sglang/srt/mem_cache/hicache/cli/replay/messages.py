"""What the process that starts a replay and a rank's process tell each other. Imports no SGLang class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache.cli.replay.config import ReplayConfig
    from sglang.srt.mem_cache.hicache.cli.replay.results import HitPoint
    from sglang.srt.mem_cache.hicache.cli.replay.trace import Trace
    from sglang.srt.mem_cache.hicache.stats import CacheStats


@dataclass(frozen=True, kw_only=True, slots=True)
class RankOrder:
    """What a rank is to do. `rendezvous` is the path of a file that the ranks meet at.

    A rank that waits longer than `peer_seconds` for another one within a collective fails.
    """

    config: ReplayConfig
    trace: Trace
    rank: int
    rendezvous: str
    peer_seconds: float


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """`done` requests of the trace were replayed with `layout`."""

    layout: str
    done: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Logged:
    """A warning or worse that the rank would have written to stderr; `origin` is where in the code it comes from."""

    origin: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """The trace was replayed with `layout` in `seconds` of wall time."""

    layout: str
    seconds: float
    report: RankReport


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """The rank gave up: one line, and the traceback. If it waited for its peers in vain, `waiting_in` says where."""

    error: str
    details: str
    waiting_in: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """The rank has replayed every layout and is about to end."""


Message: TypeAlias = Progress | Logged | Finished | Failed | Done
