"""How a device pool's buffers are addressed by slots.

SGLang's attention indexes KV buffers with slots. Where each rank stores everything, the buffer itself can be indexed
so (`WholePages`). Where pages are shared out, `SharedPages` keeps one *window* of all slots for each kind of buffer
and fills in the pages that the current batch needs::

    rank 0's buffer   p  0  3  6        window on every rank
    rank 1's buffer   p  1  4  7   ──▶  .  .  .  0  1  .  3  4  .  6  ...     pages of the batch only
    rank 2's buffer   p  2  5  8

Each rank puts its own pages into a buffer of zeros, as integers, and the group adds them up: exact for every bit
pattern, of a shape that the host knows, and without asking the device who owns what. A window is filled once a layer
and a batch, and again after a write to that layer. Every rank fills the same pages in the same order. Nobody writes
to a window: what is written to it is lost with the next fill.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from sglang.srt.mem_cache.layouts.errors import LayoutInvariantError

from ..waits import GATHER, BoundedReduction

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.mem_cache.layouts.protocol import AnyKVLayoutStrategy


class PageAccess(Protocol):
    """What a device pool needs to know to be read and written by slot."""

    def rows(self, slots: torch.Tensor) -> torch.Tensor:
        """Rows to write `slots` to, same shape and device; rows of the padding page where others store them.

        Within a batch the values of `slots` must not change: what they are translated to is kept.
        """
        ...

    def wrote(self, kind: str, layer_id: int) -> None:
        """Buffer `kind` of a layer was written: what was read of it before is out of date."""
        ...

    def readable(self, kind: str, layer_id: int, buffer: torch.Tensor, rows_per_page: int) -> torch.Tensor:
        """`buffer`, or a tensor of its dtype and row shape, that can be indexed by slots (or slot pages)."""
        ...

    def readable_rows(self, rows: int) -> int:
        """Rows of what `readable` gives for a buffer of `rows`."""
        ...

    def begin_batch(self, ask_pages: Callable[[], torch.Tensor] | None) -> None:
        """The forward pass that follows reads the logical pages that `ask_pages` gives; None stands for all.

        int64, shape ``[pages]``, on the device. It is called at once, and only if somebody must gather them.
        """
        ...

    def refuse_slots_as_rows(self, method: str) -> None:
        """`LayoutInvariantError` that names the pool's `method`, if what it takes for rows are not its slots."""
        ...


class WholePages:
    """Every rank stores every page: slots are rows and buffers are read in place.

    Shapes, units and errors are those of `PageAccess`.
    """

    def rows(self, slots: torch.Tensor) -> torch.Tensor:
        """The slots themselves."""
        return slots

    def wrote(self, kind: str, layer_id: int) -> None:
        """Nothing is kept that could be out of date."""

    def readable(self, kind: str, layer_id: int, buffer: torch.Tensor, rows_per_page: int) -> torch.Tensor:
        """The buffer itself."""
        return buffer

    def readable_rows(self, rows: int) -> int:
        """As many."""
        return rows

    def begin_batch(self, ask_pages: Callable[[], torch.Tensor] | None) -> None:
        """Every page is at hand."""

    def refuse_slots_as_rows(self, method: str) -> None:
        """A slot is its row."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _BatchPages:
    """Logical pages, their row pages on this rank, both int64 ``[pages]``, and which are not here, ``[pages, 1]``."""

    slot_pages: torch.Tensor
    row_pages: torch.Tensor
    elsewhere: torch.Tensor


class SharedPages:
    """Pages are shared out over `lane_count` ranks; readers get them from `reduce`.

    `reduce` adds an integer tensor up over the shard group, in place, on every rank.
    """

    def __init__(
        self,
        layout: AnyKVLayoutStrategy,
        *,
        page_size: int,
        lane_count: int,
        reduce: Callable[[torch.Tensor], None],
    ) -> None:
        self._layout = layout
        self._page_size = page_size
        self._lane_count = lane_count
        self._reduce = reduce
        self._begun = False
        self._batch: _BatchPages | None = None
        self._written: tuple[torch.Tensor, torch.Tensor] | None = None
        self._windows: dict[str, torch.Tensor] = {}
        self._filled: dict[str, int] = {}
        self.gathered_bytes = 0

    def rows(self, slots: torch.Tensor) -> torch.Tensor:
        """See `PageAccess.rows`. All layers of a batch write to the same slots, so they are translated once."""
        if self._batch is None:
            return self._layout.local_rows(slots)
        if self._written is None or self._written[0] is not slots:
            self._written = (slots, self._layout.local_rows(slots))
        rows = self._written[1]
        if rows.is_cuda:  # SGLang's indexer writes on a stream of its own
            rows.record_stream(torch.cuda.current_stream(rows.device))
        return rows

    def wrote(self, kind: str, layer_id: int) -> None:
        """See `PageAccess.wrote`."""
        if self._filled.get(kind) == layer_id:
            del self._filled[kind]

    def readable_rows(self, rows: int) -> int:
        """See `PageAccess.readable_rows`."""
        return rows * self._lane_count

    def begin_batch(self, ask_pages: Callable[[], torch.Tensor] | None) -> None:
        """See `PageAccess.begin_batch`."""
        self._begun = True
        self._batch = None if ask_pages is None else self._where(ask_pages())
        self._written = None
        self._filled.clear()

    def readable(self, kind: str, layer_id: int, buffer: torch.Tensor, rows_per_page: int) -> torch.Tensor:
        """The window of `kind`, filled with the batch's pages of the layer; see `PageAccess.readable`.

        Every rank of the group must call it in the same order. Other pages of the window hold what earlier
        batches left there; before the first batch, when SGLang warms its kernels up, all are zeros. Raises what the
        process group raises if a rank is gone.
        """
        window = self._window(kind, buffer)
        if self._begun and self._filled.get(kind) != layer_id:
            self._fill(window, buffer, rows_per_page)
            self._filled[kind] = layer_id
        return window

    def refuse_slots_as_rows(self, method: str) -> None:
        """See `PageAccess.refuse_slots_as_rows`: always a `LayoutInvariantError`."""
        raise LayoutInvariantError(f"{method} takes slots for rows, but this rank stores 1 of {self._lane_count} pages")

    def _window(self, kind: str, buffer: torch.Tensor) -> torch.Tensor:
        shape = (self.readable_rows(buffer.shape[0]), *buffer.shape[1:])
        window = self._windows.get(kind)
        if window is None or window.shape != shape:
            window = self._windows[kind] = buffer.new_zeros(shape)
        return window

    def _fill(self, window: torch.Tensor, buffer: torch.Tensor, rows_per_page: int) -> None:
        batch = self._batch
        if batch is None:
            batch = self._where(torch.arange(window.shape[0] // rows_per_page, device=buffer.device))
        sent = as_integer_pages(buffer, rows_per_page)[batch.row_pages]
        sent.masked_fill_(batch.elsewhere, 0)  # the padding page stands for all pages of others
        self._reduce(sent)
        as_integer_pages(window, rows_per_page)[batch.slot_pages] = sent
        self.gathered_bytes += sent.nbytes

    def _where(self, slot_pages: torch.Tensor) -> _BatchPages:
        row_pages = self._layout.local_rows(slot_pages * self._page_size) // self._page_size
        return _BatchPages(slot_pages=slot_pages, row_pages=row_pages, elsewhere=(row_pages == 0).unsqueeze(1))


def as_integer_pages(buffer: torch.Tensor, rows_per_page: int) -> torch.Tensor:
    """A view of the whole pages of a contiguous `buffer` as integers, ``[pages, integers a page]``, int32 or uint8."""
    pages = buffer.shape[0] // rows_per_page
    whole = buffer[: pages * rows_per_page].view(pages, -1)
    row_bytes = whole.shape[1] * whole.element_size()
    return whole.view(torch.int32 if row_bytes % 4 == 0 else torch.uint8)


def group_sum(group: dist.ProcessGroup, *, peer_seconds: float | None = None) -> Callable[[torch.Tensor], None]:
    """Adds a tensor of any shape up over the ranks of `group`, in place.

    On a device it is only submitted, and the watchdogs of SGLang and NCCL look after it. Over gloo this thread waits,
    for `peer_seconds` at most: see `BoundedReduction`.
    """
    if dist.get_backend(group) == dist.Backend.GLOO:
        return BoundedReduction(group, op=dist.ReduceOp.SUM, meeting=GATHER, seconds=peer_seconds)

    def reduce(tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)

    return reduce
