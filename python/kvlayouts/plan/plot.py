"""The picture of a plan: hit share against host memory, one line a layout, and what the machine has.

Colours are from the Okabe-Ito palette, which colour-blind readers can tell apart; lines differ in their markers too.
"""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING, Any, Final

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patheffects import Normal, Stroke
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, PercentFormatter

from kvlayouts.plan.report import gb
from kvlayouts.plan.results import KNEE_SHARE
from kvlayouts.plan.settings import GB

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from matplotlib.axes import Axes

    from kvlayouts.common.trace import Trace
    from kvlayouts.plan.results import LayoutPlan, Plan
    from kvlayouts.plan.settings import PlanConfig

COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
MARKERS: Final = ("o", "s", "D", "^", "v", "P")
INK: Final = "#24292f"
SOFT: Final = "#6e7781"
REFUSED: Final = "#b3261e"
DOTS: Final = (0, (2, 2))
KNEE_STYLE: Final[Mapping[str, Any]] = {
    "linestyle": "none",
    "markersize": 11,
    "markerfacecolor": "white",
    "markeredgewidth": 2.4,
}


def write_plot(path: Path, config: PlanConfig, trace: Trace, plan: Plan) -> None:
    """Write the picture as a PNG, replacing what is there. Raises OSError where the file cannot be written."""
    figure = Figure(figsize=(9.0, 5.4), dpi=144, layout="constrained")
    FigureCanvasAgg(figure)
    axes: Axes = figure.subplots()
    bound = trace.infinite_cache_hits().token_share
    _draw_bound(axes, bound)
    for number, (name, layout) in enumerate(plan.layouts.items()):
        _draw_layout(axes, name, layout, number)
    _dress(axes, bound, plan.layouts)
    _draw_machine(axes, config)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9.5, labelcolor=INK)
    title = figure.suptitle("Hit share against host memory", ha="left", fontsize=14, fontweight="bold", color=INK)
    axes.set_title(
        f"{config.model.name}, {config.gpus} GPUs with {gb(config.device_bytes)} of KV each, "
        f"{config.policy}, {config.eviction_policy}\n{trace.name}, {len(trace.requests):,} requests",
        loc="left",
        fontsize=9.5,
        color=SOFT,
        pad=10,
    )
    figure.draw_without_rendering()
    title.set_x(axes.get_position().x0)
    with path.open("wb") as file:
        figure.savefig(file, format="png")


def _draw_layout(axes: Axes, name: str, layout: LayoutPlan, number: int) -> None:
    colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
    sizes = [point.machine_host_bytes / GB for point in layout.sweep]
    shares = [point.hits.hit_share for point in layout.sweep]
    device = [point.device_share for point in layout.sweep]
    axes.fill_between(sizes, device, shares, color=colour, alpha=0.10, linewidth=0)
    axes.plot(sizes, device, color=colour, linewidth=1.2, linestyle=DOTS)
    axes.plot(sizes, shares, color=colour, linewidth=2.4, marker=marker, markersize=5.5, label=name, zorder=3)
    knee = layout.knee
    if knee is not None:
        at = (knee.machine_host_bytes / GB, knee.hits.hit_share)
        axes.plot(*at, color=colour, marker=marker, **KNEE_STYLE, zorder=4)
        axes.annotate(
            f"{name}: {gb(knee.machine_host_bytes)} for {100 * knee.hits.hit_share:.1f} %",
            at,
            xytext=(0, -22),
            textcoords="offset points",
            ha="center",
            va="top",
            fontsize=9.5,
            fontweight="bold",
            color=colour,
            path_effects=[Stroke(linewidth=3.0, foreground="white"), Normal()],
        )


def _draw_bound(axes: Axes, bound: float) -> None:
    axes.axhline(bound, color=SOFT, linewidth=1.2, linestyle=(0, (6, 3)))
    axes.annotate(
        f"a cache that never forgets: {100 * bound:.1f} %",
        (0.01, bound),
        xycoords=("axes fraction", "data"),
        xytext=(0, 5),
        textcoords="offset points",
        fontsize=9,
        color=SOFT,
    )


def _draw_machine(axes: Axes, config: PlanConfig) -> None:
    """What was asked for, and where the machine's memory ends."""
    marks = [(config.machine_host_bytes, f"asked for: {gb(config.machine_host_bytes)}", INK)]
    budget = config.machine_budget_bytes
    if budget is not None:
        marks.append((budget, f"the machine has {gb(budget)}", REFUSED))
    low, high = axes.get_xlim()
    for row, (size, text, colour) in enumerate(marks):
        at = size / GB
        if not low <= at <= high:
            continue
        axes.axvline(at, color=colour, linewidth=1.2, zorder=1)
        on_the_left = log(at / low) > log(high / low) / 3
        axes.annotate(
            text,
            (at, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(-5 if on_the_left else 5, -12 - 13 * row),
            textcoords="offset points",
            ha="right" if on_the_left else "left",
            fontsize=9.5,
            color=colour,
        )
    if budget is not None and budget / GB < high:
        axes.axvspan(max(budget / GB, low), high, color=REFUSED, alpha=0.06, linewidth=0, zorder=0)
        axes.set_xlim(low, high)


def _dress(axes: Axes, bound: float, layouts: Mapping[str, LayoutPlan]) -> None:
    axes.set_xscale("log")
    sizes = [point.machine_host_bytes / GB for layout in layouts.values() for point in layout.sweep]
    axes.set_xlim(min(sizes) / 1.15, max(sizes) * 1.15)
    axes.xaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0), numticks=20))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: gb(value * GB)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(0, max(1.2 * bound, 0.02))
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0 if bound > 0.05 else 1, symbol=" %"))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 5, 10]))
    axes.set_xlabel("host memory for KV on one machine, all its ranks", color=INK)
    axes.set_ylabel("prompt tokens served from cache", color=INK)
    axes.grid(which="major", color="#d0d7de", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=SOFT, labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(SOFT)
    axes.plot([], [], color=SOFT, linewidth=1.2, linestyle=DOTS, label="of it, from the device")
    if any(layout.knee is not None for layout in layouts.values()):
        axes.plot([], [], color=SOFT, **KNEE_STYLE, marker="o", label=f"twice the memory adds < {100 * KNEE_SHARE:g} %")
