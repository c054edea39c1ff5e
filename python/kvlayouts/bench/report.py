"""The table of figures, and the same as JSON."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from kvlayouts.bench.config import BENCHES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from kvlayouts.bench.config import BenchConfig
    from kvlayouts.bench.figures import Figure


def print_figures(console: Console, figures: Sequence[Figure], left_out: Sequence[str] = ()) -> None:
    """One table, a section for each benchmark, and a last line: goals reached, and benchmarks that were `left_out`."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("bench", no_wrap=True)
    table.add_column("case", overflow="fold")
    for name in ("ours", "other", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("compared with", overflow="fold")
    table.add_column("goal")
    for number, figure in enumerate(figures):
        if number and figures[number - 1].bench != figure.bench:
            table.add_section()
        table.add_row(
            figure.bench,
            figure.case,
            "none" if figure.value is None else _quantity(figure.value, figure.unit),
            "" if figure.baseline is None else _quantity(figure.baseline, figure.unit),
            "" if figure.ratio is None else f"{figure.ratio:.4g}",
            "" if figure.baseline is None else figure.baseline_name,
            _goal(figure),
        )
    console.print(table)
    judged = [figure for figure in figures if figure.passed is not None]
    reached = sum(figure.passed is True for figure in judged)
    not_run = f"; not run: {', '.join(left_out)}" if left_out else ""
    console.print(f"\n{reached} of {len(judged)} goals reached{not_run}", highlight=False, soft_wrap=True)


def benches_left_out(config: BenchConfig, figures: Sequence[Figure]) -> list[str]:
    """The benchmarks of `config` that have no figures: what an interrupt cut short or left out."""
    return [bench for bench in BENCHES if bench in config.only and bench not in {figure.bench for figure in figures}]


def to_json(config: BenchConfig, trace_name: str, figures: Sequence[Figure]) -> dict[str, object]:
    """The run as plain JSON values. `not_run` are the benchmarks that an interrupt cut short or left out."""
    return {
        "config": {**asdict(config), "trace": trace_name},
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "sglang", "sglang-kv-layouts")},
        },
        "figures": [asdict(figure) for figure in figures],
        "not_run": benches_left_out(config, figures),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _quantity(value: float, unit: str) -> str:
    digits = f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.3g}"
    return f"{digits} {unit}".rstrip()


def _goal(figure: Figure) -> str:
    if figure.passed is None:
        return ""
    return f"[green]{figure.goal}[/]" if figure.passed else f"[bold red]{figure.goal} MISSED[/]"
