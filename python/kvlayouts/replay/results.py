"""What a replay found, layout by layout, and its JSON form.

Shares and rates are derived, never stored. `LayoutResult` refuses numbers that contradict each other, so a table, a
picture or a JSON file can only be made from a run whose hits and computed tokens add up.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Final

from kvlayouts.common.errors import RunError
from kvlayouts.common.trace import trace_json
from kvlayouts.common.values import ceil_div

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvlayouts.common.trace import Trace
    from kvlayouts.replay.config import ReplayConfig

OPTION_FLAGS: Final = {"host_layout": "--host-mem-layout"}
"""Fields of `ReplayConfig` whose flag has another name."""

HIT_SERIES_POINTS: Final = 50
"""Windows that a replay's hit series has at most."""

WINDOW_COUNTS: Final = (
    "device_hit_tokens",
    "host_hit_tokens",
    "computed_tokens",
    "evicted_device_tokens",
    "evicted_host_tokens",
)
"""Fields of a `HitPoint` that add up over the windows, to the fields of that name of a `LayoutResult`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HitPoint:
    """One window of consecutive requests: where their prompt tokens came from, what was evicted, what is in use.

    Windows join without gaps. `request_index` counts the requests replayed when the window closed; the window began at
    the previous point's. Tokens are logical and of the window; pages are those in use when it closed, one entry a lane.
    """

    request_index: int
    device_hit_tokens: int
    host_hit_tokens: int
    computed_tokens: int
    evicted_device_tokens: int
    evicted_host_tokens: int
    device_pages_per_lane: tuple[int, ...]
    host_pages_per_lane: tuple[int, ...]

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of the window's requests."""
        return self.device_hit_tokens + self.host_hit_tokens + self.computed_tokens

    @property
    def page_imbalance(self) -> float:
        """Pages in use when the window closed, device and host together: the fullest lane against the mean."""
        return page_imbalance(self.device_pages_per_lane, self.host_pages_per_lane)

    @property
    def used_pages(self) -> list[int]:
        """Pages in use when the window closed, device and host together, of each owner."""
        return used_pages(self.device_pages_per_lane, self.host_pages_per_lane)


def used_pages(device_pages_per_lane: Sequence[int], host_pages_per_lane: Sequence[int]) -> list[int]:
    """Pages in use, device and host together, of each owner. The one lane of a tier is every owner's."""
    owners = max(len(device_pages_per_lane), len(host_pages_per_lane))
    tiers = [
        lanes if len(lanes) == owners else [lanes[0]] * owners for lanes in (device_pages_per_lane, host_pages_per_lane)
    ]
    return [device + host for device, host in zip(*tiers, strict=True)]


def page_imbalance(device_pages_per_lane: Sequence[int], host_pages_per_lane: Sequence[int]) -> float:
    """Pages in use, device and host together: the fullest lane against the mean; 1.0 where nothing is in use."""
    used = used_pages(device_pages_per_lane, host_pages_per_lane)
    return max(used) * len(used) / sum(used) if sum(used) else 1.0


class HitSeriesRecorder:
    """Collects one request after the other into at most `points` windows of equal length (the last may be shorter)."""

    def __init__(self, requests: int, points: int = HIT_SERIES_POINTS) -> None:
        self._requests = requests
        self._window_requests = max(1, ceil_div(requests, points))
        self._done = 0
        self._window = Counter[str]()
        self._points: list[HitPoint] = []

    def add(self, request: HitPoint) -> None:
        """Count the next request, told as a window of its own; its three parts add up to its prompt."""
        for name in WINDOW_COUNTS:
            self._window[name] += getattr(request, name)
        self._done += 1
        if self._done % self._window_requests == 0 or self._done == self._requests:
            window = self._window
            self._points.append(
                HitPoint(
                    request_index=self._done,
                    device_hit_tokens=window["device_hit_tokens"],
                    host_hit_tokens=window["host_hit_tokens"],
                    computed_tokens=window["computed_tokens"],
                    evicted_device_tokens=window["evicted_device_tokens"],
                    evicted_host_tokens=window["evicted_host_tokens"],
                    device_pages_per_lane=request.device_pages_per_lane,
                    host_pages_per_lane=request.host_pages_per_lane,
                )
            )
            self._window.clear()

    def series(self) -> tuple[HitPoint, ...]:
        """The windows closed so far."""
        return tuple(self._points)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutResult:
    """One layout's replay. Tuples ending in `_per_rank` have one entry per rank; the other `_per_rank` sizes are equal
    on all ranks. Tokens are logical, bytes physical. Pages are those that a rank's pools have in use at the end;
    `_capacity_pages` is what the pools of one rank hold. `tree_digest` is rank 0's at the end, in hexadecimal.

    Construction raises `RunError` where the parts do not add up to the prompts, or the tuples differ in length.
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
    device_pages_per_rank: tuple[int, ...]
    host_pages_per_rank: tuple[int, ...]
    device_capacity_pages: int
    host_capacity_pages: int
    page_imbalance: float
    write_acks_per_rank: tuple[int, ...]
    load_acks_per_rank: tuple[int, ...]
    digests_equal: bool
    tree_digest: str
    verified_tokens: int
    mismatched_tokens: int
    seconds: float
    evicted_device_tokens: int = 0
    evicted_host_tokens: int = 0
    refused_backups: int = 0
    received_bytes_per_rank: tuple[int, ...] = ()
    host_capacity_tokens: int = 0
    hit_series: tuple[HitPoint, ...] = ()

    def __post_init__(self) -> None:
        parts = self.device_hit_tokens + self.host_hit_tokens + self.computed_tokens
        if parts != self.prompt_tokens:
            raise RunError(
                f"device hits, host hits and computed tokens add up to {parts}, but the prompts have "
                f"{self.prompt_tokens} tokens"
            )
        ranks = {
            len(self.d2h_bytes_per_rank),
            len(self.h2d_bytes_per_rank),
            len(self.device_pages_per_rank),
            len(self.host_pages_per_rank),
            len(self.write_acks_per_rank),
            len(self.load_acks_per_rank),
        }
        if len(ranks) != 1 or ranks == {0}:
            raise RunError(f"the ranks reported differing numbers of entries: {sorted(ranks)}")
        self._check_series()

    def _check_series(self) -> None:
        if not self.hit_series:
            return
        for name in WINDOW_COUNTS:
            counted, total = sum(getattr(point, name) for point in self.hit_series), getattr(self, name)
            if counted != total:
                raise RunError(f"{name} of the hit series add up to {counted}, the run has {total}")

    @property
    def windows(self) -> tuple[HitPoint, ...]:
        """The hit series; one window over all requests where the run has none."""
        if self.hit_series:
            return self.hit_series
        whole = HitPoint(
            request_index=self.requests,
            device_hit_tokens=self.device_hit_tokens,
            host_hit_tokens=self.host_hit_tokens,
            computed_tokens=self.computed_tokens,
            evicted_device_tokens=self.evicted_device_tokens,
            evicted_host_tokens=self.evicted_host_tokens,
            device_pages_per_lane=self.device_pages_per_rank,
            host_pages_per_lane=self.host_pages_per_rank,
        )
        return (whole,)

    @property
    def capacity_tokens(self) -> int:
        """Tokens that all ranks together hold on both tiers."""
        return self.logical_capacity_tokens + self.host_capacity_tokens

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
    """The run as plain JSON values: `trace`, `config` (every option), `command` to run it again, `layouts` by name."""
    return {
        "trace": trace_json(trace),
        "config": {
            "trace": None if trace.path is None else str(trace.path),
            "requests": len(trace.requests),
            **asdict(config),
        },
        "command": rerun_command(config, trace),
        "layouts": {name: _layout_json(result) for name, result in results.items()},
    }


def rerun_command(config: ReplayConfig, trace: Trace) -> str:
    """The command line that replays the same requests with the same options, whatever the defaults become.

    The trace is named as it was given, so a relative path is relative to the directory of the first run.
    """
    words = ["kvlayouts", "replay", *([] if trace.path is None else [str(trace.path)])]
    for name in config.layouts:
        words += ["--layout", name]
    if config.layout_options:
        words += ["--layout-config", json.dumps(dict(config.layout_options))]
    words += ["--requests", str(len(trace.requests))]
    for field in fields(config):
        if field.name not in ("layouts", "layout_options"):
            flag = OPTION_FLAGS.get(field.name, "--" + field.name.replace("_", "-"))
            words += [flag, str(getattr(config, field.name))]
    return shlex.join(words)


def _layout_json(result: LayoutResult) -> dict[str, object]:
    derived = {"hit_share": result.hit_share, "requests_per_second": result.requests_per_second}
    return asdict(result) | derived
