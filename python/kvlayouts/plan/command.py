"""`kvlayouts plan`: options in, table, JSON and picture out."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

import click

from kvlayouts.common import options
from kvlayouts.common.errors import InputError
from kvlayouts.common.outputs import Output, check_outputs, deliver, json_output
from kvlayouts.common.strategies import load_layouts, read_options
from kvlayouts.common.trace import DEFAULT_TRACE, default_device_tokens, read_trace
from kvlayouts.common.values import MAX_DEVICE_TOKENS, PoolName, check_dsa_page_size, pages_of_host_ratio
from kvlayouts.plan import options as own
from kvlayouts.plan.options import PlanOptions

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from kvlayouts.common.trace import Trace
    from kvlayouts.plan.model import ModelGeometry
    from kvlayouts.plan.results import Plan
    from kvlayouts.plan.settings import PlanConfig


@click.command(context_settings={"show_default": True})
@options.trace_argument
@options.layouts_option("identity", "cp_shared")
@options.layout_config_option("Settings of the strategy, where one --layout is given.")
@click.option("--model-config", type=options.FILE, help="The model's config.json, or the folder that holds it.")
@click.option(
    "--kv-bytes-per-token",
    type=click.IntRange(1, own.MAX_BYTES_PER_TOKEN),
    help="Instead of a model: bytes on one GPU.",
)
@click.option("--pool", type=click.Choice(get_args(PoolName)), show_default="mla", help="KV pool, beside such a size.")
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
@click.option("--page-size", type=options.PAGE_TOKENS, default=64, help="Tokens a page; 64 for DSA.")
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
@options.policy_option
@options.eviction_policy_option
@options.requests_option("Plan for the first N requests only.")
@options.block_tokens_option
@click.option(
    "--restore-tokens", type=click.IntRange(min=1), show_default="longest prompt", help="Prefix to restore from host."
)
@click.option("--link-gb-per-s", type=float, default=50.0, help="Host-to-device rate of one GPU, in 10^9 bytes.")
@options.file_option("--json", "Write the plan to this file.")
@options.file_option("--plot", "Write a PNG of hit share by host memory.")
@click.option(
    "--sweep-points",
    type=click.IntRange(2, own.MAX_SWEEP_POINTS),
    show_default="9 with --plot, else none",
    help="Sizes of host memory to simulate.",
)
@options.gathered(PlanOptions)
def plan(given: PlanOptions) -> int:
    """How much memory to give the cache: capacity, hit share, host memory and restore time of each layout.

    TRACE is a file in Mooncake's JSONL format; without it, the first 1,000 requests of Mooncake's conversation trace
    are used. The cache is simulated on page counts, request by request, with the hits of `kvlayouts replay`. Give the
    model with --model-config or --kv-bytes-per-token.
    """
    check_outputs({"--json": given.json_path, "--plot": given.plot_path}, given.trace or DEFAULT_TRACE)
    _refuse_both("--device-gb", given.device_gb, "--device-tokens", given.device_tokens)
    _refuse_both("--host-gb", given.host_gb, "--host-ratio", given.host_ratio)
    layout_options = read_options(given.layouts, given.layout_config)
    config, trace = _config(given, layout_options)
    result = _run(config, trace, given.points, given.device_gb)
    _deliver(config, trace, result, given.json_path, given.plot_path)
    return 0


def _config(given: PlanOptions, layout_options: Mapping[str, object]) -> tuple[PlanConfig, Trace]:
    """What is planned, and for which requests."""
    from kvlayouts.plan import settings

    gpus, cp_size, page_size = given.all_gpus, given.cp_size, given.page_size
    for flag in ("--device-gb", "--host-gb", "--host-memory-gb", "--link-gb-per-s"):
        settings.check_gb(flag, getattr(given, flag.removeprefix("--").replace("-", "_")))
    settings.check_divides("--cp-size", cp_size or gpus, "--gpus", gpus)
    geometry = _geometry(
        given.model_config,
        given.kv_bytes_per_token,
        given.pool,
        given.kv_cache_dtype,
        given.layouts[0],
        gpus // (cp_size or 1),
    )
    if geometry.kind.value == "dsa":
        check_dsa_page_size(page_size, "--pool dsa" if given.model_config is None else "a DSA model")
    trace = read_trace(given.trace or DEFAULT_TRACE, block_tokens=given.block_tokens, max_requests=given.requests)
    device_tokens = _device_tokens(given, trace, geometry)
    longest = trace.longest_prompt_tokens // page_size * page_size
    config = settings.PlanConfig(
        layouts=given.layouts,
        options=layout_options,
        model=geometry,
        gpus=gpus,
        cp_size=cp_size or gpus,
        group_kind=settings.group_kind(gpus, cp_size),
        page_size=page_size,
        device_tokens=device_tokens,
        host_pages=_host_pages(given.host_gb, given.host_ratio, device_tokens, page_size, geometry),
        ranks_per_machine=given.ranks_per_machine or gpus,
        machine_bytes=None if given.host_memory_gb is None else int(given.host_memory_gb * settings.GB),
        policy=given.policy,
        eviction_policy=given.eviction_policy,
        restore_tokens=given.restore_tokens or max(page_size, longest),
        link_bytes_per_second=given.link_gb_per_s * settings.GB,
    )
    return config, trace


def _device_tokens(given: PlanOptions, trace: Trace, geometry: ModelGeometry) -> int:
    """Tokens of one GPU's pool: as given, in gigabytes or in tokens, or enough for the longest prompt."""
    from kvlayouts.plan import settings

    if given.device_tokens is not None:
        return given.device_tokens
    if given.device_gb is None:
        return default_device_tokens(trace, given.page_size)
    pages = settings.pages_of_gb("--device-gb", given.device_gb, geometry.bytes_per_token, given.page_size)
    device_tokens = pages * given.page_size
    if device_tokens > MAX_DEVICE_TOKENS:
        raise InputError(
            f"--device-gb {given.device_gb:g}: is {device_tokens:,} tokens; must be at most {MAX_DEVICE_TOKENS:,}"
        )
    return device_tokens


def _refuse_both(flag: str, value: float | None, other_flag: str, other: float | None) -> None:
    if value is not None and other is not None:
        raise InputError(f"{flag} {value:g}: must not be given together with {other_flag} {other:g}")


def _geometry(
    path: Path | None,
    bytes_per_token: int | None,
    pool: PoolName | None,
    dtype: own.KVCacheDtype,
    layout: str,
    attention_tp_size: int,
) -> ModelGeometry:
    from kvlayouts.plan.model import given_size, read_model
    from sglang.srt.mem_cache.layouts.config import PoolKind

    if path is not None:
        if bytes_per_token is not None or pool is not None:
            flag = f"--kv-bytes-per-token {bytes_per_token}" if bytes_per_token is not None else f"--pool {pool}"
            raise InputError(f"{flag}: must not be given together with --model-config {path}")
        return read_model(path, layout=layout, dtype=dtype, attention_tp_size=attention_tp_size)
    if bytes_per_token is None:
        raise InputError(
            "--model-config: is missing; give a model's config.json, or --kv-bytes-per-token with the bytes that a "
            "token takes on one GPU"
        )
    if dtype != "auto":
        raise InputError(
            f"--kv-cache-dtype {dtype}: must not be given together with --kv-bytes-per-token {bytes_per_token}"
        )
    return given_size(PoolKind(pool or "mla"), bytes_per_token)


def _host_pages(
    host_gb: float | None, host_ratio: float | None, device_tokens: int, page_size: int, geometry: ModelGeometry
) -> int:
    """Host pages of one rank, as SGLang sizes its pools: rounded down to whole pages, and one more."""
    from kvlayouts.plan import settings

    if host_gb is not None:
        return settings.pages_of_gb("--host-gb", host_gb, geometry.row_bytes_per_token, page_size) + 1
    return pages_of_host_ratio(2.0 if host_ratio is None else host_ratio, device_tokens, page_size) + 1


def _run(config: PlanConfig, trace: Trace, sweep_points: int, device_gb: float | None) -> Plan:
    load_layouts()
    from kvlayouts.common.progress import progress_on_stderr
    from kvlayouts.plan.planner import make_plan

    try:
        with progress_on_stderr() as on_progress:
            result = make_plan(config, trace, sweep_points=sweep_points, on_progress=on_progress)
    except InputError as error:
        if device_gb is None:
            raise
        in_tokens, in_gb = f"--device-tokens {config.device_tokens}", f"--device-gb {device_gb:g}"
        raise InputError(str(error).replace(in_tokens, f"{in_gb}, which is {config.device_tokens} tokens")) from error
    if not result.layouts:
        raise InputError(next(iter(result.refused.values())))
    return result


def _deliver(config: PlanConfig, trace: Trace, result: Plan, json_path: Path | None, plot_path: Path | None) -> None:
    from kvlayouts.plan.report import print_plan
    from kvlayouts.plan.results import to_json

    def plot(path: Path) -> None:
        from kvlayouts.plan.plot import write_plot

        write_plot(path, config, trace, result)

    deliver(
        lambda console: print_plan(console, config, trace, result),
        json_output(json_path, lambda: to_json(config, trace, result)),
        Output(flag="--plot", path=plot_path, write=plot),
    )
