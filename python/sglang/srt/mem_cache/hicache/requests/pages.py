"""Host mirror of the slots of running requests, so that nobody has to ask the device which pages a request has.

SGLang keeps a request's slots in its row of ``req_to_token``, on the device. Nothing in that row is news to the host::

    row     0 ······· cache_protected_len ······· kv_allocated_len
            │  the tree's  │         the request's own         │
    pages   slot_pages of the nodes    recorded when the slots
            down to `last_node`        were allocated

`RequestPages` keeps the right half, by row. It learns of every allocation (`record`), of every part that SGLang gives
back (`take`: a view of the row says by its place in memory which part it is), and of what the tree took over
(`keep_from`). Where it cannot know, it says so (None); the caller then reads the device, which is counted, and
what was read corrects the mirror (`forget`). It never guesses: a row that changed behind its back is unknown.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from sglang.srt.mem_cache.layouts.rounding import ceil_div

from ..tree.node import LayoutTreeNode

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.schedule_batch import ReqKvInfo
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    from sglang.srt.mem_cache.layouts.pages import PageArray

logger = logging.getLogger(__name__)

_GONE = -1  # a page that the request has given back


class _HeldPages:
    """Pages ``first .. end`` of one row, one number each, `_GONE` where they were given back."""

    __slots__ = ("_count", "_pages", "first")

    def __init__(self, first: int) -> None:
        self.first = first
        self._pages = np.empty(8, dtype=np.int64)
        self._count = 0

    @property
    def end(self) -> int:
        return self.first + self._count

    def part(self, first: int, end: int) -> PageArray:
        """A view of pages ``first .. end`` of the row, as far as they are kept here."""
        return self._pages[max(first - self.first, 0) : max(min(end, self.end) - self.first, 0)]

    def append(self, pages: PageArray) -> None:
        needed = self._count + len(pages)
        if needed > len(self._pages):
            self._pages = np.concatenate([self._pages[: self._count], np.empty(2 * needed, dtype=np.int64)])
        self._pages[self._count : needed] = pages
        self._count = needed

    def keep_from(self, page: int) -> None:
        kept = self.part(page, self.end).copy()
        self.first, self._count = page, 0
        self.append(kept)

    def keep_until(self, page: int) -> None:
        self._count = max(min(page, self.end) - self.first, 0)


class RequestPages:
    """Logical pages that requests hold and the tree does not, by row of `pool`. `reads` counts what was not known."""

    def __init__(self, pool: ReqToTokenPool, page_size: int) -> None:
        self._pool = pool
        self._page_size = page_size
        self._rows: dict[int, _HeldPages] = {}
        self.reads = 0

    @property
    def held_pages(self) -> int:
        """Pages that requests hold, as far as they are known."""
        return sum(int((held.part(held.first, held.end) != _GONE).sum()) for held in self._rows.values())

    def clear(self) -> None:
        """No request runs any more."""
        self._rows.clear()

    # Requests grow.

    def record(self, row: int, first_page: int, pages: PageArray, *, begins: bool) -> None:
        """Slots of `pages` were allocated for pages ``first_page ..`` of `row`; `begins` if it was nobody's before."""
        if begins:
            self._rows[row] = _HeldPages(first_page)
        held = self._rows.get(row)
        if held is None:
            return
        if held.end > first_page and bool((held.part(first_page, held.end) == _GONE).all()):
            held.keep_until(first_page)
        if held.end != first_page:
            del self._rows[row]
            return
        held.append(pages)

    # Requests are put into the tree.

    def of(self, kv: ReqKvInfo, last_node: object, tokens: int) -> PageArray | None:
        """Whole pages of the first `tokens` slots of a request; None if they are not known.

        `kv` and `last_node` are SGLang's, of the request: its row, and the node down to which the tree has its slots.
        """
        protected, pages = kv.cache_protected_len // self._page_size, tokens // self._page_size
        held = None if kv.req_pool_idx is None else self._rows.get(kv.req_pool_idx)
        above = _pages_down_to(last_node)
        if held is None or above is None or sum(map(len, above)) != protected or held.first != protected:
            return None
        own = held.part(protected, pages)
        if protected + len(own) < pages or bool((own == _GONE).any()):
            return None
        return np.concatenate([*above, own])[:pages]

    def keep_from(self, row: int, page: int) -> None:
        """The tree has what lies before page `page` of `row`, or has it no more; the request has the rest."""
        held = self._rows.get(row)
        if held is not None and page >= held.first:
            held.keep_from(page)
        else:
            self._rows.pop(row, None)

    def end(self, row: int, page: int) -> None:
        """As `keep_from`, for a request that has ended: what is left is what was allocated for it in advance."""
        self.keep_from(row, page)
        held = self._rows.get(row)
        if held is not None and held.end == held.first:
            del self._rows[row]

    # Requests give slots back.

    def take(self, slots: torch.Tensor) -> PageArray | None:
        """The pages in which `slots`, shape ``[tokens]``, lie; they are the caller's then.

        None, with nothing taken, if `slots` are no part of a row that is known.
        """
        place = self._place(slots)
        held = None if place is None else self._rows.get(place[0])
        if place is None or held is None:
            return None
        first, end = place[1] // self._page_size, ceil_div(place[1] + len(slots), self._page_size)
        own = held.part(first, end)
        if first < held.first or len(own) < end - first or bool((own == _GONE).any()):
            return None
        taken = own.copy()
        own[:] = _GONE
        return taken

    def forget(self, pages: PageArray) -> None:
        """`pages` were given back, it is not known from which rows: those that have one of them are unknown now."""
        self._rows = {
            row: held
            for row, held in self._rows.items()
            if not bool(np.isin(held.part(held.first, held.end), pages).any())
        }

    def count_read(self, what: str) -> None:
        """`what` was not known, and is read from the device, which waits for it. The first time is logged."""
        self.reads += 1
        if self.reads == 1:
            logger.warning(
                "KV layout: %s had to be read from the device, which waits for it; "
                "sglang:kv_layout_page_reads_total counts how often",
                what,
            )

    def _place(self, slots: torch.Tensor) -> tuple[int, int] | None:
        """Row and position of a view of ``req_to_token[row, position : ...]``; None for any other tensor."""
        table = self._pool.req_to_token
        if slots.dim() != 1 or slots.dtype != table.dtype or (len(slots) > 1 and slots.stride(0) != 1):
            return None
        if slots.untyped_storage().data_ptr() != table.untyped_storage().data_ptr():
            return None
        return divmod(int(slots.storage_offset()) - int(table.storage_offset()), int(table.stride(0)))


def _pages_down_to(node: object) -> list[PageArray] | None:
    """Slot pages of a node of ours and of all above it, the root's side first; None for anything else."""
    parts: list[PageArray] = []
    while isinstance(node, LayoutTreeNode):
        if node.parent is None:
            return parts[::-1]
        parts.append(node.slot_pages)
        node = node.parent
    return None
