"""What a soak found, as a table and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from kvlayouts.soak.config import repeat_command

if TYPE_CHECKING:
    from rich.console import Console

    from kvlayouts.soak.config import SoakConfig, SoakResult

SHOWN_VIOLATIONS = 10
MIB = 2**20


def print_soak(console: Console, config: SoakConfig, result: SoakResult) -> None:
    """Print the figures; after a violation also the last events and the command that repeats them."""
    console.print(
        f"soak of {config.layout}: {config.ranks} ranks, {config.pool} pool, {config.policy}, seed {config.seed}"
    )
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("figure")
    table.add_column("value", justify="right")
    table.add_row("events", f"{result.events:,}")
    for fault, count in result.faults.items():
        table.add_row(f"  fault {fault}", f"{count:,}")
    table.add_row("checks", f"{result.checks:,}")
    table.add_row("verified tokens", f"{result.verified_tokens:,}")
    table.add_row("violations", f"{len(result.violations):,}")
    table.add_row("memory of all ranks, start", f"{result.rss_start_bytes / MIB:,.1f} MiB")
    table.add_row("memory of all ranks, end", f"{result.rss_end_bytes / MIB:,.1f} MiB")
    table.add_row("  growth", f"{result.rss_growth:+.2%}")
    table.add_row("seconds", f"{result.seconds:,.1f}")
    console.print(table)
    if result.violations:
        for violation in result.violations[:SHOWN_VIOLATIONS]:
            console.print(f"violation: {violation}", markup=False, highlight=False)
        console.print("last events:", *result.last_events, sep="\n  ", markup=False, highlight=False)
        console.print(
            f"again with: {repeat_command(config, result.events)}", markup=False, highlight=False, soft_wrap=True
        )


def soak_json(config: SoakConfig, result: SoakResult) -> dict[str, object]:
    """The run as plain JSON values: `config`, and the figures with `violations` as a count."""
    return {
        "config": asdict(config),
        **asdict(result),
        "violations": len(result.violations),
        "violation_lines": list(result.violations),
        "rss_growth": result.rss_growth,
    }
