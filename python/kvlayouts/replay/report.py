"""The table a replay ends with, and the one line under it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from kvlayouts.replay.numbers import count, percent, show_bytes, show_range

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rich.console import Console

    from kvlayouts.common.trace import Trace
    from kvlayouts.replay.config import ReplayConfig
    from kvlayouts.replay.results import LayoutResult


def print_report(console: Console, config: ReplayConfig, trace: Trace, results: Mapping[str, LayoutResult]) -> None:
    """Print what was run, the table, and the verdict. The verdict is one line, however narrow the console is."""
    console.print(_headline(config, trace), highlight=False, markup=False)
    console.print(build_table(results))
    console.print()
    style = "bold green" if all(result.passed for result in results.values()) else "bold red"
    console.print(Text(verdict(results), style=style), soft_wrap=True)


def build_table(results: Mapping[str, LayoutResult]) -> Table:
    """One column per layout, one row per number."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in results:
        table.add_column(name, justify="right", overflow="fold")
    for _, rows in TABLE_SECTIONS:
        for label, show in rows:
            table.add_row(label, *(show(result) for result in results.values()))
        table.add_section()
    return table


def verdict(results: Mapping[str, LayoutResult]) -> str:
    """One line: each layout against the one with the least capacity, then whether bytes and ranks were right."""
    return f"{_comparison(results)}; {_soundness(results)}"


def _headline(config: ReplayConfig, trace: Trace) -> str:
    hits = trace.infinite_cache_hits()
    return (
        f"{trace.name}: {count(len(trace.requests))} requests, {count(trace.prompt_tokens)} prompt tokens;\n"
        f"{trace.block_tokens} tokens a block; an infinite cache would serve {percent(hits.token_share)}\n"
        f"{config.cp_size} ranks, {config.pool} pool, pages of {config.page_size} tokens\n"
        f"per rank: {count(config.device_tokens)} device tokens, {config.host_ratio:g}x that on host\n"
        f"{config.policy}, {config.eviction_policy} eviction, {config.host_layout} host memory\n"
    )


def _comparison(results: Mapping[str, LayoutResult]) -> str:
    names = list(results)
    base = min(names, key=lambda name: results[name].capacity_tokens)
    base_result = results[base]
    if len(names) == 1:
        return f"{base}: hit share {percent(base_result.hit_share)}"
    return "; ".join(
        f"{name}: {result.capacity_tokens / base_result.capacity_tokens:.1f}x the capacity per rank "
        f"of {base}, hit share {percent(result.hit_share)} vs {percent(base_result.hit_share)}"
        for name, result in results.items()
        if name != base
    )


def _soundness(results: Mapping[str, LayoutResult]) -> str:
    faults = [fault for name, result in results.items() for fault in _faults(name, result)]
    if faults:
        return "FAILED: " + ", ".join(faults)
    unverified = [name for name, result in results.items() if not result.verified_tokens]
    if len(unverified) == len(results):
        bytes_words = "no bytes verified"
    elif unverified:
        bytes_words = f"no bytes verified for {', '.join(unverified)}, no mismatch elsewhere"
    else:
        total = sum(result.verified_tokens for result in results.values())
        bytes_words = f"all bytes of {count(total)} verified tokens right"
    return f"{bytes_words}, ranks agree"


def _faults(name: str, result: LayoutResult) -> list[str]:
    faults = []
    if result.mismatched_tokens:
        wrong, verified = count(result.mismatched_tokens), count(result.verified_tokens)
        faults.append(f"{name}: {wrong} of {verified} verified tokens wrong")
    if not result.digests_equal:
        faults.append(f"{name}: ranks have different trees")
    if not result.acks_equal:
        faults.append(f"{name}: ranks have different ack counts")
    return faults


def _tokens_with_share(tokens: int, result: LayoutResult) -> str:
    share = tokens / result.prompt_tokens if result.prompt_tokens else 0.0
    return f"{count(tokens)} ({percent(share):>6})"


Rows = tuple[tuple[str, "Callable[[LayoutResult], str]"], ...]

_HIT_ROWS: Rows = (
    ("requests", lambda r: count(r.requests)),
    ("prompt tokens", lambda r: count(r.prompt_tokens)),
    ("  served from device", lambda r: _tokens_with_share(r.device_hit_tokens, r)),
    ("  served from host", lambda r: _tokens_with_share(r.host_hit_tokens, r)),
    ("  computed", lambda r: _tokens_with_share(r.computed_tokens, r)),
    ("hit share", lambda r: percent(r.hit_share)),
)
_MEMORY_ROWS: Rows = (
    ("device capacity, tokens", lambda r: count(r.logical_capacity_tokens)),
    ("host capacity, tokens", lambda r: count(r.host_capacity_tokens)),
    ("device KV per rank", lambda r: show_bytes(r.device_bytes_per_rank)),
    ("host KV per rank", lambda r: show_bytes(r.host_bytes_per_rank)),
    ("device to host per rank", lambda r: show_range(r.d2h_bytes_per_rank, show_bytes)),
    ("host to device per rank", lambda r: show_range(r.h2d_bytes_per_rank, show_bytes)),
    ("from peers per rank", lambda r: show_range(r.received_bytes_per_rank or (0,), show_bytes)),
    ("page imbalance, max/mean", lambda r: f"{r.page_imbalance:.3f}"),
    ("evicted from device, tokens", lambda r: count(r.evicted_device_tokens)),
    ("evicted from host, tokens", lambda r: count(r.evicted_host_tokens)),
    ("refused backups", lambda r: count(r.refused_backups)),
)
_AGREEMENT_ROWS: Rows = (
    ("write acks per rank", lambda r: show_range(r.write_acks_per_rank, count)),
    ("load acks per rank", lambda r: show_range(r.load_acks_per_rank, count)),
    ("tree digests", lambda r: "equal" if r.digests_equal else "DIFFERENT"),
    ("verified tokens", lambda r: count(r.verified_tokens)),
    ("mismatched tokens", lambda r: count(r.mismatched_tokens)),
    ("seconds", lambda r: f"{r.seconds:,.1f}"),
    ("requests/s", lambda r: f"{r.requests_per_second:,.1f}"),
)

TABLE_SECTIONS: tuple[tuple[str, Rows], ...] = (
    ("Hits", _HIT_ROWS),
    ("Memory and traffic", _MEMORY_ROWS),
    ("Agreement and speed", _AGREEMENT_ROWS),
)
"""The table's rows in groups, each with a heading that the terminal leaves out."""
