"""How a device pool's buffers are addressed by slots.

SGLang's attention indexes KV buffers with slots. Where each rank stores everything, the buffer itself can be indexed
so (`WholePages`). Where pages are shared out, `SharedPages` keeps one *window* of all slots for each kind of buffer
and fills in the pages that the current batch needs::

    rank 0's buffer   p  0  3  6        window on every rank
    rank 1's buffer   p  1  4  7   ──▶  .  .  .  0  1  .  3  4  .  6  ...     pages of the batch only
    rank 2's buffer   p  2  5  8

Each rank puts its own pages into a buffer of zeros, as integers, and the group adds them up: exact for every bit
pattern, of a shape that the host knows, and without asking the device who owns what. A window is filled once a layer
and a batch, and again after a write to that layer. Every rank fills the same pages in the same order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.mem_cache.layouts.protocol import ShardedPoolLayout


class PageAccess(Protocol):
    """What a device pool needs to know to be read and written by slot."""

    def rows(self, slots: torch.Tensor) -> torch.Tensor:
        """Rows to write `slots` to, same shape and device; rows of the padding page where others store them."""
        ...

    def wrote(self, kind: str, layer_id: int) -> None:
        """Buffer `kind` of a layer was written: what was read of it before is out of date."""
        ...

    def readable(self, kind: str, layer_id: int, buffer: torch.Tensor, rows_per_page: int) -> torch.Tensor:
        """`buffer`, or a tensor of its dtype and row shape, that can be indexed by slots (or slot pages)."""
        ...

    def begin_batch(self, slot_pages: torch.Tensor | None) -> None:
        """The forward pass that follows reads these logical pages, int64, on the device; None stands for all."""
        ...


class WholePages:
    """Every rank stores every page: slots are rows and buffers are read in place."""

    def rows(self, slots: torch.Tensor) -> torch.Tensor:
        """The slots themselves."""
        return slots

    def wrote(self, kind: str, layer_id: int) -> None:
        """Nothing is kept that could be out of date."""

    def readable(self, kind: str, layer_id: int, buffer: torch.Tensor, rows_per_page: int) -> torch.Tensor:
        """The buffer itself."""
        return buffer

    def begin_batch(self, slot_pages: torch.Tensor | None) -> None:
        """Every page is at hand."""


class SharedPages:
    """Pages are shared out over `lane_count` ranks; readers get them from `reduce`.

    `reduce` adds an integer tensor up over the shard group, in place, on every rank.
    """

    def __init__(
        self,
        layout: ShardedPoolLayout,
        *,
        page_size: int,
        lane_count: int,
        reduce: Callable[[torch.Tensor], None],
    ) -> None:
        self._layout = layout
        self._page_size = page_size
        self._lane_count = lane_count
        self._reduce = reduce
        self._batch_pages: torch.Tensor | None = None
        self._windows: dict[str, torch.Tensor] = {}
        self._filled: dict[str, int] = {}
        self.gathered_bytes = 0

    def rows(self, slots: torch.Tensor) -> torch.Tensor:
        """See `PageAccess.rows`."""
        return self._layout.local_rows(slots)

    def wrote(self, kind: str, layer_id: int) -> None:
        """See `PageAccess.wrote`."""
        if self._filled.get(kind) == layer_id:
            del self._filled[kind]

    def begin_batch(self, slot_pages: torch.Tensor | None) -> None:
        """See `PageAccess.begin_batch`."""
        self._batch_pages = slot_pages
        self._filled.clear()

    def readable(self, kind: str, layer_id: int, buffer: torch.Tensor, rows_per_page: int) -> torch.Tensor:
        """The window of `kind`, filled with the batch's pages of the layer; see `PageAccess.readable`.

        Every rank of the group must call it in the same order. Other pages of the window hold what earlier
        batches left there. Raises what the process group raises if a rank is gone.
        """
        window = self._window(kind, buffer)
        if self._filled.get(kind) != layer_id:
            self._fill(window, buffer, rows_per_page)
            self._filled[kind] = layer_id
        return window

    def _window(self, kind: str, buffer: torch.Tensor) -> torch.Tensor:
        window = self._windows.get(kind)
        if window is None:
            window = buffer.new_zeros((buffer.shape[0] * self._lane_count, *buffer.shape[1:]))
            self._windows[kind] = window
        return window

    def _fill(self, window: torch.Tensor, buffer: torch.Tensor, rows_per_page: int) -> None:
        pages = self._batch_pages
        if pages is None:
            pages = torch.arange(window.shape[0] // rows_per_page, device=buffer.device)
        own = self._layout.local_rows(pages * self._page_size) // self._page_size
        sent = as_integer_pages(buffer, rows_per_page)[own]
        sent.masked_fill_((own == 0).unsqueeze(1), 0)  # the padding page stands for all pages of others
        self._reduce(sent)
        as_integer_pages(window, rows_per_page)[pages] = sent
        self.gathered_bytes += sent.nbytes


def as_integer_pages(buffer: torch.Tensor, rows_per_page: int) -> torch.Tensor:
    """A view of a contiguous `buffer` as integers, one row a page; rows beyond the last whole page are left out."""
    pages = buffer.shape[0] // rows_per_page
    whole = buffer[: pages * rows_per_page].view(pages, -1)
    row_bytes = whole.shape[1] * whole.element_size()
    return whole.view(torch.int32 if row_bytes % 4 == 0 else torch.uint8)


def group_sum(group: dist.ProcessGroup) -> Callable[[torch.Tensor], None]:
    """Adds a tensor up over the ranks of `group`, in place."""

    def reduce(tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)

    return reduce
