"""What the page says, as plain data for the template: bars, tables, settings. No HTML here."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from kvlayouts.replay.numbers import count, percent, show_bytes, show_range
from kvlayouts.replay.page.charts import Tick, nice_axis
from kvlayouts.replay.page.panels import percent_tick

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvlayouts.common.trace import Trace
    from kvlayouts.replay.config import ReplayConfig
    from kvlayouts.replay.results import HitPoint, LayoutResult

    Results = Mapping[str, LayoutResult]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """A number and the part of its track that it fills, in percent."""

    kind: str
    fill: float
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTable:
    """One layout's bars: a row a rank, a column a number."""

    name: str
    note: str
    rows: tuple[tuple[Bar, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Overview:
    """One layout in short. `device` and `host` are widths on the overview's axis, in percent."""

    name: str
    share: str
    device: float
    host: float
    facts: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class OverviewAxis:
    """The common axis of the overview's bars, with the bound that no layout can pass."""

    ticks: tuple[Tick, ...]
    bound: Tick


def overview(trace: Trace, results: Results) -> tuple[OverviewAxis, tuple[Overview, ...]]:
    """Each layout's hit share by tier as a bar on one axis, and what it cost."""
    bound = trace.infinite_cache_hits().token_share
    axis = nice_axis(0, max(bound, *(result.hit_share for result in results.values())), most_ticks=6)
    ticks = tuple(Tick(at=100 * axis.place(tick), label=percent_tick(tick)) for tick in axis.ticks)
    layouts = tuple(
        Overview(
            name=name,
            share=percent(result.hit_share),
            device=100 * axis.place(result.device_hit_tokens / result.prompt_tokens),
            host=100 * axis.place(result.host_hit_tokens / result.prompt_tokens),
            facts=(
                ("tokens fit on the devices", count(result.logical_capacity_tokens)),
                ("copied to host, a rank", show_range(result.d2h_bytes_per_rank, show_bytes)),
                ("loaded back, a rank", show_range(result.h2d_bytes_per_rank, show_bytes)),
                ("tokens deleted from host", count(result.evicted_host_tokens)),
            ),
        )
        for name, result in results.items()
    )
    return OverviewAxis(ticks=ticks, bound=Tick(at=100 * axis.place(bound), label=percent(bound))), layouts


def traffic_tables(results: Results) -> tuple[RankTable, ...]:
    """Bytes that each rank copied. The bars of one direction have one scale over all layouts."""
    to_host = max(max(result.d2h_bytes_per_rank) for result in results.values())
    to_device = max(max(result.h2d_bytes_per_rank) for result in results.values())
    return tuple(
        RankTable(
            name=name,
            note=f"{show_bytes(sum(result.d2h_bytes_per_rank))} to host and "
            f"{show_bytes(sum(result.h2d_bytes_per_rank))} back, over all ranks",
            rows=tuple(
                (_bar("device", down, to_host, show_bytes), _bar("host", up, to_device, show_bytes))
                for down, up in zip(result.d2h_bytes_per_rank, result.h2d_bytes_per_rank, strict=True)
            ),
        )
        for name, result in results.items()
    )


def balance_tables(results: Results) -> tuple[RankTable, ...]:
    """Pages that each rank's pools have in use at the end, against what they hold."""
    return tuple(
        RankTable(
            name=name,
            note=f"fullest rank against the mean: {result.page_imbalance:.3f}",
            rows=tuple(
                (
                    _bar("device", device, result.device_capacity_pages, count),
                    _bar("host", host, result.host_capacity_pages, count),
                )
                for device, host in zip(result.device_pages_per_rank, result.host_pages_per_rank, strict=True)
            ),
        )
        for name, result in results.items()
    )


def _bar(kind: str, value: int, full: int, show: Callable[[int], str]) -> Bar:
    return Bar(kind=kind, fill=round(min(100.0, 100 * value / full), 2) if full else 0.0, text=show(value))


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowTable:
    """The numbers of one chart: a row a window, for each layout the same columns."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]


def hit_numbers(results: Results) -> WindowTable:
    """Tokens by tier."""
    return _window_table(
        results,
        {"device": lambda p: count(p.device_hit_tokens), "host": lambda p: count(p.host_hit_tokens)}
        | {"computed": lambda p: count(p.computed_tokens)},
    )


def imbalance_numbers(results: Results) -> WindowTable:
    """Imbalance at the end of each window."""
    return _window_table(results, {"max/mean": lambda p: f"{p.page_imbalance:.3f}"})


def eviction_numbers(results: Results) -> WindowTable:
    """Tokens that left each tier."""
    return _window_table(
        results,
        {"from device": lambda p: count(p.evicted_device_tokens), "from host": lambda p: count(p.evicted_host_tokens)},
    )


def _window_table(results: Results, columns: Mapping[str, Callable[[HitPoint], str]]) -> WindowTable:
    """Windows end alike in all layouts: they follow from the number of requests."""
    by_layout: Sequence[tuple[HitPoint, ...]] = [result.windows for result in results.values()]
    longest = max(by_layout, key=len)
    rows = []
    for number, window in enumerate(longest):
        first = longest[number - 1].request_index + 1 if number else 1
        cells = [
            show(points[number]) if number < len(points) else "" for points in by_layout for show in columns.values()
        ]
        rows.append((f"{first:,} to {window.request_index:,}", tuple(cells)))
    return WindowTable(columns=tuple(columns), rows=tuple(rows))


def settings(config: ReplayConfig, trace: Trace) -> tuple[tuple[str, str], ...]:
    """Every option that has an influence on the numbers, in words."""
    return (
        ("Trace", trace.name),
        ("Requests", count(len(trace.requests))),
        ("Prompt tokens", f"{count(trace.prompt_tokens)}, the longest prompt {count(trace.longest_prompt_tokens)}"),
        ("Tokens a trace block", count(trace.block_tokens)),
        ("Layout strategies", ", ".join(config.layouts)),
        *((f"Setting {name}", json.dumps(value)) for name, value in config.layout_options.items()),
        ("Ranks", count(config.cp_size)),
        ("KV pool", config.pool),
        ("Tokens a page", count(config.page_size)),
        ("Device pool of a rank", f"{count(config.device_tokens)} tokens, {count(config.device_pages)} pages"),
        (
            "Host pool of a rank",
            f"{count(config.host_pages * config.page_size)} tokens, {count(config.host_pages)} pages",
        ),
        ("Copied to host", config.policy),
        ("Eviction", config.eviction_policy),
        ("Host memory", config.host_layout),
        ("Verified", config.verify),
        ("Seed", str(config.seed)),
    )


def versions() -> str:
    """What the run was made with."""
    found = [f"Python {platform.python_version()}"]
    for name, distribution in (("", "sglang-kv-layouts"), ("SGLang", "sglang"), ("PyTorch", "torch")):
        try:
            found.append(f"{name or distribution} {version(distribution)}")
        except PackageNotFoundError:
            continue
    return f"{', '.join(found)}; {os.cpu_count()} CPU cores"
