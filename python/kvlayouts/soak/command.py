"""`kvlayouts soak`: options in, figures out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kvlayouts.common import options
from kvlayouts.common.errors import InputError
from kvlayouts.common.outputs import check_outputs, deliver, json_output
from kvlayouts.common.strategies import create_group, read_options
from kvlayouts.common.values import DSA_PAGE_SIZE, EvictionPolicy, HostLayout, PoolName, WritePolicy
from kvlayouts.soak.config import FAULTS, SoakConfig

if TYPE_CHECKING:
    from pathlib import Path

PAGE_SIZE = 4


@click.command(context_settings={"show_default": True})
@click.option("--ranks", type=options.RANKS, default=4, help="Ranks, one process each.")
@click.option("--minutes", type=float, show_default="5", help="How long to soak.")
@click.option("--events", type=click.IntRange(min=1), help="End after N events instead.")
@options.layout_option
@options.layout_config_option()
@options.pool_option
@click.option("--page-size", type=options.PAGE_TOKENS, show_default="4; 64 for dsa", help="Tokens a page.")
@options.policy_option
@options.eviction_policy_option
@options.host_layout_option
@click.option(
    "--faults", default=",".join(FAULTS), help="Faults to inject, comma-separated, or none.", metavar="KIND,..."
)
@click.option("--check-every", type=click.IntRange(min=1), default=2000, help="Events between two full checks.")
@options.seed_option("Seed of events, delays and bytes.")
@options.file_option("--json", "Write the figures to this file.")
def soak(
    ranks: int,
    minutes: float | None,
    events: int | None,
    layout: str,
    layout_config: str | None,
    pool: PoolName,
    page_size: int | None,
    policy: WritePolicy,
    eviction_policy: EvictionPolicy,
    host_layout: HostLayout,
    faults: str,
    check_every: int,
    seed: int,
    json_path: Path | None,
) -> int:
    """Drive real ranks through random events and injected faults, and check everything all the while.

    Exit status 1 after a violation, with the command that repeats it.
    """
    if minutes is not None and events is not None:
        raise InputError(f"--minutes {minutes:g}: must not be given together with --events {events}")
    check_outputs({"--json": json_path})
    config = SoakConfig(
        ranks=ranks,
        minutes=5.0 if minutes is None else minutes,
        events=events,
        layout=layout,
        layout_options=read_options([layout], layout_config),
        pool=pool,
        page_size=page_size or (DSA_PAGE_SIZE if pool == "dsa" else PAGE_SIZE),
        policy=policy,
        eviction_policy=eviction_policy,
        host_layout=host_layout,
        faults=() if faults == "none" else tuple(faults.split(",")),
        check_every=check_every,
        seed=seed,
    )
    _check_room(config)
    return _run(config, json_path)


def _check_room(config: SoakConfig) -> None:
    """Raise `InputError` for a layout that refuses its settings, or ranks that the machine has no room for."""
    group = create_group(
        config.layout, page_size=config.page_size, shard_size=config.ranks, options=config.layout_options
    )
    lanes = group[0].lane_count
    from kvlayouts.ranks.memory import refuse_more_than_there_is
    from kvlayouts.soak.geometries import GEOMETRIES
    from sglang.srt.mem_cache.layouts.config import PoolKind

    refuse_more_than_there_is(
        f"--ranks {config.ranks} with --layout {config.layout} and --page-size {config.page_size}",
        GEOMETRIES[PoolKind(config.pool)],
        ranks=config.ranks,
        device_pages=config.device_pages(lanes),
        host_pages=config.host_pages(lanes),
        page_size=config.page_size,
    )


def _run(config: SoakConfig, json_path: Path | None) -> int:
    from kvlayouts.common.progress import progress_on_stderr
    from kvlayouts.soak.driver import run_soak
    from kvlayouts.soak.report import print_soak, soak_json

    with progress_on_stderr(unit="%") as on_progress:
        result = run_soak(config, on_progress)
    deliver(
        lambda console: print_soak(console, config, result), json_output(json_path, lambda: soak_json(config, result))
    )
    return 0 if result.passed else 1
