"""The table of figures, and the same as JSON."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from sglang.srt.mem_cache.hicache.cli.bench.config import BenchConfig
    from sglang.srt.mem_cache.hicache.cli.bench.figures import Figure


def print_figures(console: Console, figures: Sequence[Figure]) -> None:
    """One table, a section for each benchmark, and a last line that counts the goals."""
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
            _quantity(figure.value, figure.unit),
            "" if figure.baseline is None else _quantity(figure.baseline, figure.unit),
            "" if figure.ratio is None else f"{figure.ratio:.4g}",
            figure.baseline_name,
            _goal(figure),
        )
    console.print(table)
    judged = [figure for figure in figures if figure.passed is not None]
    reached = sum(figure.passed is True for figure in judged)
    console.print(f"\n{reached} of {len(judged)} goals reached", highlight=False)


def to_json(config: BenchConfig, trace_name: str, figures: Sequence[Figure]) -> dict[str, object]:
    """The run as plain JSON values. `not_run` are the benchmarks that an interrupt left out."""
    return {
        "config": {**asdict(config), "trace": trace_name},
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "sglang", "sglang-kv-layouts")},
        },
        "figures": [asdict(figure) for figure in figures],
        "not_run": [bench for bench in config.only if bench not in {figure.bench for figure in figures}],
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
