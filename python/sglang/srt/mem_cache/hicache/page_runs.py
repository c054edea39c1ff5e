"""`PageRuns`: free pages, kept as runs of neighbours so that what is handed out lies together.

A copy of neighbouring pages is one copy, so allocation should not take runs apart that it need not. A request for n
pages gets the shortest run that holds n, or, if there is none, the longest runs until it has n. Pages that come back
join the free runs beside them::

    free     0 1 2 . . 5 6 . . . 10 11 12 13        take(2) -> 5 6       take(5) -> 10 11 12 13, 0

Which run is taken depends on nothing but the calls made, so mirrored lists stay equal on all ranks. Runs of equal
length are stacks; finding a length is a search among the lengths that occur, of which there are at most
``sqrt(2 * pages)``. So a call costs O(runs touched * log n), and numpy work for the pages.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import eq, gt
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from sglang.srt.mem_cache.layouts.config import check_range
from sglang.srt.mem_cache.layouts.errors import LayoutInvariantError
from sglang.srt.mem_cache.layouts.pages import NO_PAGES, LaneArray, PageArray

if TYPE_CHECKING:
    from collections.abc import Iterable


def pages_of_runs(runs: Iterable[tuple[int, int]]) -> PageArray:
    """The pages of `runs` one after the other, int64."""
    parts = [np.arange(start, start + length) for start, length in runs]
    return parts[0] if len(parts) == 1 else np.concatenate([NO_PAGES, *parts])


def runs_of_pages(pages: PageArray) -> list[tuple[int, int]] | None:
    """Ascending `pages` as runs, first page and length; None if a page comes twice."""
    if not len(pages):
        return []
    steps = pages[1:] - pages[:-1]
    breaks = (steps != 1).nonzero()[0]
    if not len(breaks):
        return [(int(pages[0]), len(pages))]
    lasts, starts = pages[breaks].tolist(), pages[breaks + 1].tolist()
    if any(map(eq, lasts, starts)):
        return None
    starts.insert(0, int(pages[0]))
    lasts.append(int(pages[-1]))
    return [(start, last - start + 1) for start, last in zip(starts, lasts, strict=True)]


def pages_by_lane(lanes: LaneArray, lane_count: int) -> PageArray:
    """How many of `lanes` are each lane, shape ``[lane_count]``; `LayoutInvariantError` if one is no lane."""
    try:
        pages = np.bincount(lanes, minlength=lane_count)
    except ValueError:  # one is negative
        pages = NO_PAGES
    if len(pages) != lane_count:
        raise LayoutInvariantError(f"lanes must lie in [0, {lane_count - 1}], got {lanes}")
    return pages


class PageRuns:
    """The free ones of pages ``first .. first + pages - 1``; all are free at first."""

    def __init__(self, pages: int, first: int = 0) -> None:
        self.free = 0
        self._length_at: dict[int, int] = {}  # first page of each run -> its pages
        self._start_before: dict[int, int] = {}  # page behind each run -> its first page
        self._starts_of: dict[int, dict[int, None]] = {}  # length -> runs of that length, latest last
        self._lengths: list[int] = []  # keys of `_starts_of`, ascending
        if pages:
            self.give(first, pages)

    def take(self, pages: int) -> list[tuple[int, int]]:
        """`pages` pages that were free, as runs: first page and length.

        `LayoutInvariantError`, with nothing taken, if there are not as many.
        """
        if not 0 <= pages <= self.free:
            raise LayoutInvariantError(f"{pages} pages were asked for, {self.free} are free")
        self.free -= pages
        runs = []
        lengths = self._lengths
        while pages:
            at = bisect_left(lengths, pages)
            if at == len(lengths):
                at -= 1  # none is long enough: the longest
            length = lengths[at]
            starts = self._starts_of[length]
            start, _ = starts.popitem()
            if not starts:
                del self._starts_of[length], lengths[at]
            del self._length_at[start]
            if pages < length:
                self._keep(start + pages, length - pages)
                runs.append((start, pages))
                return runs
            del self._start_before[start + length]
            runs.append((start, length))
            pages -= length
        return runs

    def runs(self) -> list[tuple[int, int]]:
        """Every free run, ascending: first page and length."""
        return sorted(self._length_at.items())

    def give(self, start: int, length: int) -> None:
        """Take back a run of pages none of which is free."""
        self.free += length
        before = self._start_before.pop(start, None)
        if before is not None:
            self._unfile(before, start - before)
            start, length = before, length + start - before
        behind = self._length_at.pop(start + length, None)
        if behind is not None:
            self._unfile(start + length, behind)
            length += behind
        self._keep(start, length)

    def _keep(self, start: int, length: int) -> None:
        """Record a run, in place of what was known about its first page and of the page behind it."""
        self._length_at[start] = length
        self._start_before[start + length] = start
        if length in self._starts_of:
            self._starts_of[length][start] = None
        else:
            self._starts_of[length] = {start: None}
            insort(self._lengths, length)

    def _unfile(self, start: int, length: int) -> None:
        starts = self._starts_of[length]
        if len(starts) > 1:
            del starts[start]
        else:
            del self._starts_of[length], self._lengths[bisect_left(self._lengths, length)]


class PageLanes:
    """Free pages of several owners. A run is one of *rows*: of an owner's pages that follow each other.

    Page ``first + n`` belongs to ``lanes[n]``, int16; `first` is at least 1. Inside, a page has a place: lane after
    lane, in each lane the pages in order, and a gap behind, so that the last run of a lane never touches the first one
    of the next.
    """

    def __init__(self, lanes: LaneArray, *, lane_count: int, first: int) -> None:
        check_range("first", first, 1)
        counts = np.bincount(lanes, minlength=lane_count)
        self._stride = int(counts.max()) + 1
        order = np.argsort(lanes, kind="stable")
        starts = np.arange(lane_count) * self._stride
        places = np.concatenate([np.arange(start, start + n) for start, n in zip(starts, counts, strict=True)])
        self._page_at: PageArray = np.zeros(lane_count * self._stride, dtype=np.int64)
        self._page_at[places] = first + order
        self._place_of: PageArray = np.full(first + len(lanes), self._stride - 1, dtype=np.int64)  # a gap: never used
        self._place_of[first + order] = places
        self._used = np.zeros(first + len(lanes) + 1, dtype=np.bool_)  # by page; the first and the last one never are
        self._free = [PageRuns(int(n), int(start)) for start, n in zip(starts, counts, strict=True)]

    def room(self) -> list[int]:
        """Free pages of each lane."""
        return [runs.free for runs in self._free]

    def take(self, lanes: LaneArray) -> PageArray | None:
        """Pages in `lanes`, in that order, or None with nothing taken if a lane is short.

        `LayoutInvariantError`, with nothing taken, if one of `lanes` does not exist.
        """
        needed = pages_by_lane(lanes, len(self._free)).tolist()
        if any(map(gt, needed, self.room())):
            return None
        runs = [run for free, n in zip(self._free, needed, strict=True) if n for run in free.take(n)]
        by_lane = np.concatenate([NO_PAGES, *[self._page_at[start : start + length] for start, length in runs]])
        self._used[by_lane] = True
        if len(self._free) == 1:
            return by_lane
        taken = np.empty_like(by_lane)
        taken[lanes.argsort(kind="stable")] = by_lane
        return taken

    def give(self, pages: PageArray) -> None:
        """Take pages back. `LayoutInvariantError`, with nothing changed, if one is not in use or comes twice."""
        used = self._used.take(pages, mode="clip")  # a number that is no page finds the first or the last one
        if np.count_nonzero(used) != len(pages):
            self._refuse(pages, pages[~used])
        runs = runs_of_pages(np.sort(self._place_of[pages]))
        if runs is None:
            raise LayoutInvariantError(f"slot pages {pages} are freed in one call, one of them twice")
        self._used[pages] = False
        for start, length in runs:
            self._free[start // self._stride].give(start, length)

    def _refuse(self, pages: PageArray, idle: PageArray) -> NoReturn:
        if int(idle.min()) < 0 or int(idle.max()) >= len(self._place_of):
            raise LayoutInvariantError(f"slot pages must lie in [0, {len(self._place_of) - 1}], got {pages}")
        raise LayoutInvariantError(f"slot pages {idle} are freed but not in use")

    def all_free(self) -> PageArray:
        """Every free page, lane after lane, ascending in each."""
        return self._page_at[pages_of_runs(run for runs in self._free for run in runs.runs())]
