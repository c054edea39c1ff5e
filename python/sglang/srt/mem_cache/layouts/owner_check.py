"""Whether every page has exactly one owner, on each tier: asked of a strategy at start, before a server relies on it.

A reader gets the pages that its rank does not store from a sum over the shard group, to which every rank without the
page adds zeros. So two kinds of strategy can be served::

    one lane           every rank stores every page, or its stripe of every page; nothing is added up
    as many as ranks   each rank has a lane of its own, and stores the pages of that lane and no others

Anything between them is wrong data without an error: a page on two ranks is added to itself, and a lane that no rank
has reads as zeros. On the host, each lane is one rank's, or there is one and every rank keeps its own copy: two owners
would both answer in an exchange, and the pages of a lane without one never come back. A strategy answers from its
arguments alone, so one process can ask in place of all ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from .errors import LayoutConfigError
from .facts import HostLanes, host_lanes, page_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .pages import LaneArray, PageArray
    from .protocol import AnyKVLayoutStrategy

_ASKED_PAGES_A_LANE: Final = 4


def refuse_shared_owners(layouts: Sequence[AnyKVLayoutStrategy]) -> None:
    """Raise `LayoutConfigError` unless every page has one owner on each tier, or all are on every rank.

    `layouts` holds the strategy of each rank of a group, in the order of the ranks. They are asked about the first
    pages that can be used.
    """
    name = layouts[0].name
    refuse_shared_lanes(name, [(layout.lane_count, layout.lane) for layout in layouts])
    refuse_shared_host_lanes(name, [host_lanes(layout) for layout in layouts])
    try:
        fault = wrong_owners(layouts, _first_pages(layouts))
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


def refuse_shared_host_lanes(name: str, lanes: Sequence[HostLanes]) -> None:
    """Raise `LayoutConfigError` unless each host lane is one rank's, or all ranks have the only one.

    `lanes` is what each rank of the group says; ranks may have none.
    """
    ranks = len(lanes)
    counts = [each.count for each in lanes]
    owned = sorted(each.own for each in lanes if each.own is not None)
    if set(counts) == {1} and owned == [0] * ranks:
        return
    if len(set(counts)) > 1 or owned != list(range(counts[0])):
        of = _listed(counts[:1] if len(set(counts)) == 1 else counts)
        own = _listed(["none" if each.own is None else each.own for each in lanes])
        raise LayoutConfigError(
            f"--kv-layout-strategy {name}: ranks 0 to {ranks - 1} back up host lanes {own} of {of}; accepted: each "
            "lane backed up by one rank (two owners would both answer in an exchange), or one lane for all"
        )


def wrong_owners(layouts: Sequence[AnyKVLayoutStrategy], slot_pages: PageArray) -> str | None:
    """What is wrong with the owners of `slot_pages`, shape ``[pages]``, in a phrase; None if each page has one."""
    device, host = layouts[0].lanes_of(slot_pages), layouts[0].plan_backup(slot_pages).lanes
    for rank, layout in enumerate(layouts):
        plan = layout.plan_backup(slot_pages)
        for tier, named, owners in (("lane", layout.lanes_of(slot_pages), device), ("host lane", plan.lanes, host)):
            if (at := _first_difference(named, owners)) is not None:
                return (
                    f"slot page {slot_pages[at]} is in {tier} {owners[at]} on rank 0, "
                    f"in {tier} {named[at]} on rank {rank}"
                )
        own, lanes = host == host_lanes(layout).own, host_lanes(layout).count
        if len(host) and not 0 <= host.min() <= host.max() < lanes:
            return f"slot pages are in host lanes {host.min()} to {host.max()} of {lanes}"
        if len(plan.device_pages) != np.count_nonzero(own):
            return (
                f"rank {rank} owns {np.count_nonzero(own)} of {len(own)} slot pages, "
                f"but backs {len(plan.device_pages)} up"
            )
        stored = device == layout.lane
        if (fault := _wrong_rows(layout, slot_pages, stored, own, plan.device_pages)) is not None:
            return f"rank {rank} (lane {layout.lane}) {fault}"
    return None


def _wrong_rows(
    layout: AnyKVLayoutStrategy,
    slot_pages: PageArray,
    stored: np.ndarray[tuple[int], np.dtype[np.bool_]],
    own: np.ndarray[tuple[int], np.dtype[np.bool_]],
    backed_up: PageArray,
) -> str | None:
    """Where `local_rows` is not a row page of its own for each page that is `stored`, and the one that is backed up."""
    page_size, rows_a_page = layout.page_size, page_rows(layout)
    slots = torch.from_numpy(slot_pages[:, None] * page_size + np.arange(page_size))
    rows = layout.local_rows(slots).numpy()
    here = rows >= rows_a_page
    row_pages = np.where(here, rows // rows_a_page, 0).max(axis=1, initial=0)
    wanted = row_pages.copy()
    wanted[own] = backed_up
    whole = (np.count_nonzero(here, axis=1) == rows_a_page) == stored
    right = whole & (here.any(axis=1) == stored) & (row_pages == wanted) & (rows >= 0).all(axis=1)
    in_page = (~here | (rows // rows_a_page == row_pages[:, None])).all(axis=1)
    if (right & in_page).all():
        return None
    at = int(np.flatnonzero(~(right & in_page))[0])
    where = f"row page {wanted[at]}" if stored[at] else "none"
    return f"has slot page {slot_pages[at]} in rows {_listed(rows[at].tolist())}; by its lanes and backups in {where}"


def _first_pages(layouts: Sequence[AnyKVLayoutStrategy]) -> PageArray:
    """The first slot pages that are not reserved: for each owner of either tier several."""
    first = layouts[0].lane_count
    owners = max(first, len(layouts))
    return np.arange(first, first + owners * _ASKED_PAGES_A_LANE, dtype=np.int64)


def _first_difference(found: LaneArray | PageArray, wanted: LaneArray | PageArray) -> int | None:
    differing = np.flatnonzero(found != wanted)
    return int(differing[0]) if len(differing) else None


def _listed(numbers: Sequence[object]) -> str:
    """At most eight of them."""
    shown = ", ".join(str(number) for number in numbers[:8])
    return f"{shown}, ..." if len(numbers) > 8 else shown
