"""Makes a plan: asks each strategy for its sizes, simulates the trace, and sweeps the host memory."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import numpy as np

from kvlayouts.common.errors import InputError
from kvlayouts.common.own_flags import in_own_words
from kvlayouts.common.strategies import create_group, create_rank
from kvlayouts.common.trace import check_device_tokens
from kvlayouts.common.values import ceil_div
from kvlayouts.plan.prompts import read_prompts
from kvlayouts.plan.refusal import refuse_as_a_server
from kvlayouts.plan.results import LayoutPlan, Plan, SweepPoint
from kvlayouts.plan.settings import POOL_CLASSES
from kvlayouts.plan.simulation import CacheSimulation
from sglang.srt.mem_cache.hicache.server.refusals import scopes_of
from sglang.srt.mem_cache.layouts.capabilities import has_host_lanes
from sglang.srt.mem_cache.layouts.config import LayoutEnvironment
from sglang.srt.mem_cache.layouts.errors import LayoutConfigError
from sglang.srt.mem_cache.layouts.facts import host_lanes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvlayouts.common.progress import OnProgress
    from kvlayouts.common.trace import Trace
    from kvlayouts.plan.prompts import Prompts
    from kvlayouts.plan.settings import PlanConfig
    from kvlayouts.plan.simulation import SimulatedHits
    from sglang.srt.mem_cache.layouts.protocol import AnyKVLayoutStrategy

TELL_EVERY: Final = 512
TOO_CLOSE: Final = 0.12
MAX_PAGES: Final = 2**26
"""Slot pages of all ranks together: each takes bytes in a plan."""
CHOSEN_ABOVE: Final = 16
"""How many times the chosen host memory a sweep goes to at least, unless less holds the whole trace."""


def make_plan(config: PlanConfig, trace: Trace, *, sweep_points: int, on_progress: OnProgress) -> Plan:
    """Plan every layout that does not refuse the model; with `sweep_points`, for so many sizes of host memory too.

    Raises `InputError` for a layout that is unknown, refuses its geometry, or has no room for some prompt.
    """
    started = time.perf_counter()
    strategies, refused = _strategies(config, trace)
    prompts = read_prompts(trace, config.page_size)
    distinct_pages = prompts.distinct_pages
    sizes = _sweep_sizes(config, list(strategies.values()), distinct_pages, sweep_points) if strategies else ()
    layouts = {name: _plan_layout(config, layout, prompts, sizes, on_progress) for name, layout in strategies.items()}
    return Plan(layouts=layouts, refused=refused, distinct_pages=distinct_pages, seconds=time.perf_counter() - started)


def _strategies(config: PlanConfig, trace: Trace) -> tuple[dict[str, AnyKVLayoutStrategy], Mapping[str, str]]:
    """The strategies that accept the model, and the words of those that do not."""
    accepted: dict[str, AnyKVLayoutStrategy] = {}
    refused: dict[str, str] = {}
    for name in config.layouts:
        layout = create_group(name, page_size=config.page_size, shard_size=config.cp_size, options=config.options)[0]
        try:
            _refuse_as_a_server(config, layout)
            layout.validate(_environment(config, layout))
        except LayoutConfigError as error:
            refused[name] = in_own_words(error)
            continue
        check_device_tokens(trace, config.page_size, config.device_tokens, name, layout.logical_tokens)
        _refuse_too_many_pages(config, layout)
        accepted[name] = layout
    return accepted, refused


def _refuse_too_many_pages(config: PlanConfig, layout: AnyKVLayoutStrategy) -> None:
    """Raise `InputError` for more pages than a plan can count."""
    pages = layout.logical_tokens(config.device_tokens) // config.page_size
    if pages > MAX_PAGES:
        most = config.device_pages * MAX_PAGES // pages * config.page_size
        raise InputError(
            f"--device-tokens {config.device_tokens}: are {pages:,} pages of --page-size {config.page_size} on "
            f"--gpus {config.gpus} with layout {layout.name}; must be at most {most} there"
        )


def _refuse_as_a_server(config: PlanConfig, layout: AnyKVLayoutStrategy) -> None:
    """Raise `LayoutConfigError` for what the table of a server refuses."""
    refuse_as_a_server(
        config.model.facts,
        layout.name,
        scopes_of(layout),
        ranks=config.cp_size,
        page_size=config.page_size,
        tp_size=config.gpus,
    )


def _environment(config: PlanConfig, layout: AnyKVLayoutStrategy) -> LayoutEnvironment:
    return LayoutEnvironment(
        pool_kind=config.model.kind,
        pool_class=POOL_CLASSES[config.model.kind],
        page_size=config.page_size,
        allocator_lanes=layout.lane_count,
        group_kind=config.group_kind,
        shard_size=config.cp_size,
        shard_rank=0,
    )


def _plan_layout(
    config: PlanConfig,
    layout: AnyKVLayoutStrategy,
    prompts: Prompts,
    sizes: Sequence[int],
    on_progress: OnProgress,
) -> LayoutPlan:
    in_pages = _in_pages(config, layout.name)
    bases = [layout.chain_base(content, "") for content in prompts.first_pages]
    by_size: dict[int, SimulatedHits] = {}
    total = len(prompts) * max(1, len(sizes))

    def tell(done: int) -> None:
        if done % TELL_EVERY == 0 or done == len(prompts):
            on_progress(layout.name, len(by_size) * len(prompts) + done, total)

    for host_pages in sizes or (config.host_pages,):
        by_size[host_pages] = CacheSimulation(
            prompts,
            in_pages,
            bases,
            device_pages=config.device_pages,
            host_pages=host_pages,
            policy=config.policy,
            eviction_policy=config.eviction_policy,
        ).run(tell)
    hits = by_size[config.host_pages]
    restored_pages = _fullest_lane(layout, config.restore_tokens // config.page_size)
    fits = layout.logical_tokens(config.device_tokens) >= config.restore_tokens
    restore_bytes = restored_pages * config.page_bytes
    return LayoutPlan(
        lanes=layout.lane_count,
        device_capacity_tokens=layout.logical_tokens(config.device_tokens),
        host_capacity_tokens=config.host_pages * config.page_size * host_lanes(layout).count,
        hits=hits,
        restore_bytes=restore_bytes,
        restore_seconds=restore_bytes / config.link_bytes_per_second if fits else None,
        backed_up_bytes_per_rank=max(hits.backed_up_lane_pages) * config.page_bytes,
        loaded_bytes_per_rank=max(hits.loaded_lane_pages) * config.page_bytes,
        sweep=tuple(
            SweepPoint(
                host_pages=pages,
                machine_host_bytes=pages * config.page_bytes * config.ranks_per_machine,
                hits=by_size[pages],
            )
            for pages in sizes
        ),
    )


def _in_pages(config: PlanConfig, name: str) -> AnyKVLayoutStrategy:
    """The strategy with pages of one token: the simulation counts in pages, and asks nothing that depends on a size."""
    try:
        return create_rank(name, page_size=1, shard_size=config.cp_size, rank=0, options=config.options)
    except InputError as error:
        raise InputError(f"{error}; plan counts in pages and needs a strategy that takes --page-size 1") from error


def _fullest_lane(layout: AnyKVLayoutStrategy, pages: int) -> int:
    """Pages of a chain of `pages` that the rank with most of them has on its host."""
    if has_host_lanes(layout):
        return ceil_div(pages, layout.host_lane_count)
    return int(np.bincount(layout.extend_lanes(0, 0, pages), minlength=layout.lane_count).max())


def _sweep_sizes(
    config: PlanConfig, layouts: Sequence[AnyKVLayoutStrategy], distinct_pages: int, points: int
) -> tuple[int, ...]:
    """Host pages of one rank, ascending: `points` of them in equal ratios, and the chosen size in place of one near it.

    From half the device pool, or the chosen size if that is less, up to where the layout with the largest capacity
    holds every page of the trace, or `CHOSEN_ABOVE` times the chosen size, but not beyond what holds the trace in the
    layout with the smallest.
    """
    if not points:
        return ()
    lanes = [host_lanes(layout).count for layout in layouts]
    all_in_largest, all_in_smallest = (ceil_div(distinct_pages, count) for count in (max(lanes), min(lanes)))
    low = max(1, min(config.device_pages // 2, config.host_pages))
    high = max(min(all_in_smallest, max(all_in_largest, CHOSEN_ABOVE * config.host_pages)), 2 * low)
    sizes = [round(size) for size in np.geomspace(low, high, points)]
    inner = [size for size in sizes[1:-1] if abs(size / config.host_pages - 1) > TOO_CLOSE]
    return tuple(sorted({sizes[0], *inner, config.host_pages, sizes[-1]}))
