"""What a rank stores of some pages: its rows, and which of their tokens they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.mem_cache.layouts.facts import page_rows
from sglang.srt.mem_cache.layouts.pages import tokens_of_pages

if TYPE_CHECKING:
    from kvlayouts.replay.content import Words
    from sglang.srt.mem_cache.layouts import AnyKVLayoutStrategy
    from sglang.srt.mem_cache.layouts.pages import PageArray


def stored_rows(layout: AnyKVLayoutStrategy, slot_pages: PageArray, tokens: Words) -> tuple[PageArray, Words]:
    """Row pages of this rank that hold anything of `slot_pages`, and the numbers of their tokens.

    `tokens` has a number for each token, ``[pages, page_size]``; the answer's are ``[row pages, rows a page]``.
    """
    rows_a_page = page_rows(layout)
    rows = layout.local_rows(tokens_of_pages(slot_pages, layout.page_size)).numpy()
    here = rows >= rows_a_page  # the others are rows of the padding page
    return rows[here][::rows_a_page] // rows_a_page, tokens.reshape(-1)[here].reshape(-1, rows_a_page)
