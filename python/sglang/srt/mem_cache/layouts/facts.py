"""What callers ask of a strategy that need not say it: the answer of its capability, or the usual one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .capabilities import has_host_lanes, stripes_pages

if TYPE_CHECKING:
    from .protocol import AnyKVLayoutStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLanes:
    """Owners on the host: how many there are, and which is this rank; None if it keeps nothing there."""

    count: int
    own: int | None


def host_lanes(layout: AnyKVLayoutStrategy) -> HostLanes:
    """Who owns host pages: who owns them on the device, unless the strategy says otherwise."""
    if has_host_lanes(layout):
        return HostLanes(count=layout.host_lane_count, own=layout.host_lane)
    return HostLanes(count=layout.lane_count, own=layout.lane)


def page_rows(layout: AnyKVLayoutStrategy) -> int:
    """Rows that a page takes in one rank's pools: all its tokens, unless the strategy says otherwise."""
    return layout.page_rows if stripes_pages(layout) else layout.page_size


def shares_pages_out(layout: AnyKVLayoutStrategy) -> bool:
    """Whether a rank stores some of the pages only on its device, so that readers must gather the others."""
    return layout.lane_count > 1


def exchanges_pages(layout: AnyKVLayoutStrategy) -> bool:
    """Whether the host has other owners than the device, so that ranks give each other pages after a load."""
    return has_host_lanes(layout)


def needs_peers(layout: AnyKVLayoutStrategy) -> bool:
    """Whether anything is shared out over the ranks, on either tier: one rank alone could as well have `identity`."""
    return shares_pages_out(layout) or exchanges_pages(layout) or stripes_pages(layout)
