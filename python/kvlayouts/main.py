"""`kvlayouts`: the command line.

Exit status: 0; 1 for a mismatch, ranks that disagree or a run that failed; 2 for bad input; 128 and the number of a
signal that ended it, or 141 where nobody reads what it writes (`endings`). All but the last end with one line
on stderr. Nothing here imports PyTorch or SGLang before the input is known to be good; where SGLang's wheel is
installed, its own package loads both as soon as this module is found in it.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Final, get_args

import click
from rich.console import Console

from kvlayouts.bench.command import bench
from kvlayouts.endings import (
    EXIT_READER_GONE,
    behind,
    drop_unread_output,
    interrupt_status,
)
from kvlayouts.explain.command import explain
from kvlayouts.own_flags import options_of, own_words
from kvlayouts.plan.command import plan
from kvlayouts.ranks.messages import RankError
from kvlayouts.replay import config as options
from kvlayouts.replay.config import ReplayConfig, ReplayError, ReplayInputError
from kvlayouts.replay.trace import (
    DEFAULT_TRACE,
    check_device_tokens,
    default_device_tokens,
    read_trace,
)
from kvlayouts.soak.command import soak

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvlayouts.replay.results import LayoutResult
    from kvlayouts.replay.trace import Trace

DISTRIBUTION: Final = "sglang-kv-layouts"
DEFAULT_LAYOUTS: Final = ("identity", "cp_shared")

OUTPUT_SUFFIXES: Final = {"--plot": ".png", "--report": ".html"}

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_BAD_INPUT: Final = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status; `argv` is `sys.argv[1:]` where it is None."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # pictures and names may hold what the terminal does not know
    try:
        status = cli.main(args=None if argv is None else list(argv), prog_name="kvlayouts", standalone_mode=False)
    except click.ClickException as error:
        return _fail(error.format_message(), EXIT_BAD_INPUT)
    except ReplayInputError as error:
        return _fail(str(error), EXIT_BAD_INPUT)
    except (ReplayError, RankError) as error:
        return _fail(str(error), EXIT_FAILED)
    except (click.Abort, OSError, SystemExit) as error:
        return _ended_early(error)
    return status if isinstance(status, int) else EXIT_OK


def _ended_early(error: click.Abort | OSError | SystemExit) -> int:
    """The exit status after an interrupt, a closed pipe (where rich and click exit, and only there), or an error."""
    interrupt = behind(error, KeyboardInterrupt)
    if interrupt is not None or isinstance(error, click.Abort):
        return _fail(str(interrupt or "") or "interrupted", interrupt_status(interrupt))
    if isinstance(error, OSError) and behind(error, BrokenPipeError) is None:
        return _fail(": ".join(filter(None, (error.filename, error.strerror or str(error)))), EXIT_FAILED)
    drop_unread_output()
    return EXIT_READER_GONE


def _fail(message: str, status: int) -> int:
    with suppress(OSError):  # nobody may be there to read it
        print(f"kvlayouts: error: {' '.join(message.split())}", file=sys.stderr)
    drop_unread_output()
    return status


def _version() -> str:
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "(not installed)"


class _CommandInItsOwnWords(click.Group):
    """Says what failed with the flags of the command, also where a rank failed with words of a server."""

    def invoke(self, ctx: click.Context) -> object:
        """Run the command that `ctx` names."""
        try:
            return super().invoke(ctx)
        except (RankError, ReplayError) as error:
            name = ctx.invoked_subcommand
            command = None if name is None else self.get_command(ctx, name)
            if command is not None:
                error.args = (own_words(str(error), options_of(command)), *error.args[1:])
            raise


@click.group(
    cls=_CommandInItsOwnWords,
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(version=_version(), prog_name="kvlayouts")
def cli() -> None:
    """KV layout strategies for SGLang's hierarchical KV cache."""


@cli.command(context_settings={"show_default": True})
@click.argument("trace", type=click.Path(path_type=Path), required=False)
@click.option("--layout", "layouts", multiple=True, default=DEFAULT_LAYOUTS, help="Layout strategy; repeat for more.")
@click.option("--layout-config", metavar="JSON|@FILE", help="Settings of the strategy, where one --layout is given.")
@click.option("--cp-size", type=click.IntRange(1, options.MAX_CP_SIZE), default=4, help="Ranks, one process each.")
@click.option("--pool", type=click.Choice(get_args(options.PoolKind)), default="mla", help="KV pool of the model.")
@click.option(
    "--page-size", type=click.IntRange(1, options.MAX_PAGE_SIZE_TOKENS), default=64, help="Tokens a page; 64 for dsa."
)
@click.option(
    "--device-tokens",
    type=click.IntRange(min=1),
    show_default="longest prompt and an eighth",
    help="Device pool of one rank, in tokens; a multiple of the page size that holds the longest prompt.",
)
@click.option("--host-ratio", type=float, default=2.0, help="Host pool of one rank, relative to its device pool.")
@click.option(
    "--policy",
    type=click.Choice(get_args(options.WritePolicy)),
    default="write_through",
    help="When pages are copied to host.",
)
@click.option(
    "--eviction-policy", type=click.Choice(get_args(options.EvictionPolicy)), default="lru", help="Order of eviction."
)
@click.option(
    "--host-mem-layout",
    "host_layout",
    type=click.Choice(get_args(options.HostLayout)),
    default="layer_first",
    help="Byte order in host memory, as SGLang's --hicache-mem-layout.",
)
@click.option("--requests", type=click.IntRange(min=1), show_default="all", help="Replay only the first N requests.")
@click.option(
    "--block-tokens",
    type=click.IntRange(1, options.TRACE_BLOCK_TOKENS),
    default=options.TRACE_BLOCK_TOKENS,
    help="Scale the trace's 512-token blocks down to N tokens; need not match the page size.",
)
@click.option(
    "--verify", type=click.Choice(get_args(options.VerifyMode)), default="all", help="Which cached tokens to check."
)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the results to this file.")
@click.option("--plot", "plot_path", type=click.Path(path_type=Path), help="Write a PNG of hit share over the trace.")
@click.option("--report", "report_path", type=click.Path(path_type=Path), help="Write the results as one HTML page.")
@click.option("--seed", type=click.IntRange(0, options.MAX_SEED), default=0, help="Seed of the KV bytes and samples.")
@click.option("--traceback", "show_traceback", is_flag=True, help="If a rank fails, show where in its code.")
def replay(
    trace: Path | None,
    layouts: tuple[str, ...],
    layout_config: str | None,
    cp_size: int,
    pool: options.PoolKind,
    page_size: int,
    device_tokens: int | None,
    host_ratio: float,
    policy: options.WritePolicy,
    eviction_policy: options.EvictionPolicy,
    host_layout: options.HostLayout,
    requests: int | None,
    block_tokens: int,
    verify: options.VerifyMode,
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
    outputs = {"--json": json_path, "--plot": plot_path, "--report": report_path}
    check_outputs(trace_path, outputs)
    options.check_layout_names(layouts)
    options.check_pool_page_size(pool, page_size)
    options.check_host_ratio(host_ratio)
    requests_trace = read_trace(trace_path, block_tokens=block_tokens, max_requests=requests)
    config = ReplayConfig(
        layouts=layouts,
        layout_options=_layout_options(layouts, layout_config),
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
    check_layouts(config, requests_trace)
    check_memory(config)
    results = _run(config, requests_trace, show_traceback)
    _show(config, requests_trace, results, outputs)
    return EXIT_OK if all(result.passed for result in results.values()) else EXIT_FAILED


@cli.command()
def check() -> int:
    """Check that this installation and SGLang fit together; exit status 1 if something does not."""
    from sglang.srt.mem_cache.hicache.check.installation import check_installation

    passed = True
    for line in check_installation():
        click.echo(str(line))
        passed = passed and line.passed
    return EXIT_OK if passed else EXIT_FAILED


cli.add_command(explain)
cli.add_command(plan)
cli.add_command(soak)
cli.add_command(bench)


def _layout_options(layouts: tuple[str, ...], layout_config: str | None) -> Mapping[str, object]:
    if layout_config is None:
        return {}
    from kvlayouts.explain.strategies import read_options_of_one

    return read_options_of_one(layouts, layout_config)


def check_layouts(config: ReplayConfig, trace: Trace) -> None:
    """Raise `ReplayInputError` for a layout that is unknown, refuses its settings, or has no room for some prompt."""
    from kvlayouts.explain.strategies import check_known, create_group

    for name in config.layouts:
        check_known(name)
        layout = create_group(name, page_size=config.page_size, ranks=config.cp_size, options=config.layout_options)[0]
        check_device_tokens(trace, config.page_size, config.device_tokens, name, layout.logical_tokens)


def check_memory(config: ReplayConfig) -> None:
    """Raise `ReplayInputError` if the machine has no room for the pools of all ranks, which no layout changes."""
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


def check_outputs(trace_path: Path, outputs: Mapping[str, Path | None]) -> None:
    """Raise `ReplayInputError` for an output that could not be written, or would overwrite the trace or its twin."""
    taken = {trace_path.resolve(): "TRACE"}
    for flag, path in outputs.items():
        options.check_output_file(flag, path)
        if path is None:
            continue
        if path.resolve() in taken:
            raise ReplayInputError(f"{flag} {path}: is the same file as {taken[path.resolve()]}")
        taken[path.resolve()] = flag
        suffix = OUTPUT_SUFFIXES.get(flag, "")
        if not path.name.lower().endswith(suffix):
            raise ReplayInputError(f"{flag} {path}: must end with {suffix}")


def _run(config: ReplayConfig, trace: Trace, show_traceback: bool) -> dict[str, LayoutResult]:
    from kvlayouts.replay.driver import run_replay
    from kvlayouts.replay.progress import show_progress

    try:
        with show_progress(Console(stderr=True, force_terminal=sys.stderr.isatty())) as on_progress:
            return run_replay(config, trace, on_progress)
    except ReplayError as error:
        if show_traceback and error.__cause__ is not None:
            print(error.__cause__, file=sys.stderr)
        raise


def _show(
    config: ReplayConfig,
    trace: Trace,
    results: Mapping[str, LayoutResult],
    outputs: Mapping[str, Path | None],
) -> None:
    """Print the table, then write the files, also where nobody reads the table."""
    from kvlayouts.replay.report import print_report

    try:
        print_report(Console(force_terminal=sys.stdout.isatty()), config, trace, results)
    finally:
        _write(config, trace, results, outputs)


def _write(
    config: ReplayConfig,
    trace: Trace,
    results: Mapping[str, LayoutResult],
    outputs: Mapping[str, Path | None],
) -> None:
    """Raises `ReplayError` where a file could not be written after all."""
    from kvlayouts.replay.results import to_json

    try:
        if (json_path := outputs["--json"]) is not None:
            text = json.dumps(to_json(config, trace, results), indent=2, allow_nan=False)
            json_path.write_text(text + "\n", encoding="utf-8")
        if (plot_path := outputs["--plot"]) is not None:
            from kvlayouts.replay.plot import write_plot

            write_plot(plot_path, config, trace, results)
        if (report_path := outputs["--report"]) is not None:
            from kvlayouts.replay.page.render import write_page

            write_page(report_path, config, trace, results)
    except OSError as error:
        raise ReplayError(f"{error.filename or 'output'}: cannot be written: {error.strerror or error}") from error


if __name__ == "__main__":
    sys.exit(main())
