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
from typing import TYPE_CHECKING

import numpy as np

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
    if not steps[breaks].all():
        return None
    firsts = [0, *(breaks + 1).tolist()]
    lengths = (end - first for first, end in zip(firsts, [*firsts[1:], len(pages)], strict=True))
    return list(zip(pages[firsts].tolist(), lengths, strict=True))


def pages_by_lane(lanes: LaneArray, lane_count: int) -> PageArray:
    """How many of `lanes` are each lane, shape ``[lane_count]``; `LayoutInvariantError` if one is no lane."""
    if len(lanes) and not 0 <= int(lanes.min()) <= int(lanes.max()) < lane_count:
        raise LayoutInvariantError(f"lanes must lie in [0, {lane_count - 1}], got {lanes}")
    return np.bincount(lanes, minlength=lane_count)


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
        while pages:
            fits = bisect_left(self._lengths, pages)
            length = self._lengths[min(fits, len(self._lengths) - 1)]
            start = self._pop(length)
            del self._length_at[start]
            taken = min(pages, length)
            if taken < length:
                self._keep(start + taken, length - taken)
            else:
                del self._start_before[start + length]
            runs.append((start, taken))
            pages -= taken
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
        starts = self._starts_of.get(length)
        if starts is None:
            starts = self._starts_of[length] = {}
            insort(self._lengths, length)
        starts[start] = None

    def _unfile(self, start: int, length: int) -> None:
        starts = self._starts_of[length]
        del starts[start]
        if not starts:
            self._forget_length(length)

    def _pop(self, length: int) -> int:
        """First page of the latest run of that length, which is no longer filed under it."""
        starts = self._starts_of[length]
        start, _ = starts.popitem()
        if not starts:
            self._forget_length(length)
        return start

    def _forget_length(self, length: int) -> None:
        del self._starts_of[length]
        del self._lengths[bisect_left(self._lengths, length)]


class PageLanes:
    """Free pages of several owners. A run is one of *rows*: of an owner's pages that follow each other.

    Page ``first + n`` belongs to ``lanes[n]``, int16. Inside, a page has a place: lane after lane, in each lane the
    pages in order, and a gap behind, so that the last run of a lane never touches the first one of the next.
    """

    def __init__(self, lanes: LaneArray, *, lane_count: int, first: int) -> None:
        counts = np.bincount(lanes, minlength=lane_count)
        self._stride = int(counts.max()) + 1
        order = np.argsort(lanes, kind="stable")
        starts = np.arange(lane_count) * self._stride
        places = np.concatenate([np.arange(start, start + n) for start, n in zip(starts, counts, strict=True)])
        self._page_at: PageArray = np.zeros(lane_count * self._stride, dtype=np.int64)
        self._page_at[places] = first + order
        self._place_of: PageArray = np.full(first + len(lanes), self._stride - 1, dtype=np.int64)  # a gap: never used
        self._place_of[first + order] = places
        self._used = np.zeros(lane_count * self._stride, dtype=np.bool_)
        self._free = [PageRuns(int(n), int(start)) for start, n in zip(starts, counts, strict=True)]

    def room(self) -> list[int]:
        """Free pages of each lane."""
        return [runs.free for runs in self._free]

    def take(self, lanes: LaneArray) -> PageArray | None:
        """Pages in `lanes`, in that order, or None with nothing taken if a lane is short.

        `LayoutInvariantError`, with nothing taken, if one of `lanes` does not exist.
        """
        needed = pages_by_lane(lanes, len(self._free)).tolist()
        if any(pages > runs.free for pages, runs in zip(needed, self._free, strict=True)):
            return None
        places = pages_of_runs([run for runs, n in zip(self._free, needed, strict=True) if n for run in runs.take(n)])
        self._used[places] = True
        by_lane = self._page_at[places]
        if len(self._free) == 1:
            return by_lane
        taken = np.empty_like(by_lane)
        taken[np.argsort(lanes, kind="stable")] = by_lane
        return taken

    def give(self, pages: PageArray) -> None:
        """Take pages back. `LayoutInvariantError`, with nothing changed, if one is not in use or comes twice."""
        if len(pages) and int(pages.view(np.uint64).max()) >= len(self._place_of):  # negative ones are large so
            raise LayoutInvariantError(f"slot pages must lie in [0, {len(self._place_of) - 1}], got {pages}")
        places = np.sort(self._place_of[pages])
        runs = runs_of_pages(places)
        if runs is None:
            raise LayoutInvariantError(f"slot pages {pages} are freed in one call, one of them twice")
        if np.count_nonzero(self._used[places]) != len(places):
            idle = pages[~self._used[self._place_of[pages]]]
            raise LayoutInvariantError(f"slot pages {idle} are freed but not in use")
        self._used[places] = False
        for start, length in runs:
            self._free[start // self._stride].give(start, length)

    def all_free(self) -> PageArray:
        """Every free page, lane after lane, ascending in each."""
        return self._page_at[pages_of_runs(run for runs in self._free for run in runs.runs())]
