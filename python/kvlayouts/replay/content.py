"""KV bytes that give themselves away: what a token's row must hold, computed from its whole prefix.

A row is a function of every token up to and including its own, of the buffer (layer, K or V, index) and of
the seed, so a row that is stale, misplaced, of another layer or of another prompt differs in every word::

    prefix(t)    = sum over i <= t of mix(token[i], i)          mod 2^64
    word(t, b, j) = mix(prefix(t) ^ salt[b]) * odd[b, j]         mod 2^64

`mix` is the finaliser of SplitMix64 (Steele, Lea, Flood 2014), a bijection; multiplying by an odd number is one
too, so two rows of a buffer agree in a word only if their prefix sums do. A DSA index page, which is written
page by page, holds the words of its last token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from sglang.srt.mem_cache.hicache.device.pools import index_buffers, kv_buffers
from sglang.srt.mem_cache.layouts.errors import LayoutConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt
    from sglang.srt.mem_cache.memory_pool import KVCache

    from sglang.srt.mem_cache.layouts.pages import PageArray

Words: TypeAlias = "npt.NDArray[np.uint64]"

_CHUNK_BYTES = 1 << 20  # pages are filled and compared in chunks that stay in the cache of a core


def prefix_sums(tokens: PageArray, seed: int) -> Words:
    """One number a token that depends on the whole prefix: uint64, shape ``[tokens]``."""
    positions = np.arange(len(tokens), dtype=np.uint64)
    salted = tokens.view(np.uint64) ^ _mix(positions + np.uint64(seed))
    sums: Words = np.cumsum(_mix(salted), dtype=np.uint64)
    return sums


def _mix(values: Words) -> Words:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Words = values ^ (values >> np.uint64(31))
    return mixed


class KVContent:
    """Writes and checks the rows of one rank's device pool, by row page.

    Raises `LayoutConfigError` if a row of the pool is no whole number of 8-byte words.
    """

    def __init__(self, device_pool: KVCache, *, page_size: int, seed: int) -> None:
        self._page_size = page_size
        self._buffers: list[tuple[Words, Words, np.uint64]] = []
        generator = np.random.default_rng(seed)
        for buffer in kv_buffers(device_pool):
            self._add(buffer, page_size, generator)
        for buffer in index_buffers(device_pool):
            self._add(buffer, 1, generator)

    def _add(self, buffer: torch.Tensor, rows_per_page: int, generator: np.random.Generator) -> None:
        rows = buffer.reshape(len(buffer), -1).view(torch.uint8).numpy()
        if rows.shape[1] % 8:
            raise LayoutConfigError(f"bytes of a row must be a multiple of 8 to be checked, got {rows.shape[1]}")
        words = rows.view(np.uint64)
        pages = len(words) // rows_per_page
        by_page = words[: pages * rows_per_page].reshape(pages, rows_per_page, words.shape[1])
        odd = generator.integers(0, 2**63, size=(words.shape[1],), dtype=np.uint64) * np.uint64(2) + np.uint64(1)
        self._buffers.append((by_page, odd, generator.integers(0, 2**63, dtype=np.uint64)))

    def write(self, row_pages: PageArray, sums: Words) -> None:
        """Fill `row_pages` in every buffer; `sums` are the prefix sums of their tokens, ``[pages, page_size]``."""
        for pages, expected, by_page in self._chunks(row_pages, sums):
            by_page[pages] = expected

    def mismatched_tokens(self, row_pages: PageArray, sums: Words) -> int:
        """Tokens of `row_pages` whose bytes are wrong in any buffer; a wrong index page counts all its tokens."""
        wrong = np.zeros(sums.shape, dtype=np.bool_)
        at = 0
        for pages, expected, by_page in self._chunks(row_pages, sums):
            found = by_page[pages]
            if not np.array_equal(found, expected):
                wrong[at : at + len(pages)] |= (found != expected).any(axis=2)
            at = (at + len(pages)) % max(len(row_pages), 1)
        return int(np.count_nonzero(wrong))

    def _chunks(self, row_pages: PageArray, sums: Words) -> Iterator[tuple[PageArray, Words, Words]]:
        """Row pages, the words they must hold, and the buffer by page; one buffer after the other."""
        for by_page, odd, salt in self._buffers:
            own = sums if by_page.shape[1] > 1 or self._page_size == 1 else sums[:, -1:]
            step = max(1, _CHUNK_BYTES // (by_page.shape[1] * by_page.shape[2] * 8))
            for start in range(0, len(row_pages), step):
                keys = _mix(own[start : start + step] ^ salt)
                yield row_pages[start : start + step], keys[:, :, None] * odd, by_page
