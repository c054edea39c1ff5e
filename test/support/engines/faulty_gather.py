"""A plugin for the negative control: every gather returns one wrong page, the first of the batch.

Installed by a test as an entry point of the group ``sglang.srt.plugins``; SGLang loads it in every scheduler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.hicache.device import page_reader

if TYPE_CHECKING:
    import torch


def register() -> None:
    """Make `SharedPages` put the batch's last page where its first belongs."""
    shared_pages: Any = page_reader.SharedPages
    right = shared_pages.readable

    def wrong(self: Any, kind: str, layer_id: int, buffer: torch.Tensor, rows_per_page: int) -> torch.Tensor:  # noqa: ANN401
        window: torch.Tensor = right(self, kind, layer_id, buffer, rows_per_page)
        if self._batch is None:
            return window
        pages = self._batch.slot_pages  # the fault is meant to be inside
        swapped = window.clone()
        views = (
            page_reader.as_integer_pages(swapped, rows_per_page),
            page_reader.as_integer_pages(window, rows_per_page),
        )
        views[0][pages[0]] = views[1][pages[-1]]
        return swapped

    shared_pages.readable = wrong
