"""Free host pages of one rank, kept by page in place of the host pool's own list by token.

SGLang's host pools hand out token indices and check each token. Everything here moves in whole pages, so this list
keeps one number a page and does the same for a page that the pool does for its tokens. It takes the pool's place
for every caller: `alloc`, `free`, `available_size` and `clear` of the pool it serves answer from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from sglang.srt.mem_cache.pool_host import HostPoolGroup

from sglang.srt.mem_cache.layouts.errors import LayoutInvariantError
from sglang.srt.mem_cache.layouts.pages import NO_PAGES, PageArray, pages_of_tokens, tokens_of_pages
from sglang.srt.mem_cache.layouts.rounding import ceil_div

from ..slots.page_runs import PageRuns, pages_of_runs, runs_of_pages

if TYPE_CHECKING:
    import torch

    from .pools import AnyHostPool


class HostPages:
    """The free pages of `pool`, all of which must be free now. Handed out in long runs: see `PageRuns`."""

    def __init__(self, pool: AnyHostPool) -> None:
        anchor = pool.anchor_entry.host_pool if isinstance(pool, HostPoolGroup) else pool
        self._page_size = anchor.page_size
        self._total = anchor.page_num
        # One free list, whoever asks: SGLang's metrics read the pool's.
        anchor.alloc = self._alloc_tokens  # type: ignore[method-assign]
        anchor.free = self._free_tokens  # type: ignore[method-assign]
        anchor.available_size = self._available_tokens  # type: ignore[method-assign]
        anchor.clear = self.clear  # type: ignore[method-assign]
        self.clear()

    def clear(self) -> None:
        """Everything is free again."""
        self._runs = PageRuns(self._total)
        self._used = np.zeros(self._total, dtype=np.bool_)

    @property
    def free(self) -> int:
        """Number of free pages."""
        return self._runs.free

    def take(self, pages: int) -> PageArray | None:
        """`pages` free pages, shape ``[pages]``, or None with nothing taken."""
        if pages > self.free:
            return None
        runs = self._runs.take(pages)
        for start, length in runs:
            self._used[start : start + length] = True
        return pages_of_runs(runs)

    def give(self, pages: PageArray) -> None:
        """Take pages back. `LayoutInvariantError`, with nothing changed, if one is not in use or given twice."""
        if not len(pages):
            return
        runs = runs_of_pages(np.sort(pages))
        if (
            runs is None
            or runs[0][0] < 0
            or any(np.count_nonzero(self._used[start : start + n]) != n for start, n in runs)
        ):
            raise LayoutInvariantError(f"host pages {pages} are freed, but one is not in use or comes twice")
        for start, length in runs:
            self._used[start : start + length] = False
            self._runs.give(start, length)

    # As the host pool is called by others.

    def _alloc_tokens(self, need_size: int) -> torch.Tensor | None:
        pages = self.take(ceil_div(need_size, self._page_size))
        return None if pages is None else tokens_of_pages(pages, self._page_size)

    def _free_tokens(self, indices: torch.Tensor) -> int:
        self.give(pages_of_tokens(indices, self._page_size) if len(indices) else NO_PAGES)
        return len(indices)

    def _available_tokens(self) -> int:
        return self.free * self._page_size
