"""`kvlayouts bench`: options in, one table out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kvlayouts.bench.config import BENCHES, MIN_ROUNDS, BenchConfig
from kvlayouts.common import options
from kvlayouts.common.cpu_only import hide_accelerators
from kvlayouts.common.endings import termination_as_interrupt
from kvlayouts.common.outputs import check_outputs, deliver, json_output
from kvlayouts.common.trace import DEFAULT_TRACE, read_trace

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvlayouts.bench.figures import Figure
    from kvlayouts.common.trace import Trace

PLAIN_WIDTH = 150  # of the table in a file or a pipe


@click.command(context_settings={"show_default": True})
@options.trace_argument
@click.option("--only", multiple=True, help=f"Run only this one; repeat for more. One of {', '.join(BENCHES)}.")
@click.option("--quick", is_flag=True, help="Small inputs: a minute instead of a quarter of an hour.")
@click.option("--rounds", type=click.IntRange(min=MIN_ROUNDS), default=MIN_ROUNDS, help="Rounds to take the median of.")
@options.file_option("--json", "Write the figures to this file.")
def bench(trace: Path | None, only: tuple[str, ...], quick: bool, rounds: int, json_path: Path | None) -> int:
    """Measure trees, plans and eviction beside SGLang's own, alternating, on this machine's CPU.

    TRACE is a request trace in Mooncake's format, of which at most 2,000 requests are used; without it, the shipped
    1,000 are. Times are of the measuring thread; ratios come from one run. Exit status 1 if a goal was missed.
    """
    check_outputs({"--json": json_path})
    config = BenchConfig(trace=trace or DEFAULT_TRACE, only=only or BENCHES, rounds=rounds, quick=quick)
    return _run(config, _first_requests(config), json_path)


def _first_requests(config: BenchConfig) -> Trace:
    whole = read_trace(config.trace)
    return read_trace(config.trace, max_requests=min(config.requests, len(whole.requests)))


def _run(config: BenchConfig, trace: Trace, json_path: Path | None) -> int:
    hide_accelerators()
    from kvlayouts.bench.run import run_benches
    from kvlayouts.common.progress import progress_on_stderr

    figures: list[Figure] = []
    try:
        with termination_as_interrupt(), progress_on_stderr(unit="steps") as on_step:
            run_benches(config, trace, on_step, figures)
    finally:  # after an interrupt, what there is
        if figures:
            _report(config, trace, figures, json_path)
    return 1 if any(figure.passed is False for figure in figures) else 0


def _report(config: BenchConfig, trace: Trace, figures: Sequence[Figure], json_path: Path | None) -> None:
    from kvlayouts.bench.report import benches_left_out, print_figures, to_json

    deliver(
        lambda console: print_figures(console, figures, benches_left_out(config, figures)),
        json_output(json_path, lambda: to_json(config, trace.name, figures)),
        plain_width=PLAIN_WIDTH,
    )
