"""The bytes that a replay writes and expects: unlike for whatever could be mistaken, and counted token by token."""

from __future__ import annotations

import unittest
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase
from typing_extensions import override

from kvlayouts.replay import content
from kvlayouts.replay.content import KVContent, prefix_sums
from sglang.srt.mem_cache.hicache.device.pools import (
    DsaGeometry,
    Geometry,
    MhaGeometry,
    MlaGeometry,
    build_device_pool,
    index_buffers,
    kv_buffers,
)
from sglang.srt.mem_cache.hicache.runtime import standalone_runtime
from sglang.srt.mem_cache.layouts import LayoutConfigError, PoolKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt
    from sglang.srt.mem_cache.memory_pool import KVCache

    from sglang.srt.mem_cache.layouts.pages import PageArray

    Words = npt.NDArray[np.uint64]

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

LAYERS = 2
GEOMETRIES: dict[PoolKind, Geometry] = {
    PoolKind.MHA: MhaGeometry(heads=2, head_dim=8),
    PoolKind.MLA: MlaGeometry(kv_lora_rank=16, qk_rope_head_dim=8),
    PoolKind.DSA: DsaGeometry(kv_lora_rank=16, qk_rope_head_dim=8),
}
PAGE_SIZES = {PoolKind.MHA: 4, PoolKind.MLA: 8, PoolKind.DSA: 64}


class TestPrefixSums(CustomTestCase):
    def test_they_depend_on_every_token_before_and_on_none_after(self) -> None:
        tokens = np.arange(100, 164, dtype=np.int64)
        sums = prefix_sums(tokens, seed=0)
        for at in (0, 1, 30, 63):
            changed = tokens.copy()
            changed[at] += 1
            other = prefix_sums(changed, seed=0)
            self.assertTrue(np.array_equal(other[:at], sums[:at]))
            self.assertTrue((other[at:] != sums[at:]).all())
        self.assertTrue(np.array_equal(prefix_sums(tokens[:40], seed=0), sums[:40]))

    def test_they_depend_on_the_order_of_the_tokens_on_their_position_and_on_the_seed(self) -> None:
        tokens = np.array([5, 9, 7, 7, 7, 7], dtype=np.int64)
        sums = prefix_sums(tokens, seed=0)
        swapped = prefix_sums(np.array([9, 5, 7, 7, 7, 7], dtype=np.int64), seed=0)
        self.assertTrue((swapped != sums).all())
        self.assertEqual(len(set(sums.tolist())), len(tokens))
        self.assertEqual(len(set(np.diff(sums).tolist())), len(tokens) - 1, "equal tokens add the same everywhere")
        self.assertTrue((prefix_sums(tokens, seed=1) != sums).all())


class ContentTestCase(CustomTestCase):
    """A pool of each kind on the CPU, with its buffers as words."""

    @classmethod
    @override
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.enterClassContext(standalone_runtime(page_size=4))


class TestKVContent(ContentTestCase):
    def test_every_word_differs_for_another_prefix_layer_buffer_position_and_seed(self) -> None:
        for kind in GEOMETRIES:
            with self.subTest(pool=kind):
                size = PAGE_SIZES[kind]
                tokens = np.full(size, 7, dtype=np.int64)  # equal tokens: only their positions differ
                written = _page_words(kind, tokens)
                self.assertEqual(len(written), LAYERS * (1 if kind is PoolKind.MLA else 2))
                for words in written:
                    self.assertEqual(len(set(words.ravel().tolist())), words.size, "two words of a buffer are equal")
                for number, words in enumerate(written):
                    for other in written[number + 1 :]:
                        self.assertFalse(set(words.ravel().tolist()) & set(other.ravel().tolist()))
                changed = tokens.copy()
                changed[0] = 8
                for other_run in (_page_words(kind, changed), _page_words(kind, tokens, seed=1)):
                    for words, other in zip(written, other_run, strict=True):
                        self.assertTrue((words != other).all())

    def test_content_is_a_function_of_the_prompt_and_not_of_the_row_or_the_size_of_the_pool(self) -> None:
        for kind in GEOMETRIES:
            with self.subTest(pool=kind):
                tokens = np.arange(PAGE_SIZES[kind], dtype=np.int64)
                here = _page_words(kind, tokens, pages=3, row_page=1)
                there = _page_words(kind, tokens, pages=9, row_page=7)
                for words, other in zip(here, there, strict=True):
                    self.assertTrue(np.array_equal(words, other))

    def test_only_the_pages_named_are_written(self) -> None:
        for kind in GEOMETRIES:
            with self.subTest(pool=kind):
                pool, kv = _pool(kind, pages=5)
                kv.write(np.array([4, 2]), _sums(kind, pages=2))
                for words in _words(pool):
                    self.assertEqual([bool(page.any()) for page in words], [False, False, True, False, True, False])

    def test_a_page_is_wrong_if_the_last_token_of_a_padded_prompt_is(self) -> None:
        """A partial page at the end is padded with its last token's sums, as a replay does it."""
        size = PAGE_SIZES[PoolKind.DSA]
        pool, kv = _pool(PoolKind.DSA, pages=2)
        sums = prefix_sums(np.arange(size - 10, dtype=np.int64), seed=0)
        padded = np.pad(sums, (0, 10), mode="edge").reshape(1, size)
        kv.write(np.array([1]), padded)
        self.assertEqual(kv.mismatched_tokens(np.array([1]), padded), 0)
        rows = _words(pool)[0][1]
        self.assertTrue((rows[size - 11 :] == rows[size - 11]).all())
        self.assertEqual(len({row.tobytes() for row in rows}), size - 10)
        longer = np.pad(prefix_sums(np.arange(size - 9, dtype=np.int64), seed=0), (0, 9), mode="edge").reshape(1, size)
        self.assertEqual(kv.mismatched_tokens(np.array([1]), longer), size, "the index page stands for the last token")

    def test_rows_that_are_no_whole_words_are_refused(self) -> None:
        pool = build_device_pool(
            PoolKind.MLA,
            tokens=8,
            page_size=4,
            layers=1,
            geometry=MlaGeometry(kv_lora_rank=4, qk_rope_head_dim=2),
        )
        with self.assertRaisesRegex(LayoutConfigError, "multiple of 8 to be checked, got 12"):
            KVContent(pool, page_size=4, seed=0)


class TestMismatchedTokens(ContentTestCase):
    def test_a_single_wrong_byte_anywhere_in_a_row_is_one_wrong_token(self) -> None:
        for kind in GEOMETRIES:
            pool, kv = _pool(kind, pages=5)
            row_pages, sums = np.array([5, 2, 3]), _sums(kind, pages=3)
            kv.write(row_pages, sums)
            self.assertEqual(kv.mismatched_tokens(row_pages, sums), 0)
            for number, buffer in enumerate(kv_buffers(pool)):
                rows = _bytes(buffer)
                for row, column in ((2 * PAGE_SIZES[kind], 0), (3 * PAGE_SIZES[kind] + 3, -1)):
                    with self.subTest(pool=kind, buffer=number, row=row), _flipped(rows, row, column):
                        self.assertEqual(kv.mismatched_tokens(row_pages, sums), 1)
                        self.assertEqual(kv.mismatched_tokens(np.array([5]), sums[:1]), 0)
            self.assertEqual(kv.mismatched_tokens(row_pages, sums), 0)

    def test_a_single_wrong_byte_in_an_index_page_is_a_page_of_wrong_tokens(self) -> None:
        pool, kv = _pool(PoolKind.DSA, pages=4)
        row_pages, sums = np.array([1, 4]), _sums(PoolKind.DSA, pages=2)
        kv.write(row_pages, sums)
        self.assertEqual(len(index_buffers(pool)), LAYERS)
        for buffer in index_buffers(pool):
            for page, column in ((1, 0), (4, -1)):
                with _flipped(_bytes(buffer), page, column):
                    self.assertEqual(kv.mismatched_tokens(row_pages, sums), 64)

    def test_a_token_that_is_wrong_in_several_buffers_counts_once_and_others_add_up(self) -> None:
        pool, kv = _pool(PoolKind.MHA, pages=4)
        row_pages, sums = np.array([1, 4, 2]), _sums(PoolKind.MHA, pages=3)
        kv.write(row_pages, sums)
        buffers = [_bytes(buffer) for buffer in kv_buffers(pool)]
        for buffer in buffers:
            buffer[4 * 4 + 1] ^= 1
        self.assertEqual(kv.mismatched_tokens(row_pages, sums), 1)
        buffers[-1][2 * 4] ^= 1
        self.assertEqual(kv.mismatched_tokens(row_pages, sums), 2)
        buffers[0][4 * 4 : 4 * 4 + 4] ^= 1  # the same page, all but token 1 now; token 1 is right again in buffer 0
        self.assertEqual(kv.mismatched_tokens(row_pages, sums), 5)

    def test_two_pages_in_each_others_place_are_wrong_in_all_their_tokens(self) -> None:
        for kind in GEOMETRIES:
            with self.subTest(pool=kind):
                _, kv = _pool(kind, pages=4)
                sums = _sums(kind, pages=3)
                kv.write(np.array([1, 2, 3]), sums)
                self.assertEqual(kv.mismatched_tokens(np.array([2, 1, 3]), sums), 2 * PAGE_SIZES[kind])
                self.assertEqual(kv.mismatched_tokens(np.array([4]), sums[:1]), PAGE_SIZES[kind], "never written")

    def test_long_prompts_are_written_and_checked_in_chunks_with_the_same_result(self) -> None:
        chunk_bytes = content._CHUNK_BYTES  # noqa: SLF001  # so small that a chunk is one, two or three pages
        try:
            for small in (1, 1_000, 2_000):
                content._CHUNK_BYTES = small  # noqa: SLF001
                pool, kv = _pool(PoolKind.MLA, pages=9)
                row_pages, sums = np.array([9, 1, 3, 4, 8, 2, 7]), _sums(PoolKind.MLA, pages=7)
                kv.write(row_pages, sums)
                content._CHUNK_BYTES = chunk_bytes  # noqa: SLF001
                self.assertEqual(kv.mismatched_tokens(row_pages, sums), 0)
                content._CHUNK_BYTES = small  # noqa: SLF001
                buffers = [_bytes(buffer) for buffer in kv_buffers(pool)]
                for number, (page, token) in enumerate(((1, 5), (8, 5), (8, 6), (7, 5))):
                    buffers[number % LAYERS][page * 8 + token, 0] ^= 1
                self.assertEqual(kv.mismatched_tokens(row_pages, sums), 4)
                buffers[1][1 * 8 + 5, 0] ^= 1  # wrong in both layers now
                self.assertEqual(kv.mismatched_tokens(row_pages, sums), 4)
        finally:
            content._CHUNK_BYTES = chunk_bytes  # noqa: SLF001

    def test_no_pages_hold_no_wrong_tokens(self) -> None:
        _, kv = _pool(PoolKind.MLA, pages=2)
        none = np.empty(0, dtype=np.int64)
        kv.write(none, _sums(PoolKind.MLA, pages=0))
        self.assertEqual(kv.mismatched_tokens(none, _sums(PoolKind.MLA, pages=0)), 0)


def _pool(kind: PoolKind, *, pages: int, seed: int = 0) -> tuple[KVCache, KVContent]:
    size = PAGE_SIZES[kind]
    pool = build_device_pool(kind, tokens=pages * size, page_size=size, layers=LAYERS, geometry=GEOMETRIES[kind])
    return pool, KVContent(pool, page_size=size, seed=seed)


def _sums(kind: PoolKind, *, pages: int) -> Words:
    size = PAGE_SIZES[kind]
    return prefix_sums(np.arange(pages * size, dtype=np.int64), seed=3).reshape(pages, size)


def _page_words(kind: PoolKind, tokens: PageArray, *, seed: int = 0, pages: int = 2, row_page: int = 1) -> list[Words]:
    """The words of one page in every buffer, ``[rows, words of a row]``, after `tokens` were written to it."""
    pool, kv = _pool(kind, pages=pages, seed=seed)
    kv.write(np.array([row_page]), prefix_sums(tokens, seed=0).reshape(1, -1))
    return [words[row_page] for words in _words(pool)]


def _words(pool: KVCache) -> list[Words]:
    """Every buffer as ``[pages, rows of a page, words of a row]``; an index page is one row."""
    by_token = [_bytes(buffer).view(np.uint64) for buffer in kv_buffers(pool)]
    by_page = [_bytes(buffer).view(np.uint64) for buffer in index_buffers(pool)]
    pages = len(by_token[0]) // pool.page_size
    return [words.reshape(pages, -1, words.shape[1]) for words in (*by_token, *by_page)]


def _bytes(buffer: torch.Tensor) -> npt.NDArray[np.uint8]:
    """A view of a buffer, ``[rows, bytes of a row]``."""
    rows: npt.NDArray[np.uint8] = buffer.reshape(len(buffer), -1).view(torch.uint8).numpy()
    return rows


@contextmanager
def _flipped(rows: npt.NDArray[np.uint8], row: int, column: int) -> Iterator[None]:
    """One bit of a byte is wrong within the context."""
    rows[row, column] ^= 0x10
    yield
    rows[row, column] ^= 0x10


if __name__ == "__main__":
    unittest.main()
