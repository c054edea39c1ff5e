"""`kvlayouts soak`: options in, figures out."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import click
from rich.console import Console

from kvlayouts.ranks.messages import RankError
from kvlayouts.replay import config as options
from kvlayouts.soak.config import FAULTS, SoakConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvlayouts.soak.config import SoakResult

EXIT_VIOLATION = 1


@click.command(context_settings={"show_default": True})
@click.option("--ranks", type=click.IntRange(1, options.MAX_CP_SIZE), default=4, help="Ranks, one process each.")
@click.option("--minutes", type=float, show_default="5", help="How long to soak.")
@click.option("--events", type=click.IntRange(min=1), help="End after N events instead.")
@click.option("--layout", default="cp_shared", help="Layout strategy.")
@click.option("--layout-config", metavar="JSON|@FILE", help="Settings of the strategy.")
@click.option("--pool", type=click.Choice(get_args(options.PoolKind)), default="mla", help="KV pool of the model.")
@click.option(
    "--page-size",
    type=click.IntRange(1, options.MAX_PAGE_SIZE_TOKENS),
    show_default="4; 64 for dsa",
    help="Tokens a page.",
)
@click.option("--policy", type=click.Choice(get_args(options.WritePolicy)), default="write_through")
@click.option("--eviction-policy", type=click.Choice(get_args(options.EvictionPolicy)), default="lru")
@click.option(
    "--host-mem-layout", "host_layout", type=click.Choice(get_args(options.HostLayout)), default="layer_first"
)
@click.option(
    "--faults", default=",".join(FAULTS), help="Faults to inject, comma-separated, or none.", metavar="KIND,..."
)
@click.option("--check-every", type=click.IntRange(min=1), default=2000, help="Events between two full checks.")
@click.option("--seed", type=click.IntRange(0, options.MAX_SEED), default=0, help="Seed of events, delays and bytes.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the figures to this file.")
def soak(
    ranks: int,
    minutes: float | None,
    events: int | None,
    layout: str,
    layout_config: str | None,
    pool: options.PoolKind,
    page_size: int | None,
    policy: options.WritePolicy,
    eviction_policy: options.EvictionPolicy,
    host_layout: options.HostLayout,
    faults: str,
    check_every: int,
    seed: int,
    json_path: Path | None,
) -> int:
    """Drive real ranks through random events and injected faults, and check everything all the while.

    Exit status 1 after a violation, with the command that repeats it.
    """
    if minutes is not None and events is not None:
        raise options.ReplayInputError(f"--minutes {minutes:g}: must not be given together with --events {events}")
    options.check_output_file("--json", json_path)
    config = SoakConfig(
        ranks=ranks,
        minutes=5.0 if minutes is None else minutes,
        events=events,
        layout=layout,
        layout_options=_layout_options(layout, layout_config),
        pool=pool,
        page_size=page_size or (options.DSA_PAGE_SIZE_TOKENS if pool == "dsa" else 4),
        policy=policy,
        eviction_policy=eviction_policy,
        host_layout=host_layout,
        faults=() if faults == "none" else tuple(faults.split(",")),
        check_every=check_every,
        seed=seed,
    )
    _check_layout(config)
    return _run(config, json_path)


def _layout_options(layout: str, layout_config: str | None) -> Mapping[str, object]:
    if layout_config is None:
        return {}
    from kvlayouts.explain.strategies import read_options_of_one

    return read_options_of_one([layout], layout_config)


def _check_layout(config: SoakConfig) -> None:
    from kvlayouts.explain.strategies import check_known, create_group
    from kvlayouts.ranks.memory import refuse_more_than_there_is
    from kvlayouts.soak.geometries import GEOMETRIES
    from sglang.srt.mem_cache.layouts.config import PoolKind

    check_known(config.layout)
    lanes = create_group(config.layout, page_size=config.page_size, ranks=config.ranks, options=config.layout_options)[
        0
    ].lane_count
    refuse_more_than_there_is(
        f"--ranks {config.ranks} with --layout {config.layout} and --page-size {config.page_size}",
        GEOMETRIES[PoolKind(config.pool)],
        ranks=config.ranks,
        device_pages=config.device_pages(lanes),
        host_pages=config.host_pages(lanes),
        page_size=config.page_size,
    )


def _run(config: SoakConfig, json_path: Path | None) -> int:
    from kvlayouts.replay.progress import show_progress
    from kvlayouts.soak.driver import run_soak
    from kvlayouts.soak.report import print_soak

    with show_progress(Console(stderr=True, force_terminal=sys.stderr.isatty()), unit="%") as on_progress:
        result = run_soak(config, on_progress)
    try:
        print_soak(Console(force_terminal=sys.stdout.isatty()), config, result)
    finally:  # also where nobody reads the table
        _write(config, result, json_path)
    return 0 if result.passed else EXIT_VIOLATION


def _write(config: SoakConfig, result: SoakResult, json_path: Path | None) -> None:
    """Raises `RankError` where the file could not be written after all."""
    from kvlayouts.soak.report import soak_json

    if json_path is not None:
        try:
            json_path.write_text(json.dumps(soak_json(config, result), indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise RankError(f"--json {json_path}: cannot be written: {error.strerror or error}") from error
