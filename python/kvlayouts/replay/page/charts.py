"""Step charts over the windows of a replay, as paths in a box of 1000 by 1000 units.

The template stretches the box to the width of its place and writes every label as HTML beside it, so that text keeps
its size on a phone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BOX: Final = 1000
MAX_X_TICKS: Final = 6
MAX_Y_TICKS: Final = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick:
    """A label on an axis; `at` is its place in percent, from the left or from the top."""

    at: float
    label: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A path in the box, and the class (a tier's name, mostly) that gives it its colour."""

    kind: str
    path: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Hover:
    """A transparent column of the box with a tooltip."""

    x: float
    width: float
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """A scale from `low` to `high` with its ticks, all within."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def place(self, value: float) -> float:
        """Where a value lies, 0 at `low` and 1 at `high`."""
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One layout's chart. `areas` are filled, `lines` drawn over them."""

    name: str
    note: str
    description: str
    areas: tuple[Shape, ...]
    lines: tuple[Shape, ...]
    hovers: tuple[Hover, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]


def nice_axis(low: float, high: float, *, most_ticks: int = MAX_Y_TICKS, smallest_step: float = 0.0) -> Axis:
    """An axis from `low`, which is a tick, to the first tick at or above `high`; steps are 1, 2 or 5 times a power."""
    span = max(high - low, smallest_step, 1e-9)
    rough = max(span / (most_ticks - 1), smallest_step)
    power = 10 ** math.floor(math.log10(rough) + 1e-9)
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    steps = max(1, math.ceil(span / step - 1e-9))
    ticks = tuple(low + number * step for number in range(steps + 1))
    return Axis(low=low, high=ticks[-1], ticks=ticks)


def x_axis(requests: int) -> Axis:
    """From the first request to the last, which need not be a tick."""
    ticks = nice_axis(0, requests, most_ticks=MAX_X_TICKS, smallest_step=1).ticks
    return Axis(low=0, high=requests, ticks=tuple(tick for tick in ticks if tick <= requests))


def step_area(edges: Sequence[int], lower: Sequence[float], upper: Sequence[float], axis: Axis) -> str:
    """The area between two step lines; window `i` lies between edges `i` and `i + 1`."""
    there = _steps(edges, upper, axis)
    back = _steps(edges[::-1], lower[::-1], axis)
    return f"M{' L'.join(there + back)}Z"


def step_line(edges: Sequence[int], values: Sequence[float], axis: Axis) -> str:
    """One step line."""
    return f"M{' L'.join(_steps(edges, values, axis))}"


def _steps(edges: Sequence[int], values: Sequence[float], axis: Axis) -> list[str]:
    requests = max(edges)
    points: list[str] = []
    for (start, end), value in zip(pairwise(edges), values, strict=True):
        y = BOX * (1 - axis.place(value))
        points += [f"{_number(BOX * edge / requests)} {_number(y)}" for edge in (start, end)]
    return points


def hovers(edges: Sequence[int], texts: Sequence[str]) -> tuple[Hover, ...]:
    """A column a window, each with its text under a line that names the requests."""
    requests = edges[-1]
    return tuple(
        Hover(
            x=round(BOX * start / requests, 1),
            width=round(BOX * (end - start) / requests, 1),
            text=f"requests {start + 1:,} to {end:,}\n{text}",
        )
        for (start, end), text in zip(pairwise(edges), texts, strict=True)
    )


def x_ticks(axis: Axis) -> tuple[Tick, ...]:
    """Ticks from the left."""
    return tuple(Tick(at=round(100 * axis.place(tick), 2), label=f"{tick:,.0f}") for tick in axis.ticks)


def y_ticks(axis: Axis, show: Callable[[float], str]) -> tuple[Tick, ...]:
    """Ticks from the top."""
    return tuple(Tick(at=round(100 * (1 - axis.place(tick)), 2), label=show(tick)) for tick in axis.ticks)


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
