"""`kvlayouts bench`: options in, one table out."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from kvlayouts.bench.config import BENCHES, MIN_ROUNDS, BenchConfig
from kvlayouts.endings import termination_as_interrupt
from kvlayouts.replay import config as options
from kvlayouts.replay.trace import DEFAULT_TRACE, read_trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvlayouts.bench.figures import Figure
    from kvlayouts.replay.trace import Trace

EXIT_MISSED = 1
PLAIN_WIDTH = 150  # of the table in a file or a pipe


@click.command(context_settings={"show_default": True})
@click.argument("trace", type=click.Path(path_type=Path), required=False)
@click.option("--only", multiple=True, help=f"Run only this one; repeat for more. One of {', '.join(BENCHES)}.")
@click.option("--quick", is_flag=True, help="Small inputs: a minute instead of a quarter of an hour.")
@click.option("--rounds", type=click.IntRange(min=MIN_ROUNDS), default=MIN_ROUNDS, help="Rounds to take the median of.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the figures to this file.")
def bench(trace: Path | None, only: tuple[str, ...], quick: bool, rounds: int, json_path: Path | None) -> int:
    """Measure trees, plans and eviction beside SGLang's own, alternating, on this machine's CPU.

    TRACE is a request trace in Mooncake's format, of which at most 2,000 requests are used; without it, the shipped
    1,000 are. Times are of the measuring thread; ratios come from one run. Exit status 1 if a goal was missed.
    """
    options.check_output_file("--json", json_path)
    config = BenchConfig(trace=trace or DEFAULT_TRACE, only=only or BENCHES, rounds=rounds, quick=quick)
    return _run(config, _first_requests(config), json_path)


def _first_requests(config: BenchConfig) -> Trace:
    whole = read_trace(config.trace)
    return read_trace(config.trace, max_requests=min(config.requests, len(whole.requests)))


def _run(config: BenchConfig, trace: Trace, json_path: Path | None) -> int:
    from kvlayouts.bench.run import run_benches
    from kvlayouts.replay.progress import show_progress

    figures: list[Figure] = []
    try:
        console = Console(stderr=True, force_terminal=sys.stderr.isatty())
        with termination_as_interrupt(), show_progress(console, unit="steps") as on_step:
            run_benches(config, trace, on_step, figures)
    finally:  # after an interrupt, what there is
        if figures:
            _report(config, trace, figures, json_path)
    return EXIT_MISSED if any(figure.passed is False for figure in figures) else 0


def _report(config: BenchConfig, trace: Trace, figures: Sequence[Figure], json_path: Path | None) -> None:
    from kvlayouts.bench.report import benches_left_out, print_figures

    terminal = sys.stdout.isatty()
    try:
        console = Console(force_terminal=terminal, width=None if terminal else PLAIN_WIDTH)
        print_figures(console, figures, benches_left_out(config, figures))
    finally:  # also where nobody reads the table
        _write(config, trace, figures, json_path)


def _write(config: BenchConfig, trace: Trace, figures: Sequence[Figure], json_path: Path | None) -> None:
    """Raises `ReplayInputError` where the file could not be written after all."""
    from kvlayouts.bench.report import to_json

    if json_path is not None:
        try:
            text = json.dumps(to_json(config, trace.name, figures), indent=2, allow_nan=False)
            json_path.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise options.ReplayInputError(
                f"--json {json_path}: cannot be written: {error.strerror or error}"
            ) from error
