"""Free slot pages by owner: one list an owner, or one list for all where pages are dealt in turn.

Both hand out pages for a pattern of lanes, and keep runs of neighbours long (`page_runs`)::

    lanes wanted      PageLanes: a list a lane                     PageTurns: page p is lane p % 3
    1 2 0 1 2 0       lane 0: rows 4, 5   lane 1: rows 7, 8 ..     pages 13 14 15 16 17 18
                      neighbours are rows of one owner             neighbours are slots: a chain is a range of slots

The first is for any strategy. The second costs a chain the same however many lanes there are. Single pages, as those of
requests that decode, cost a search each; if there are many they are put in turn first.
"""

from __future__ import annotations

from operator import add, gt, sub
from typing import TYPE_CHECKING, NoReturn, Protocol

import numpy as np

from sglang.srt.mem_cache.layouts.capabilities import deals_in_turn
from sglang.srt.mem_cache.layouts.config import check_range
from sglang.srt.mem_cache.layouts.errors import LayoutConfigError, LayoutInvariantError
from sglang.srt.mem_cache.layouts.facts import shares_pages_out
from sglang.srt.mem_cache.layouts.pages import NO_PAGES, LaneArray, PageArray

from .page_runs import PageRuns, pages_by_lane, pages_of_runs, runs_of_pages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang.srt.mem_cache.layouts.protocol import AnyKVLayoutStrategy

_MANY_CHAINS = 24
"""From so many chains on, most of them single pages, putting them in turn costs less than a search for each."""


class SlotPages(Protocol):
    """Free slot pages by lane. Equal calls give equal pages, whatever the process."""

    def room(self) -> list[int]:
        """Free pages of each lane."""
        ...

    def take(self, lanes: LaneArray) -> PageArray | None:
        """Pages in `lanes`, in that order, or None with nothing taken if a lane is short.

        `LayoutInvariantError`, with nothing taken, if one of `lanes` does not exist.
        """
        ...

    def give(self, pages: PageArray) -> None:
        """Take pages back. `LayoutInvariantError`, with nothing changed, if one is not in use or comes twice."""
        ...

    def all_free(self) -> PageArray:
        """Every free page."""
        ...


def free_slot_pages_of(layout: AnyKVLayoutStrategy, pages: int) -> SlotPages:
    """All of `pages` slot pages, free, behind one reserved page for each lane. See `TurnwiseLayout`."""
    first = layout.lane_count
    lanes = layout.lanes_of(np.arange(first, first + pages, dtype=np.int64))
    if shares_pages_out(layout) and deals_in_turn(layout):
        return PageTurns(lanes, lane_count=layout.lane_count, first=first)
    return PageLanes(lanes, lane_count=layout.lane_count, first=first)


class _PagesInUse:
    """Which of pages ``first .. end - 1`` are handed out; `first` is at least 1."""

    def __init__(self, first: int, end: int) -> None:
        check_range("first", first, 1)
        self._end = end
        self._used = np.zeros(end + 1, dtype=np.bool_)  # the first and the last one never are

    def add(self, pages: PageArray) -> None:
        self._used[pages] = True

    def remove(self, pages: PageArray) -> None:
        self._used[pages] = False

    def check(self, pages: PageArray) -> None:
        """Raise `LayoutInvariantError` if one is not in use."""
        used = self._used.take(pages, mode="clip")  # a number that is no page finds the first or the last one
        if np.count_nonzero(used) != len(pages):
            self._refuse(pages, pages[~used])

    def _refuse(self, pages: PageArray, idle: PageArray) -> NoReturn:
        if int(idle.min()) < 0 or int(idle.max()) >= self._end:
            raise LayoutInvariantError(f"slot pages must lie in [0, {self._end - 1}], got {pages}")
        raise LayoutInvariantError(f"slot pages {idle} are freed but not in use")


class PageLanes:
    """A list of free pages for each lane. A run is one of *rows*: of an owner's pages that follow each other.

    Page ``first + n`` belongs to ``lanes[n]``, int16; `first` is at least 1. Inside, a page has a place: lane after
    lane, in each lane the pages in order, and a gap behind, so that the last run of a lane never touches the first one
    of the next.
    """

    def __init__(self, lanes: LaneArray, *, lane_count: int, first: int) -> None:
        self._in_use = _PagesInUse(first, first + len(lanes))
        counts = np.bincount(lanes, minlength=lane_count)
        self._stride = int(counts.max()) + 1
        order = np.argsort(lanes, kind="stable")
        starts = np.arange(lane_count) * self._stride
        places = np.concatenate([np.arange(start, start + n) for start, n in zip(starts, counts, strict=True)])
        self._page_at: PageArray = np.zeros(lane_count * self._stride, dtype=np.int64)
        self._page_at[places] = first + order
        self._place_of: PageArray = np.full(first + len(lanes), self._stride - 1, dtype=np.int64)  # a gap: never used
        self._place_of[first + order] = places
        self._free = [PageRuns(int(n), int(start)) for start, n in zip(starts, counts, strict=True)]

    def room(self) -> list[int]:
        """See `SlotPages.room`."""
        return [runs.free for runs in self._free]

    def take(self, lanes: LaneArray) -> PageArray | None:
        """See `SlotPages.take`."""
        needed = pages_by_lane(lanes, len(self._free)).tolist()
        if any(map(gt, needed, self.room())):
            return None
        runs = [run for free, n in zip(self._free, needed, strict=True) if n for run in free.take(n)]
        by_lane = np.concatenate([NO_PAGES, *[self._page_at[start : start + length] for start, length in runs]])
        self._in_use.add(by_lane)
        if len(self._free) == 1:
            return by_lane
        taken = np.empty_like(by_lane)
        # The n-th page of a lane goes where `lanes` names it the n-th time.
        taken[lanes.argsort(kind="stable")] = by_lane
        return taken

    def give(self, pages: PageArray) -> None:
        """See `SlotPages.give`."""
        self._in_use.check(pages)
        for start, length in _runs_of(pages, np.sort(self._place_of[pages])):
            self._free[start // self._stride].give(start, length)
        self._in_use.remove(pages)

    def all_free(self) -> PageArray:
        """Every free page, lane after lane, ascending in each."""
        return self._page_at[pages_of_runs(run for runs in self._free for run in runs.runs())]


class PageTurns:
    """Free pages that are dealt to the lanes in turn, in one list. A run is one of slot pages.

    Page ``first + n`` belongs to ``lanes[n]``, int16; `LayoutConfigError` unless that is the number of the page modulo
    `lane_count`. `first` is at least 1.
    """

    def __init__(self, lanes: LaneArray, *, lane_count: int, first: int) -> None:
        self._in_use = _PagesInUse(first, first + len(lanes))
        pages = np.arange(first, first + len(lanes))
        wrong = (lanes != pages % lane_count).nonzero()[0]
        if len(wrong):
            raise LayoutConfigError(
                f"pages dealt in turn must have the owners page % {lane_count}, "
                f"got {lanes[wrong[0]]} for page {pages[wrong[0]]}"
            )
        self._lane_count = lane_count
        self._room: list[int] = np.bincount(lanes, minlength=lane_count).tolist()
        self._free = PageRuns(len(lanes), first, turn=lane_count)
        self._in_turn = (np.arange(first + len(lanes) + lane_count) % lane_count).astype(np.int16)

    def room(self) -> list[int]:
        """See `SlotPages.room`."""
        return self._room.copy()

    def take(self, lanes: LaneArray) -> PageArray | None:
        """See `SlotPages.take`."""
        needed = pages_by_lane(lanes, self._lane_count).tolist()
        room = list(map(sub, self._room, needed))
        if min(room) < 0:
            return None
        chains = self._chains(lanes)
        order = None
        if len(chains) >= _MANY_CHAINS and 2 * len(chains) >= len(lanes):
            order = _in_turns(lanes, needed)
            chains = self._chains(lanes[order])
        taken = pages_of_runs(run for lane, n in chains for run in self._free.take(n, lane))
        self._room = room
        self._in_use.add(taken)
        if order is None:
            return taken
        pages = np.empty_like(taken)
        pages[order] = taken
        return pages

    def _chains(self, lanes: LaneArray) -> list[tuple[int, int]]:
        """`lanes` in parts that go on in turn: first lane and length. There are no more of them than pages."""
        if not len(lanes):
            return []
        first = int(lanes[0])
        if not np.count_nonzero(lanes != self._in_turn[first : first + len(lanes)]):  # one chain, as mostly
            return [(first, len(lanes))]
        breaks = ((lanes[:-1] + 1) % self._lane_count != lanes[1:]).nonzero()[0] + 1
        firsts = [0, *breaks.tolist()]
        return [(int(lanes[at]), end - at) for at, end in zip(firsts, [*firsts[1:], len(lanes)], strict=True)]

    def give(self, pages: PageArray) -> None:
        """See `SlotPages.give`."""
        self._in_use.check(pages)
        for start, length in _runs_of(pages, np.sort(pages)):
            self._free.give(start, length)
        freed = np.bincount(self._in_turn[pages], minlength=self._lane_count)
        self._room = list(map(add, self._room, freed.tolist()))
        self._in_use.remove(pages)

    def all_free(self) -> PageArray:
        """Every free page, ascending."""
        return pages_of_runs(self._free.runs())


def _in_turns(lanes: LaneArray, counts: Sequence[int]) -> PageArray:
    """`lanes` in another order, as their places: each lane once, ascending, then those wanted twice, and so on."""
    by_lane = lanes.argsort(kind="stable")
    firsts = np.cumsum(counts) - counts
    turns = np.arange(len(lanes)) - np.repeat(firsts, counts)
    return by_lane[turns.argsort(kind="stable")]


def _runs_of(pages: PageArray, places: PageArray) -> list[tuple[int, int]]:
    """The runs of `places`, ascending; `LayoutInvariantError`, which names `pages`, if one comes twice."""
    runs = runs_of_pages(places)
    if runs is None:
        raise LayoutInvariantError(f"slot pages {pages} are freed in one call, one of them twice")
    return runs
