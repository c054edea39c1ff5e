"""What a rank's process tells the one that started it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache.cli.replay.rank import RankReport


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """`done` requests of the trace were replayed with `layout`."""

    layout: str
    done: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """The trace was replayed with `layout` in `seconds` of wall time."""

    layout: str
    seconds: float
    report: RankReport


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """The rank gave up: one line, and the traceback."""

    error: str
    details: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """The rank has replayed every layout and is about to end."""


Message: TypeAlias = Progress | Finished | Failed | Done
