"""Numbers as the table and the page show them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MIB = 2**20
GIB = 2**30


def count(value: int) -> str:
    """With separators."""
    return f"{value:,}"


def percent(share: float) -> str:
    """A share of 1, to a tenth of a percent."""
    return f"{100 * share:.1f} %"


def show_bytes(value: int) -> str:
    """In the largest unit, up to GiB, of which there is at least one."""
    if value >= GIB:
        return f"{value / GIB:,.2f} GiB"
    if value >= MIB:
        return f"{value / MIB:,.1f} MiB"
    return f"{value / 1024:,.1f} KiB" if value >= 1024 else f"{value} B"


def show_range(values: Sequence[int], show: Callable[[int], str]) -> str:
    """One value where all ranks show the same, else the least and the greatest."""
    low, high = show(min(values)), show(max(values))
    return low if low == high else f"{low} .. {high}"
