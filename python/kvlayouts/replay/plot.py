"""The picture of a replay: hit share by tier over the trace, one panel per layout on shared axes.

Colours are from the Okabe-Ito palette, which colour-blind readers can tell apart. Drawn with matplotlib's Agg canvas:
no display is needed and no global state is touched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patheffects import Normal, Stroke
from matplotlib.ticker import MaxNLocator, PercentFormatter, StrMethodFormatter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from kvlayouts.common.trace import Trace
    from kvlayouts.replay.config import ReplayConfig
    from kvlayouts.replay.results import HitPoint, LayoutResult

DEVICE_COLOUR: Final = "#0072B2"
HOST_COLOUR: Final = "#E69F00"
BASE_COLOUR: Final = "#000000"


def write_plot(path: Path, config: ReplayConfig, trace: Trace, results: Mapping[str, LayoutResult]) -> None:
    """Write the picture as a PNG, replacing what is there. Raises OSError where the file cannot be written."""
    figure = Figure(figsize=(9.0, 1.6 + 2.4 * len(results)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels: list[Axes] = list(figure.subplots(len(results), 1, sharex=True, sharey=True, squeeze=False)[:, 0])
    names = list(results)
    base = min(names, key=lambda name: results[name].logical_capacity_tokens)
    for axes, name in zip(panels, names, strict=True):
        _draw_panel(axes, name, results[name])
        if name != base:
            _draw_base(axes, base, results[base])
        axes.legend(loc="upper left", ncols=3, frameon=False, fontsize="small")
    highest = max(_highest_share(result) for result in results.values())
    panels[0].set_ylim(0, min(1.25, max(0.05, 1.25 * highest)))  # room for the legend above the curves
    panels[-1].set_xlabel("requests replayed")
    panels[-1].xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    figure.supylabel("prompt tokens served from cache", fontsize="medium")
    figure.suptitle(
        f"{trace.name}: {config.cp_size} ranks, {config.device_tokens:,} device tokens a rank, "
        f"{config.host_ratio:g}x on host",
        fontsize="large",
    )
    with path.open("wb") as file:
        figure.savefig(file, format="png")


def _draw_panel(axes: Axes, name: str, result: LayoutResult) -> None:
    points, edges = _windows(result)
    device = [_share(point.device_hit_tokens, point) for point in points]
    both = [_share(point.device_hit_tokens + point.host_hit_tokens, point) for point in points]
    axes.stairs(device, edges, fill=True, color=DEVICE_COLOUR, label="device")
    axes.stairs(both, edges, baseline=device, fill=True, color=HOST_COLOUR, label="host")
    axes.set_title(
        f"{name}: {100 * result.hit_share:.1f} % hit share, {result.logical_capacity_tokens:,} tokens of capacity",
        loc="left",
        fontsize="medium",
    )
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0, symbol=" %"))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
    axes.set_xlim(0, edges[-1])
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_base(axes: Axes, base: str, result: LayoutResult) -> None:
    """The total of the layout with the least capacity, as a line to compare with."""
    points, edges = _windows(result)
    total = [_share(point.device_hit_tokens + point.host_hit_tokens, point) for point in points]
    axes.stairs(
        total,
        edges,
        baseline=None,
        color=BASE_COLOUR,
        linewidth=1.8,
        path_effects=[Stroke(linewidth=4.0, foreground="white"), Normal()],
        label=f"{base}, device + host",
    )


def _windows(result: LayoutResult) -> tuple[Sequence[HitPoint], list[int]]:
    """The windows and their edges in requests."""
    points = result.windows
    return points, [0, *(point.request_index for point in points)]


def _highest_share(result: LayoutResult) -> float:
    return max(_share(point.device_hit_tokens + point.host_hit_tokens, point) for point in result.windows)


def _share(tokens: int, point: HitPoint) -> float:
    return tokens / point.prompt_tokens if point.prompt_tokens else 0.0
