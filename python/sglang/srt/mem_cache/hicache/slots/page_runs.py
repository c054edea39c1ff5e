"""`PageRuns`: free pages, kept as runs of neighbours so that what is handed out lies together.

A copy of neighbouring pages is one copy, so allocation should not take runs apart that it need not. A request for n
pages gets the shortest run that holds n, or, if there is none, the longest run and as before for the rest. Pages that
come back join the free runs beside them::

    free     0 1 2 . . 5 6 . . . 10 11 12 13        take(2) -> 5 6                 or take(5) -> 10 11 12 13, 5

Pages may have *owners in turn*, page p the owner ``p % turn``. A request then says whose page comes first, and what
lies in a run before that page stays free::

    turn 3   0 1 2 . . 5 6 . . . 10 11 12 13        take(2, owner=1) -> 1 2        or take(3, owner=1) -> 10 11 12

Which run is taken depends on nothing but the calls made, so mirrored lists stay equal on all ranks. Runs of equal
length, and of the same first owner, are stacks; finding one is a search among the lengths that occur, of which there
are at most ``sqrt(2 * pages)``. With owners it goes on past runs that begin with the wrong one, at most ``4 * turn``
times, so a call costs O(runs touched * turn * log n), mostly O(runs touched * log n), and numpy work for the pages.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import eq
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
    """The free ones of pages ``first .. first + pages - 1``; all are free at first.

    Of each run of n pages from s on, and of nothing else, ``_length_at[s]`` is n, ``_start_before[s + n]`` is s, and s
    is in ``_starts_of[n * turn + s % turn]``; ``_keys`` are the keys of the last, ascending.
    """

    def __init__(self, pages: int, first: int = 0, *, turn: int = 1) -> None:
        self.free = 0
        self._turn = turn
        self._length_at: dict[int, int] = {}  # first page of each run -> its pages
        self._start_before: dict[int, int] = {}  # page behind each run -> its first page
        self._starts_of: dict[int, dict[int, None]] = {}  # key -> first pages of its runs, latest last
        self._keys: list[int] = []  # ``length * turn + first owner`` of the runs, ascending
        if pages:
            self.give(first, pages)

    def take(self, pages: int, owner: int = 0) -> list[tuple[int, int]]:
        """`pages` pages that were free, the first one of `owner` and so on in turn, as runs: first page and length.

        `LayoutInvariantError`, with nothing taken, if there are not as many, and with some taken if an owner is short:
        with several, the caller counts what each of them has.
        """
        if not 0 <= pages <= self.free:
            raise LayoutInvariantError(f"{pages} pages were asked for, {self.free} are free")
        runs = []
        while pages:
            index, skipped = self._choose(pages, owner)
            start, length = self._pop(index)
            taken = min(pages, length - skipped)
            if skipped:
                self._keep(start, skipped)
            if skipped + taken < length:
                self._keep(start + skipped + taken, length - skipped - taken)
            else:
                del self._start_before[start + length]
            runs.append((start + skipped, taken))
            self.free -= taken
            pages -= taken
            owner = (owner + taken) % self._turn
        return runs

    def _choose(self, pages: int, owner: int) -> tuple[int, int]:
        """Where the key of the best run is, and how many of its pages come before the first one of `owner`."""
        keys, turn = self._keys, self._turn
        index = bisect_left(keys, pages * turn)
        while index < len(keys):
            length, first_owner = divmod(keys[index], turn)
            skipped = (owner - first_owner) % turn
            if skipped + pages <= length:
                return index, skipped
            # Of this length, one that begins as many owners later as pages are missing would do.
            index = bisect_left(keys, min(keys[index] + skipped + pages - length, (length + 1) * turn), index + 1)
        index = len(keys) - 1
        while index >= 0:  # none is long enough: the longest
            length, first_owner = divmod(keys[index], turn)
            skipped = (owner - first_owner) % turn
            if skipped < length:
                return index, skipped
            # It lacks `owner`, so the next one further down that has it begins with it.
            index = bisect_left(keys, keys[index] + skipped - turn + 1, 0, index) - 1
        raise LayoutInvariantError(f"owner {owner} of {turn} has no free page")

    def _pop(self, index: int) -> tuple[int, int]:
        """First page and length of the latest run of that key. What is known about the page behind it stays."""
        key = self._keys[index]
        starts = self._starts_of[key]
        start, _ = starts.popitem()
        if not starts:
            del self._starts_of[key], self._keys[index]
        return start, self._length_at.pop(start)

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
        key = length * self._turn + start % self._turn
        if key in self._starts_of:
            self._starts_of[key][start] = None
        else:
            self._starts_of[key] = {start: None}
            insort(self._keys, key)

    def _unfile(self, start: int, length: int) -> None:
        key = length * self._turn + start % self._turn
        starts = self._starts_of[key]
        if len(starts) > 1:
            del starts[start]
        else:
            del self._starts_of[key], self._keys[bisect_left(self._keys, key)]
