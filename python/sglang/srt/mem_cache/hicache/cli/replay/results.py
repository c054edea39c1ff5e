"""What a replay found, layout by layout, and its JSON form.

Shares and rates are derived, never stored. `LayoutResult` refuses numbers that contradict each other, so a table, a
picture or a JSON file can only be made from a run whose hits and computed tokens add up.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

from sglang.srt.mem_cache.hicache.cli.replay.config import ReplayConfig, ReplayError, ReplayInputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sglang.srt.mem_cache.hicache.cli.replay.trace import Trace

__all__ = [
    "HitPoint",
    "HitSeriesRecorder",
    "LayoutResult",
    "ReplayConfig",
    "ReplayError",
    "ReplayInputError",
    "to_json",
]

HIT_SERIES_POINTS: Final = 50
"""Windows that a replay's hit series has at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HitPoint:
    """Where the prompt tokens of one window of consecutive requests came from. Windows join without gaps.

    `request_index` counts the requests replayed when the window closed; the window began at the previous point's.
    """

    request_index: int
    device_hit_tokens: int
    host_hit_tokens: int
    computed_tokens: int

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of the window's requests."""
        return self.device_hit_tokens + self.host_hit_tokens + self.computed_tokens


class HitSeriesRecorder:
    """Collects one request after the other into at most `points` windows of equal length (the last may be shorter)."""

    def __init__(self, requests: int, points: int = HIT_SERIES_POINTS) -> None:
        self._requests = requests
        self._window_requests = max(1, -(-requests // points))
        self._done = 0
        self._window = [0, 0, 0]
        self._points: list[HitPoint] = []

    def add(self, *, device_hit_tokens: int, host_hit_tokens: int, computed_tokens: int) -> None:
        """Count the next request; its three parts add up to its prompt."""
        for part, tokens in enumerate((device_hit_tokens, host_hit_tokens, computed_tokens)):
            self._window[part] += tokens
        self._done += 1
        if self._done % self._window_requests == 0 or self._done == self._requests:
            device, host, computed = self._window
            self._points.append(
                HitPoint(
                    request_index=self._done,
                    device_hit_tokens=device,
                    host_hit_tokens=host,
                    computed_tokens=computed,
                )
            )
            self._window = [0, 0, 0]

    def series(self) -> tuple[HitPoint, ...]:
        """The windows closed so far."""
        return tuple(self._points)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutResult:
    """One layout's replay. Tuples ending in `_per_rank` have one entry per rank; the other `_per_rank` sizes are equal
    on all ranks. Tokens are logical, bytes physical.

    Construction raises `ReplayError` where the parts do not add up to the prompts, or the tuples differ in length.
    """

    requests: int
    prompt_tokens: int
    device_hit_tokens: int
    host_hit_tokens: int
    computed_tokens: int
    logical_capacity_tokens: int
    device_bytes_per_rank: int
    host_bytes_per_rank: int
    d2h_bytes_per_rank: tuple[int, ...]
    h2d_bytes_per_rank: tuple[int, ...]
    page_imbalance: float
    write_acks_per_rank: tuple[int, ...]
    load_acks_per_rank: tuple[int, ...]
    digests_equal: bool
    verified_tokens: int
    mismatched_tokens: int
    seconds: float
    evicted_device_tokens: int = 0
    evicted_host_tokens: int = 0
    refused_backups: int = 0
    hit_series: tuple[HitPoint, ...] = ()

    def __post_init__(self) -> None:
        parts = self.device_hit_tokens + self.host_hit_tokens + self.computed_tokens
        if parts != self.prompt_tokens:
            raise ReplayError(
                f"device hits, host hits and computed tokens add up to {parts}, but the prompts have "
                f"{self.prompt_tokens} tokens"
            )
        ranks = {
            len(self.d2h_bytes_per_rank),
            len(self.h2d_bytes_per_rank),
            len(self.write_acks_per_rank),
            len(self.load_acks_per_rank),
        }
        if len(ranks) != 1 or ranks == {0}:
            raise ReplayError(f"the ranks reported differing numbers of entries: {sorted(ranks)}")
        self._check_series()

    def _check_series(self) -> None:
        if not self.hit_series:
            return
        counted = tuple(
            sum(tokens)
            for tokens in zip(
                *((p.device_hit_tokens, p.host_hit_tokens, p.computed_tokens) for p in self.hit_series), strict=True
            )
        )
        totals = (self.device_hit_tokens, self.host_hit_tokens, self.computed_tokens)
        if counted != totals:
            raise ReplayError(
                f"the hit series adds up to {counted} tokens (device, host, computed), the run to {totals}"
            )

    @property
    def hit_share(self) -> float:
        """Share of the prompt tokens that were served from device or host."""
        return (self.device_hit_tokens + self.host_hit_tokens) / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def requests_per_second(self) -> float:
        """Requests replayed per second of wall time; 0 where no time was measured."""
        return self.requests / self.seconds if self.seconds > 0 else 0.0

    @property
    def acks_equal(self) -> bool:
        """Whether all ranks acknowledged the same number of backups and of loads."""
        return len(set(self.write_acks_per_rank)) == 1 and len(set(self.load_acks_per_rank)) == 1

    @property
    def ranks_agree(self) -> bool:
        """Whether tree digests and ack counts are the same on all ranks."""
        return self.digests_equal and self.acks_equal

    @property
    def passed(self) -> bool:
        """Whether no verified token was wrong and the ranks agree."""
        return self.mismatched_tokens == 0 and self.ranks_agree


def to_json(config: ReplayConfig, trace: Trace, results: Mapping[str, LayoutResult]) -> dict[str, object]:
    """The run as plain JSON values: `trace`, `config` (every option, to run it again) and `layouts`, by name."""
    hits = trace.infinite_cache_hits()
    return {
        "trace": {
            "name": trace.name,
            "requests": len(trace.requests),
            "block_tokens": trace.block_tokens,
            "prompt_tokens": trace.prompt_tokens,
            "longest_prompt_tokens": trace.longest_prompt_tokens,
            "infinite_cache_hit_share": hits.token_share,
            "infinite_cache_block_hit_share": hits.block_share,
        },
        "config": asdict(config),
        "layouts": {name: _layout_json(result) for name, result in results.items()},
    }


def _layout_json(result: LayoutResult) -> dict[str, object]:
    derived = {"hit_share": result.hit_share, "requests_per_second": result.requests_per_second}
    return asdict(result) | derived
