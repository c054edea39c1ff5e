"""The table a plan ends with, and the lines under it: does it fit, what pays, which layout was refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from kvlayouts.plan.results import KNEE_SHARE
from kvlayouts.plan.settings import GB, RESERVED_HOST_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

    from kvlayouts.common.trace import Trace
    from kvlayouts.plan.results import LayoutPlan, Plan
    from kvlayouts.plan.settings import PlanConfig

    Rows = tuple[tuple[str, "Callable[[LayoutPlan], str]"], ...]


def print_plan(console: Console, config: PlanConfig, trace: Trace, plan: Plan) -> None:
    """Print what was asked, the table, and one line for each thing to know. Lines may be longer than the console."""
    console.print(_headline(config, trace), highlight=False, markup=False)
    console.print(build_table(config, plan))
    console.print()
    for text, style in findings(config, plan):
        console.print(Text(text, style=style), soft_wrap=True)


def build_table(config: PlanConfig, plan: Plan) -> Table:
    """One column per layout, one row per number."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in plan.layouts:
        table.add_column(name, justify="right", overflow="fold")
    for rows in (_CAPACITY_ROWS, _HIT_ROWS, _traffic_rows(config)):
        for label, show in rows:
            table.add_row(label, *(show(layout) for layout in plan.layouts.values()))
        table.add_section()
    return table


def findings(config: PlanConfig, plan: Plan) -> Iterator[tuple[str, str]]:
    """Lines and their styles: host memory, each layout against the one of least capacity, knees, refusals."""
    yield _memory(config), "bold red" if config.fits_machine is False else ""
    names = list(plan.layouts)
    base = min(names, key=lambda name: plan.layouts[name].device_capacity_tokens)
    for name in names:
        if name != base:
            yield _comparison(name, base, plan), "bold green"
    for name, layout in plan.layouts.items():
        if layout.sweep:
            yield _pays_until(name, layout, config), ""
    for why in plan.refused.values():
        yield f"refused: {why}", "bold red"


def _headline(config: PlanConfig, trace: Trace) -> str:
    model = config.model
    layers = f", {model.layers} layers" if model.layers is not None else ""
    return (
        f"{trace.name}: {len(trace.requests):,} requests, {trace.prompt_tokens:,} prompt tokens;\n"
        f"{trace.block_tokens} tokens a block; an infinite cache would serve "
        f"{_percent(trace.infinite_cache_hits().token_share)}\n"
        f"{model.name}: {model.kind.value} pool{layers}, {model.bytes_per_token:,} bytes a token on each GPU\n"
        f"{_count(config.gpus, 'GPU')}, pages shared among {config.cp_size} ({config.group_kind.value}), "
        f"pages of {config.page_size} tokens\n"
        f"each GPU: {config.device_tokens:,} tokens, {gb(config.device_bytes)}; "
        f"each rank: {config.host_pages * config.page_size:,} host tokens, {gb(config.host_bytes)}\n"
        f"{config.policy}, {config.eviction_policy} eviction\n"
    )


def _memory(config: PlanConfig) -> str:
    used = f"{_count(config.ranks_per_machine, 'rank')} x {gb(config.host_bytes)} = {gb(config.machine_host_bytes)}"
    budget, most = config.machine_budget_bytes, config.most_host_pages
    if config.machine_bytes is None or budget is None or most is None:
        return f"host memory of a machine: {used}; --host-memory-gb tells whether that fits"
    ratio = most * config.page_size / config.device_tokens
    answer = "fits" if config.fits_machine else "DOES NOT FIT"
    return (
        f"host memory of a machine: {used} of {gb(config.machine_bytes)}, of which SGLang leaves "
        f"{gb(RESERVED_HOST_BYTES)} free: {answer}; {gb(most * config.page_bytes)} a rank "
        f"(--host-ratio {_floor(ratio):g}) would fill it"
    )


def _comparison(name: str, base: str, plan: Plan) -> str:
    layout, least = plan.layouts[name], plan.layouts[base]
    return (
        f"{name}: {layout.device_capacity_tokens / least.device_capacity_tokens:.1f}x the capacity of {base} "
        f"with the same memory, hit share {_percent(layout.hits.hit_share)} vs {_percent(least.hits.hit_share)}"
    )


def _pays_until(name: str, layout: LayoutPlan, config: PlanConfig) -> str:
    last, knee = layout.sweep[-1], layout.knee
    most = f"{_percent(last.hits.hit_share)} at {gb(last.machine_host_bytes)} a machine"
    if knee is None:
        return f"{name}: more host memory pays up to the end of the sweep, {most}"
    share = _percent(knee.hits.hit_share)
    return (
        f"{name}: above {gb(knee.machine_host_bytes)} a machine (--host-ratio "
        f"{knee.host_pages / config.device_pages:.2g}, hit share {share}) twice the memory adds less than "
        f"{100 * KNEE_SHARE:g} % of the prompt tokens; {most}"
    )


def gb(size_bytes: float) -> str:
    """A size in 10^9 bytes, three digits or more."""
    value = size_bytes / GB
    if value >= 100:
        return f"{value:,.0f} GB"
    if value >= 0.1:
        return f"{value:,.1f} GB" if value >= 1 else f"{value:.2f} GB"
    return f"{size_bytes / 1e6:,.3g} MB"


def _floor(ratio: float) -> float:
    """Two decimals, not rounded up: what a user may pass on without asking for too much."""
    return int(ratio * 100) / 100


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _tokens_with_share(tokens: int, layout: LayoutPlan) -> str:
    return f"{tokens:,} ({_percent(tokens / layout.hits.prompt_tokens):>6})"


def _seconds(layout: LayoutPlan) -> str:
    if layout.restore_seconds is None:
        return "does not fit on the device"
    seconds = layout.restore_seconds
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{1000 * seconds:,.3g} ms"


def _traffic_rows(config: PlanConfig) -> Rows:
    link = f"{config.link_bytes_per_second / GB:g} GB/s"
    return (
        ("device to host, fullest rank", lambda layout: gb(layout.backed_up_bytes_per_rank)),
        ("host to device, fullest rank", lambda layout: gb(layout.loaded_bytes_per_rank)),
        (f"restore of {config.restore_tokens:,} tokens", lambda layout: f"{gb(layout.restore_bytes)} a rank"),
        (f"  at {link} a GPU", _seconds),
    )


_CAPACITY_ROWS: Rows = (
    ("lanes (owners of pages)", lambda layout: f"{layout.lanes}"),
    ("device capacity, tokens", lambda layout: f"{layout.device_capacity_tokens:,}"),
    ("host capacity, tokens", lambda layout: f"{layout.host_capacity_tokens:,}"),
)
_HIT_ROWS: Rows = (
    ("served from device", lambda layout: _tokens_with_share(layout.hits.device_hit_tokens, layout)),
    ("served from host", lambda layout: _tokens_with_share(layout.hits.host_hit_tokens, layout)),
    ("computed", lambda layout: _tokens_with_share(layout.hits.computed_tokens, layout)),
    ("hit share", lambda layout: _percent(layout.hits.hit_share)),
    ("evicted from host, tokens", lambda layout: f"{layout.hits.evicted_host_tokens:,}"),
    ("refused backups", lambda layout: f"{layout.hits.refused_backups:,}"),
)
