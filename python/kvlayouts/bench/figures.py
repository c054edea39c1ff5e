"""A figure: what was measured, against what, and whether it reached its goal."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One line of the table.

    `value` is ours, in `unit`, None if there was nothing to measure; `baseline` is what it is compared with, if
    anything, in the same unit. `ratio` is the median of the ratios of the rounds, which is not the ratio of the
    medians, None if there is nothing to divide by. `passed` says whether `goal` was reached, None without a goal.
    """

    bench: str
    case: str
    value: float | None
    unit: str
    baseline: float | None = None
    baseline_name: str = ""
    ratio: float | None = None
    goal: str = ""
    passed: bool | None = None


class OnStep(Protocol):
    """Called as a benchmark goes on, with its name, the steps done and all its steps."""

    def __call__(self, bench: str, done: int, total: int, /) -> None: ...


def compared(
    bench: str,
    case: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    *,
    unit: str,
    baseline_name: str,
    at_most: float | None = None,
) -> Figure:
    """A figure from one measurement a round of both sides; its goal is a ratio of `at_most`."""
    ratio = median(mine / other for mine, other in zip(ours, theirs, strict=True))
    return Figure(
        bench=bench,
        case=case,
        value=median(ours),
        unit=unit,
        baseline=median(theirs),
        baseline_name=baseline_name,
        ratio=ratio,
        goal="" if at_most is None else f"ratio <= {at_most:g}",
        passed=None if at_most is None else ratio <= at_most,
    )


def bounded(bench: str, case: str, value: float, *, unit: str, at_most: float) -> Figure:
    """A figure whose goal is a value of `at_most`."""
    return Figure(
        bench=bench, case=case, value=value, unit=unit, goal=f"<= {at_most:g} {unit}".rstrip(), passed=value <= at_most
    )
