"""`kvlayouts replay`: options in; table, JSON, picture and page out."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, get_args

import click

from kvlayouts.common import options
from kvlayouts.common.errors import RunError
from kvlayouts.common.outputs import Output, check_outputs, deliver, json_output
from kvlayouts.common.strategies import create_group, read_options
from kvlayouts.common.trace import DEFAULT_TRACE, check_device_tokens, default_device_tokens, read_trace
from kvlayouts.common.values import (
    EvictionPolicy,
    HostLayout,
    PoolName,
    VerifyMode,
    WritePolicy,
    check_host_ratio,
    check_layout_names,
    check_pool_page_size,
)
from kvlayouts.replay.config import ReplayConfig

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from kvlayouts.common.trace import Trace
    from kvlayouts.replay.results import LayoutResult


@click.command(context_settings={"show_default": True})
@options.trace_argument
@options.layouts_option("identity", "cp_shared", "host_shared")
@options.layout_config_option("Settings of the strategy, where one --layout is given.")
@click.option("--cp-size", type=options.RANKS, default=4, help="Ranks, one process each.")
@options.pool_option
@click.option("--page-size", type=options.PAGE_TOKENS, default=64, help="Tokens a page; 64 for dsa.")
@click.option(
    "--device-tokens",
    type=click.IntRange(min=1),
    show_default="longest prompt and an eighth",
    help="Device pool of one rank, in tokens; a multiple of the page size that holds the longest prompt.",
)
@click.option("--host-ratio", type=float, default=2.0, help="Host pool of one rank, relative to its device pool.")
@options.policy_option
@options.eviction_policy_option
@options.host_layout_option
@options.requests_option("Replay only the first N requests.")
@options.block_tokens_option
@click.option("--verify", type=click.Choice(get_args(VerifyMode)), default="all", help="Which cached tokens to check.")
@options.file_option("--json", "Write the results to this file.")
@options.file_option("--plot", "Write a PNG of hit share over the trace.")
@options.file_option("--report", "Write the results as one HTML page.")
@options.seed_option("Seed of the KV bytes and samples.")
@click.option("--traceback", "show_traceback", is_flag=True, help="If a rank fails, show where in its code.")
def replay(
    trace: Path | None,
    layouts: tuple[str, ...],
    layout_config: str | None,
    cp_size: int,
    pool: PoolName,
    page_size: int,
    device_tokens: int | None,
    host_ratio: float,
    policy: WritePolicy,
    eviction_policy: EvictionPolicy,
    host_layout: HostLayout,
    requests: int | None,
    block_tokens: int,
    verify: VerifyMode,
    json_path: Path | None,
    plot_path: Path | None,
    report_path: Path | None,
    seed: int,
    show_traceback: bool,
) -> int:
    """Replay a request trace through real trees, controllers and pools, one process per rank.

    TRACE is a file in Mooncake's JSONL format; without it, the first 1,000 requests of Mooncake's conversation trace
    are replayed. Pool sizes are per rank, so that layouts are compared at equal memory per rank.
    """
    trace_path = trace or DEFAULT_TRACE
    check_outputs({"--json": json_path, "--plot": plot_path, "--report": report_path}, trace_path)
    check_layout_names(layouts)
    check_pool_page_size(pool, page_size)
    check_host_ratio(host_ratio)
    layout_options = read_options(layouts, layout_config)
    requests_trace = read_trace(trace_path, block_tokens=block_tokens, max_requests=requests)
    config = ReplayConfig(
        layouts=layouts,
        layout_options=layout_options,
        device_tokens=default_device_tokens(requests_trace, page_size) if device_tokens is None else device_tokens,
        cp_size=cp_size,
        pool=pool,
        page_size=page_size,
        host_ratio=host_ratio,
        policy=policy,
        eviction_policy=eviction_policy,
        host_layout=host_layout,
        block_tokens=block_tokens,
        verify=verify,
        seed=seed,
    )
    _check_room(config, requests_trace)
    _check_memory(config)
    results = _run(config, requests_trace, show_traceback)
    _deliver(config, requests_trace, results, json_path, plot_path, report_path)
    return 0 if all(result.passed for result in results.values()) else 1


def _check_room(config: ReplayConfig, trace: Trace) -> None:
    """Raise `InputError` for a layout that refuses its settings, or has no room for some prompt."""
    for name in config.layouts:
        layout = create_group(
            name, page_size=config.page_size, shard_size=config.cp_size, options=config.layout_options
        )[0]
        check_device_tokens(trace, config.page_size, config.device_tokens, name, layout.logical_tokens)


def _check_memory(config: ReplayConfig) -> None:
    """Raise `InputError` if the machine has no room for the pools of all ranks, which no layout changes."""
    from kvlayouts.ranks.memory import refuse_more_than_there_is
    from kvlayouts.replay.geometries import GEOMETRIES
    from sglang.srt.mem_cache.layouts.config import PoolKind

    sizes = f"--device-tokens {config.device_tokens} and --host-ratio {config.host_ratio:g}"
    refuse_more_than_there_is(
        f"--cp-size {config.cp_size} with {sizes}",
        GEOMETRIES[PoolKind(config.pool)],
        ranks=config.cp_size,
        device_pages=config.device_pages,
        host_pages=config.host_pages,
        page_size=config.page_size,
    )


def _run(config: ReplayConfig, trace: Trace, show_traceback: bool) -> dict[str, LayoutResult]:
    from kvlayouts.common.progress import progress_on_stderr
    from kvlayouts.replay.driver import run_replay

    try:
        with progress_on_stderr() as on_progress:
            return run_replay(config, trace, on_progress)
    except RunError as error:
        if show_traceback and error.__cause__ is not None:
            print(error.__cause__, file=sys.stderr)
        raise


def _deliver(
    config: ReplayConfig,
    trace: Trace,
    results: Mapping[str, LayoutResult],
    json_path: Path | None,
    plot_path: Path | None,
    report_path: Path | None,
) -> None:
    from kvlayouts.replay.report import print_report
    from kvlayouts.replay.results import to_json

    def plot(path: Path) -> None:
        from kvlayouts.replay.plot import write_plot

        write_plot(path, config, trace, results)

    def page(path: Path) -> None:
        from kvlayouts.replay.page.render import write_page

        write_page(path, config, trace, results)

    deliver(
        lambda console: print_report(console, config, trace, results),
        json_output(json_path, lambda: to_json(config, trace, results)),
        Output(flag="--plot", path=plot_path, write=plot),
        Output(flag="--report", path=report_path, write=page),
    )
