"""`kvlayouts plan`: options in, table, JSON and picture out."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, get_args

import click
from rich.console import Console

from kvlayouts.plan import options as own
from kvlayouts.replay import config as options
from kvlayouts.replay.config import ReplayError, ReplayInputError
from kvlayouts.replay.trace import DEFAULT_TRACE, default_device_tokens, read_trace

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvlayouts.plan.model import ModelGeometry
    from kvlayouts.plan.results import Plan
    from kvlayouts.plan.settings import PlanConfig
    from kvlayouts.replay.trace import Trace

DEFAULT_LAYOUTS: Final = ("identity", "cp_shared")
DEFAULT_GPUS: Final = 8
DEFAULT_SWEEP_POINTS: Final = 9


@click.command(context_settings={"show_default": True})
@click.argument("trace", type=click.Path(path_type=Path), required=False)
@click.option("--layout", "layouts", multiple=True, default=DEFAULT_LAYOUTS, help="Layout strategy; repeat for more.")
@click.option("--layout-config", metavar="JSON|@FILE", help="Settings of the strategy, where one --layout is given.")
@click.option(
    "--model-config", type=click.Path(path_type=Path), help="The model's config.json, or the folder that holds it."
)
@click.option(
    "--kv-bytes-per-token",
    type=click.IntRange(1, own.MAX_BYTES_PER_TOKEN),
    help="Instead of a model: bytes on one GPU.",
)
@click.option(
    "--pool", type=click.Choice(get_args(options.PoolKind)), show_default="mla", help="KV pool, beside such a size."
)
@click.option(
    "--kv-cache-dtype", type=click.Choice(get_args(own.KVCacheDtype)), default="auto", help="As SGLang's flag."
)
@click.option(
    "--gpus", type=click.IntRange(1, own.MAX_GPUS), show_default="8, or --cp-size", help="GPUs of one model copy."
)
@click.option(
    "--cp-size",
    type=click.IntRange(1, own.MAX_GPUS),
    show_default="all GPUs, without context parallelism",
    help="GPUs of a context-parallel group, among which pages are shared out.",
)
@click.option(
    "--page-size", type=click.IntRange(1, options.MAX_PAGE_SIZE_TOKENS), default=64, help="Tokens a page; 64 for DSA."
)
@click.option("--device-gb", type=float, help="KV memory of one GPU, in 10^9 bytes.")
@click.option(
    "--device-tokens",
    type=click.IntRange(min=1),
    show_default="longest prompt and an eighth",
    help="The same in tokens; a multiple of the page size.",
)
@click.option("--host-gb", type=float, help="Host memory of one rank, as SGLang's --hicache-size.")
@click.option("--host-ratio", type=float, show_default="2", help="The same relative to the GPU's KV memory.")
@click.option("--host-memory-gb", type=float, help="Memory of one machine, in 10^9 bytes, to compare with.")
@click.option("--ranks-per-machine", type=click.IntRange(min=1), show_default="--gpus", help="Ranks of one machine.")
@click.option("--policy", type=click.Choice(get_args(options.WritePolicy)), default="write_through")
@click.option("--eviction-policy", type=click.Choice(get_args(options.EvictionPolicy)), default="lru")
@click.option("--requests", type=click.IntRange(min=1), show_default="all", help="Plan for the first N requests only.")
@click.option(
    "--block-tokens",
    type=click.IntRange(1, options.TRACE_BLOCK_TOKENS),
    default=options.TRACE_BLOCK_TOKENS,
    help="Scale the trace's 512-token blocks down to N tokens.",
)
@click.option(
    "--restore-tokens", type=click.IntRange(min=1), show_default="longest prompt", help="Prefix to restore from host."
)
@click.option("--link-gb-per-s", type=float, default=50.0, help="Host-to-device rate of one GPU, in 10^9 bytes.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the plan to this file.")
@click.option("--plot", "plot_path", type=click.Path(path_type=Path), help="Write a PNG of hit share by host memory.")
@click.option(
    "--sweep-points",
    type=click.IntRange(2, own.MAX_SWEEP_POINTS),
    show_default="9 with --plot, else none",
    help="Sizes of host memory to simulate.",
)
def plan(
    trace: Path | None,
    layouts: tuple[str, ...],
    layout_config: str | None,
    model_config: Path | None,
    kv_bytes_per_token: int | None,
    pool: options.PoolKind | None,
    kv_cache_dtype: own.KVCacheDtype,
    gpus: int | None,
    cp_size: int | None,
    page_size: int,
    device_gb: float | None,
    device_tokens: int | None,
    host_gb: float | None,
    host_ratio: float | None,
    host_memory_gb: float | None,
    ranks_per_machine: int | None,
    policy: options.WritePolicy,
    eviction_policy: options.EvictionPolicy,
    requests: int | None,
    block_tokens: int,
    restore_tokens: int | None,
    link_gb_per_s: float,
    json_path: Path | None,
    plot_path: Path | None,
    sweep_points: int | None,
) -> int:
    """How much memory to give the cache: capacity, hit share, host memory and restore time of each layout.

    TRACE is a file in Mooncake's JSONL format; without it, the first 1,000 requests of Mooncake's conversation trace
    are used. The cache is simulated on page counts, request by request, with the hits of `kvlayouts replay`. Give the
    model with --model-config or --kv-bytes-per-token.
    """
    from kvlayouts.main import check_outputs
    from kvlayouts.plan import settings

    trace_path = trace or DEFAULT_TRACE
    check_outputs(trace_path, {"--json": json_path, "--plot": plot_path})
    _refuse_both("--device-gb", device_gb, "--device-tokens", device_tokens)
    _refuse_both("--host-gb", host_gb, "--host-ratio", host_ratio)
    for flag, gb in (("--device-gb", device_gb), ("--host-gb", host_gb), ("--host-memory-gb", host_memory_gb)):
        settings.check_gb(flag, gb)
    settings.check_gb("--link-gb-per-s", link_gb_per_s)
    gpus = gpus or cp_size or DEFAULT_GPUS
    settings.check_divides("--cp-size", cp_size or gpus, "--gpus", gpus)
    geometry = _geometry(model_config, kv_bytes_per_token, pool, kv_cache_dtype, layouts[0], gpus // (cp_size or 1))
    if geometry.kind.value == "dsa":
        options.check_dsa_page_size(page_size, "--pool dsa" if model_config is None else "a DSA model")
    requests_trace = read_trace(trace_path, block_tokens=block_tokens, max_requests=requests)
    if device_gb is not None:
        pages = settings.pages_of_gb("--device-gb", device_gb, geometry.bytes_per_token, page_size)
        device_tokens = pages * page_size
        if device_tokens > options.MAX_DEVICE_TOKENS:
            raise ReplayInputError(
                f"--device-gb {device_gb:g}: is {device_tokens:,} tokens; must be at most {options.MAX_DEVICE_TOKENS:,}"
            )
    elif device_tokens is None:
        device_tokens = default_device_tokens(requests_trace, page_size)
    longest = requests_trace.longest_prompt_tokens
    config = settings.PlanConfig(
        layouts=layouts,
        options=_layout_options(layouts, layout_config),
        model=geometry,
        gpus=gpus,
        cp_size=cp_size or gpus,
        group_kind=settings.group_kind(gpus, cp_size),
        page_size=page_size,
        device_tokens=device_tokens,
        host_pages=_host_pages(host_gb, host_ratio, device_tokens, page_size, geometry),
        ranks_per_machine=ranks_per_machine or gpus,
        machine_bytes=None if host_memory_gb is None else int(host_memory_gb * settings.GB),
        policy=policy,
        eviction_policy=eviction_policy,
        restore_tokens=max(page_size, longest // page_size * page_size) if restore_tokens is None else restore_tokens,
        link_bytes_per_second=link_gb_per_s * settings.GB,
    )
    points = sweep_points or (DEFAULT_SWEEP_POINTS if plot_path is not None else 0)
    result = _run(config, requests_trace, points, device_gb)
    _show(config, requests_trace, result, json_path, plot_path)
    return 0


def _refuse_both(flag: str, value: float | None, other_flag: str, other: float | None) -> None:
    if value is not None and other is not None:
        raise ReplayInputError(f"{flag} {value:g}: must not be given together with {other_flag} {other:g}")


def _geometry(
    path: Path | None,
    bytes_per_token: int | None,
    pool: options.PoolKind | None,
    dtype: own.KVCacheDtype,
    layout: str,
    attention_tp_size: int,
) -> ModelGeometry:
    from kvlayouts.plan.model import given_size, read_model
    from sglang.srt.mem_cache.layouts.config import PoolKind

    if path is not None:
        if bytes_per_token is not None or pool is not None:
            flag = f"--kv-bytes-per-token {bytes_per_token}" if bytes_per_token is not None else f"--pool {pool}"
            raise ReplayInputError(f"{flag}: must not be given together with --model-config {path}")
        return read_model(path, layout=layout, dtype=dtype, attention_tp_size=attention_tp_size)
    if bytes_per_token is None:
        raise ReplayInputError(
            "--model-config: is missing; give a model's config.json, or --kv-bytes-per-token with the bytes that a "
            "token takes on one GPU"
        )
    if dtype != "auto":
        raise ReplayInputError(
            f"--kv-cache-dtype {dtype}: must not be given together with --kv-bytes-per-token {bytes_per_token}"
        )
    return given_size(PoolKind(pool or "mla"), bytes_per_token)


def _layout_options(layouts: tuple[str, ...], layout_config: str | None) -> Mapping[str, object]:
    from kvlayouts.explain.strategies import check_known, read_options_of_one

    for name in layouts:
        check_known(name)
    return {} if layout_config is None else read_options_of_one(layouts, layout_config)


def _host_pages(
    host_gb: float | None, host_ratio: float | None, device_tokens: int, page_size: int, geometry: ModelGeometry
) -> int:
    """Host pages of one rank, as SGLang sizes its pools: rounded down to whole pages, and one more."""
    from kvlayouts.plan import settings

    if host_gb is not None:
        return settings.pages_of_gb("--host-gb", host_gb, geometry.row_bytes_per_token, page_size) + 1
    ratio = 2.0 if host_ratio is None else host_ratio
    options.check_host_ratio(ratio)
    pages = int(device_tokens * ratio) // page_size
    if pages < 1:
        raise ReplayInputError(
            f"--host-ratio {ratio:g}: leaves no host page beside {device_tokens} device tokens; "
            f"must be at least {page_size / device_tokens:.3g}"
        )
    return pages + 1


def _run(config: PlanConfig, trace: Trace, sweep_points: int, device_gb: float | None) -> Plan:
    from kvlayouts.plan.planner import make_plan
    from kvlayouts.replay.progress import show_progress

    try:
        with show_progress(Console(stderr=True, force_terminal=sys.stderr.isatty())) as on_progress:
            result = make_plan(config, trace, sweep_points=sweep_points, on_progress=on_progress)
    except ReplayInputError as error:
        if device_gb is None:
            raise
        in_tokens, in_gb = f"--device-tokens {config.device_tokens}", f"--device-gb {device_gb:g}"
        raise ReplayInputError(
            str(error).replace(in_tokens, f"{in_gb}, which is {config.device_tokens} tokens")
        ) from error
    if not result.layouts:
        raise ReplayInputError(next(iter(result.refused.values())))
    return result


def _show(config: PlanConfig, trace: Trace, result: Plan, json_path: Path | None, plot_path: Path | None) -> None:
    """Print the table, then write the files, also where nobody reads the table."""
    from kvlayouts.plan.report import print_plan

    try:
        print_plan(Console(force_terminal=sys.stdout.isatty()), config, trace, result)
    finally:
        _write(config, trace, result, json_path, plot_path)


def _write(config: PlanConfig, trace: Trace, result: Plan, json_path: Path | None, plot_path: Path | None) -> None:
    """Raises `ReplayError` where a file could not be written after all."""
    from kvlayouts.plan.results import to_json

    try:
        if json_path is not None:
            text = json.dumps(to_json(config, trace, result), indent=2, allow_nan=False)
            json_path.write_text(text + "\n", encoding="utf-8")
        if plot_path is not None:
            from kvlayouts.plan.plot import write_plot

            write_plot(plot_path, config, trace, result)
    except OSError as error:
        raise ReplayError(f"{error.filename or 'output'}: cannot be written: {error.strerror or error}") from error
