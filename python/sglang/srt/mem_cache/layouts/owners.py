"""Whether every page has exactly one owner: asked of a strategy at start, before a server relies on it.

A reader gets the pages that its rank does not store from a sum over the shard group, to which every rank without the
page adds zeros. So two kinds of strategy can be served::

    one lane           every rank stores every page, nothing is added up
    as many as ranks   each rank has a lane of its own, and stores the pages of that lane and no others

Anything between them is wrong data without an error: a page on two ranks is added to itself, and a lane that no rank
has reads as zeros. A strategy answers from its arguments alone, so one process can ask in place of all ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from .capabilities import shares_pools
from .errors import LayoutConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .pages import LaneArray, PageArray
    from .registry import AnyKVLayoutStrategy

_ASKED_PAGES_A_LANE: Final = 4


def shares_pages_out(layout: AnyKVLayoutStrategy) -> bool:
    """Whether a rank stores some of the pages only, so that readers must gather the others."""
    return layout.lane_count > 1


def refuse_shared_owners(layouts: Sequence[AnyKVLayoutStrategy]) -> None:
    """Raise `LayoutConfigError` unless every page has one owner, or all are on every rank.

    `layouts` holds the strategy of each rank of a group, in the order of the ranks. They are asked about the first
    pages that can be used.
    """
    name = layouts[0].name
    refuse_shared_lanes(name, [(layout.lane_count, layout.lane) for layout in layouts])
    try:
        fault = wrong_owners(layouts, _first_pages(layouts[0].lane_count))
    except Exception as error:  # another distribution's code
        fault = f"{type(error).__name__} when asked for the owners of pages: {' '.join(str(error).split())}"
    if fault is not None:
        raise LayoutConfigError(f"--kv-layout-strategy {name}: {fault}; accepted: one owner for each page")


def refuse_lane(name: str, *, lane_count: int, lane: int, shard_size: int) -> None:
    """Raise `LayoutConfigError` for what one rank of `shard_size` can see alone: lanes that some rank cannot store."""
    if lane_count not in (1, shard_size) or not 0 <= lane < lane_count:
        raise LayoutConfigError(
            f"--kv-layout-strategy {name}: a rank stores lane {lane} of {lane_count} in a group of {shard_size}; "
            f"accepted: {shard_size} lanes, each stored by one rank, or one lane for all"
        )


def refuse_shared_lanes(name: str, lanes: Sequence[tuple[int, int]]) -> None:
    """Raise `LayoutConfigError` unless there is one lane for all ranks, or one for each.

    `lanes` is what each rank of the group says: how many lanes there are, and which of them it stores.
    """
    ranks = len(lanes)
    counts, stored = [count for count, _ in lanes], [lane for _, lane in lanes]
    if counts == [1] * ranks and stored == [0] * ranks:
        return
    if counts != [ranks] * ranks or sorted(stored) != list(range(ranks)):
        of = _listed(counts[:1] if len(set(counts)) == 1 else counts)
        raise LayoutConfigError(
            f"--kv-layout-strategy {name}: ranks 0 to {ranks - 1} store lanes {_listed(stored)} of {of}; accepted: "
            f"{ranks} lanes, each stored by one rank (copies on several ranks would be added up), or one lane for all"
        )


def wrong_owners(layouts: Sequence[AnyKVLayoutStrategy], slot_pages: PageArray) -> str | None:
    """What is wrong with the owners of `slot_pages`, shape ``[pages]``, in a phrase; None if each page has one."""
    owners = layouts[0].lanes_of(slot_pages)
    for rank, layout in enumerate(layouts):
        named = layout.lanes_of(slot_pages)
        if (at := _first_difference(named, owners)) is not None:
            return f"slot page {slot_pages[at]} is in lane {owners[at]} on rank 0, in lane {named[at]} on rank {rank}"
        own = owners == layout.lane
        copied = layout.plan_backup(slot_pages).device_pages
        if len(copied) != np.count_nonzero(own):
            return f"rank {rank} owns {np.count_nonzero(own)} of {len(own)} slot pages, but backs {len(copied)} up"
        wanted = np.zeros(len(slot_pages), dtype=np.int64)
        wanted[own] = copied
        if layout.lane_count > 1 and (fault := _wrong_rows(layout, layout.page_size, slot_pages, wanted)) is not None:
            return f"rank {rank} (lane {layout.lane}) {fault}"
    return None


def _wrong_rows(layout: object, page_size: int, slot_pages: PageArray, wanted: PageArray) -> str | None:
    """Where `local_rows` does not have a slot page in the row page of `wanted`; 0, the padding page, if not here."""
    if not shares_pools(layout):
        return None  # nor can a server share its pool
    within = np.array([0, page_size - 1])  # a page is as good as its ends: a layout knows no other slots of it
    slots = torch.from_numpy(slot_pages[:, None] * page_size + within)
    rows = layout.local_rows(slots).numpy()
    elsewhere = (wanted == 0)[:, None] & (rows >= 0) & (rows < page_size)
    right = elsewhere | ((wanted > 0)[:, None] & (rows == wanted[:, None] * page_size + within))
    if right.all():
        return None
    at = int(np.flatnonzero(~right.all(axis=1))[0])
    return f"has slot page {slot_pages[at]} in rows {rows[at]}; by its lanes and backups in row page {wanted[at]}"


def _first_pages(lane_count: int) -> PageArray:
    """The first slot pages that are not reserved."""
    return np.arange(lane_count, lane_count * (1 + _ASKED_PAGES_A_LANE), dtype=np.int64)


def _first_difference(found: LaneArray | PageArray, wanted: LaneArray | PageArray) -> int | None:
    differing = np.flatnonzero(found != wanted)
    return int(differing[0]) if len(differing) else None


def _listed(numbers: Sequence[int]) -> str:
    """At most eight of them."""
    shown = ", ".join(str(number) for number in numbers[:8])
    return f"{shown}, ..." if len(numbers) > 8 else shown
