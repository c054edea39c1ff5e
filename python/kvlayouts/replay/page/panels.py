"""The three charts over time: hit share by tier, page imbalance, evictions. One panel a layout on shared axes."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from kvlayouts.replay.numbers import count, percent
from kvlayouts.replay.page.charts import (
    Axis,
    Panel,
    Shape,
    hovers,
    nice_axis,
    step_area,
    step_line,
    x_axis,
    x_ticks,
    y_ticks,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvlayouts.replay.results import HitPoint, LayoutResult

    Results = Mapping[str, LayoutResult]

IMBALANCE_STEP = 0.05


def hit_panels(results: Results) -> tuple[Panel, ...]:
    """Device and host hits stacked, and the total of the layout of least capacity as a line to compare with."""
    base = min(results, key=lambda name: results[name].logical_capacity_tokens)
    axis = nice_axis(0, max(_both(point) for result in results.values() for point in result.windows))
    totals = {name: [_both(point) for point in result.windows] for name, result in results.items()}
    panels = []
    for name, result in results.items():
        device = [_share(point, point.device_hit_tokens) for point in result.windows]
        areas = (
            Shape(kind="device", path=step_area(_edges(result), [0.0] * len(device), device, axis)),
            Shape(kind="host", path=step_area(_edges(result), device, totals[name], axis)),
        )
        lines = () if name == base else (Shape(kind="base", path=step_line(_edges(results[base]), totals[base], axis)),)
        note = f"{percent(result.hit_share)} of all prompt tokens came from the cache"
        panels.append(_panel(name, result, note, axis, percent_tick, areas, lines, _hit_text))
    return tuple(panels)


def imbalance_panels(results: Results) -> tuple[Panel, ...]:
    """Pages in use on the fullest lane against the mean, at the end of each window."""
    axis = nice_axis(
        1, max(p.page_imbalance for r in results.values() for p in r.windows), smallest_step=IMBALANCE_STEP
    )
    panels = []
    for name, result in results.items():
        line = step_line(_edges(result), [point.page_imbalance for point in result.windows], axis)
        note = f"{result.page_imbalance:.3f} at the end, {max(p.page_imbalance for p in result.windows):.3f} at most"
        shapes = (Shape(kind="balance", path=line),)
        panels.append(_panel(name, result, note, axis, lambda value: f"{value:.2f}", (), shapes, _imbalance_text))
    return tuple(panels)


def eviction_panels(results: Results) -> tuple[Panel, ...]:
    """Tokens a request that left the device, and that left the host."""
    rates = {name: [_evicted(*window) for window in _with_lengths(result)] for name, result in results.items()}
    axis = nice_axis(0, max(1.0, *(rate for pairs in rates.values() for pair in pairs for rate in pair)))
    panels = []
    for name, result in results.items():
        device, host = zip(*rates[name], strict=True)
        edges, zero = _edges(result), [0.0] * len(device)
        areas = tuple(
            Shape(kind=f"{tier} faint", path=step_area(edges, zero, values, axis))
            for tier, values in (("device", device), ("host", host))
        )
        lines = tuple(
            Shape(kind=tier, path=step_line(edges, values, axis))
            for tier, values in (("device", device), ("host", host))
        )
        note = (
            f"{count(result.evicted_device_tokens)} tokens left the device, "
            f"{count(result.evicted_host_tokens)} left the host"
        )
        panels.append(_panel(name, result, note, axis, count_tick, areas, lines, _eviction_text))
    return tuple(panels)


def percent_tick(value: float) -> str:
    """A share on an axis, without decimals that say nothing."""
    return f"{100 * value:.3g} %"


def count_tick(value: float) -> str:
    """A number on an axis, short."""
    return f"{value / 1000:g}k" if value >= 1000 else f"{value:g}"


def _panel(
    name: str,
    result: LayoutResult,
    note: str,
    axis: Axis,
    show: Callable[[float], str],
    areas: tuple[Shape, ...],
    lines: tuple[Shape, ...],
    text: Callable[[HitPoint, int], str],
) -> Panel:
    return Panel(
        name=name,
        note=note,
        description=f"{name}, requests 1 to {count(result.requests)}: {note}.",
        areas=areas,
        lines=lines,
        hovers=hovers(_edges(result), [text(*window) for window in _with_lengths(result)]),
        x_ticks=x_ticks(x_axis(result.requests)),
        y_ticks=y_ticks(axis, show),
    )


def _edges(result: LayoutResult) -> list[int]:
    return [0, *(point.request_index for point in result.windows)]


def _with_lengths(result: LayoutResult) -> Sequence[tuple[HitPoint, int]]:
    """Each window with the number of its requests."""
    lengths = [end - start for start, end in pairwise(_edges(result))]
    return list(zip(result.windows, lengths, strict=True))


def _share(point: HitPoint, tokens: int) -> float:
    return tokens / point.prompt_tokens if point.prompt_tokens else 0.0


def _both(point: HitPoint) -> float:
    return _share(point, point.device_hit_tokens + point.host_hit_tokens)


def _evicted(point: HitPoint, requests: int) -> tuple[float, float]:
    return point.evicted_device_tokens / requests, point.evicted_host_tokens / requests


def _hit_text(point: HitPoint, requests: int) -> str:
    device, host = (percent(_share(point, tokens)) for tokens in (point.device_hit_tokens, point.host_hit_tokens))
    return f"device {device}, host {host} of {count(point.prompt_tokens)} prompt tokens"


def _imbalance_text(point: HitPoint, requests: int) -> str:
    pages = ", ".join(count(number) for number in point.used_pages)
    return f"max/mean {point.page_imbalance:.3f}; pages in use: {pages}"


def _eviction_text(point: HitPoint, requests: int) -> str:
    return (
        f"{count(point.evicted_device_tokens)} tokens left the device, {count(point.evicted_host_tokens)} left the host"
    )
