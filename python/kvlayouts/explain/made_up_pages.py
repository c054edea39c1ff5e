"""Made-up free lists for an explanation: slot pages by lane, as a strategy deals them, and host pages of a rank.

They hand out the lowest page first, as the allocators do. Without a seed all pages are free; with one a random half of
twice as many is, so that neighbours are rare and copies fall into runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from sglang.srt.mem_cache.layouts.errors import LayoutInvariantError

if TYPE_CHECKING:
    from sglang.srt.mem_cache.layouts.pages import LaneArray, PageArray
    from sglang.srt.mem_cache.layouts.protocol import AnyKVLayoutStrategy

WIDENINGS: Final = 4


class SlotPages:
    """Free slot pages of every lane, enough to place a node of `pages` pages twice, in any lanes."""

    def __init__(self, layout: AnyKVLayoutStrategy, *, pages: int, seed: int | None) -> None:
        self._layout = layout
        self._generator = None if seed is None else np.random.default_rng(seed)
        self._supply = 2 * pages * (1 if seed is None else 2) + layout.lane_count
        self._next = layout.lane_count  # the pages below are SGLang's padding
        self._free: list[PageArray] = [np.empty(0, dtype=np.int64) for _ in range(layout.lane_count)]

    def take(self, lanes: LaneArray) -> PageArray:
        """One free slot page for each entry of `lanes`. Raises `LayoutInvariantError` if a lane has no pages."""
        needed = np.bincount(lanes, minlength=self._layout.lane_count)
        for _ in range(WIDENINGS * self._layout.lane_count):
            short = [lane for lane, pages in enumerate(needed.tolist()) if pages > len(self._free[lane])]
            if not short:
                break
            self._widen()
        else:
            raise LayoutInvariantError(f"no slot page below {self._next} lies in lane {short[0]}")
        taken = np.empty(len(lanes), dtype=np.int64)
        for lane, pages in enumerate(needed.tolist()):
            taken[lanes == lane], self._free[lane] = self._free[lane][:pages], self._free[lane][pages:]
        return taken

    def _widen(self) -> None:
        pages = np.arange(self._next, self._next + self._supply, dtype=np.int64)
        self._next += self._supply
        if self._generator is not None:
            pages = np.sort(self._generator.choice(pages, size=len(pages) // 2, replace=False))
        lanes = self._layout.lanes_of(pages)
        self._free = [np.concatenate([free, pages[lanes == lane]]) for lane, free in enumerate(self._free)]


class HostPages:
    """Free host pages of one rank; ranks differ where there is a seed."""

    def __init__(self, *, pages: int, seed: int | None, rank: int) -> None:
        self._free: PageArray = np.arange(pages, dtype=np.int64)
        if seed is not None:
            generator = np.random.default_rng([seed, rank])
            self._free = np.sort(generator.choice(2 * pages, size=pages, replace=False)).astype(np.int64)

    def take(self, pages: int) -> PageArray:
        """The lowest free pages."""
        taken, self._free = self._free[:pages], self._free[pages:]
        return taken
