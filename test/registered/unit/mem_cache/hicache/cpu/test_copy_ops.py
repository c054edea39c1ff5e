from __future__ import annotations

import unittest

import pytest
import torch
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase
from typing_extensions import override

from sglang.srt.mem_cache.hicache.cpu.copy_ops import (
    transfer_kv_all_layer_direct_lf_pf,
    transfer_kv_direct,
    transfer_kv_per_layer_direct_pf_lf,
)

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.float8_e4m3fn)
LAYERS = 3
PAGES = 12
WIDTH = 5  # odd, so that rows do not fill machine words


class TestCopyOperators(CustomTestCase):
    """Every operator against a loop that copies one row at a time."""

    @override
    def setUp(self) -> None:
        super().setUp()
        self.generator = torch.Generator().manual_seed(7)

    def test_layer_first_to_layer_first_copies_exactly_the_named_rows(self) -> None:
        for dtype, page_size, pages in self._cases():
            source = [self._rows(page_size, dtype) for _ in range(LAYERS)]
            target = [self._rows(page_size, dtype) for _ in range(LAYERS)]
            expected = [_raw(layer) for layer in target]
            src, dst = self._slots(page_size, pages)
            for s, d in zip(src.tolist(), dst.tolist(), strict=True):
                for layer in range(LAYERS):
                    expected[layer][d] = _raw(source[layer])[s]
            transfer_kv_direct(
                src_layers=source, dst_layers=target, src_indices=src, dst_indices=dst, page_size=page_size
            )
            for layer in range(LAYERS):
                assert torch.equal(_raw(target[layer]), expected[layer]), (dtype, page_size, pages, layer)

    def test_layer_first_to_page_first_fills_every_layer_of_keys_and_values(self) -> None:
        for dtype, page_size, pages in self._cases():
            source = [self._rows(page_size, dtype) for _ in range(2 * LAYERS)]
            target = [self._blocks(page_size, dtype) for _ in range(2)]
            expected = [_raw(blocks) for blocks in target]
            src, dst = self._slots(page_size, pages)
            for s, d in zip(src.tolist(), dst.tolist(), strict=True):
                for number in range(2):
                    for layer in range(LAYERS):
                        page, row = divmod(d, page_size)
                        expected[number][page, layer, row] = _raw(source[number * LAYERS + layer])[s]
            transfer_kv_all_layer_direct_lf_pf(
                src_ptrs=source, dst_ptrs=target, src_indices=src, dst_indices=dst, page_size=page_size
            )
            for number in range(2):
                assert torch.equal(_raw(target[number]), expected[number]), (dtype, page_size, pages, number)

    def test_page_first_to_layer_first_reads_one_layer_of_each_page(self) -> None:
        for dtype, page_size, pages in self._cases():
            source = [self._blocks(page_size, dtype) for _ in range(2)]
            target = [self._rows(page_size, dtype) for _ in range(2)]
            expected = [_raw(rows) for rows in target]
            src, dst = self._slots(page_size, pages)
            for s, d in zip(src.tolist(), dst.tolist(), strict=True):
                for number in range(2):
                    page, row = divmod(s, page_size)
                    expected[number][d] = _raw(source[number])[page, 1, row]
            transfer_kv_per_layer_direct_pf_lf(
                src_ptrs=source, dst_ptrs=target, src_indices=src, dst_indices=dst, layer_id=1, page_size=page_size
            )
            for number in range(2):
                assert torch.equal(_raw(target[number]), expected[number]), (dtype, page_size, pages, number)

    def test_neighbouring_pages_may_cross_a_gap_on_the_other_side(self) -> None:
        source, target = self._rows(4, torch.float32), self._rows(4, torch.float32)
        src, dst = _tokens([3, 4, 5, 6], 4), _tokens([7, 8, 2, 3], 4)
        transfer_kv_direct([source], [target], src, dst, 4)
        assert torch.equal(_raw(target[dst]), _raw(source[src]))

    def test_rows_after_the_last_whole_page_are_left_alone(self) -> None:
        source, target = self._rows(4, torch.float32), torch.zeros(PAGES * 4 + 3, 1, WIDTH)
        transfer_kv_direct([source], [target], _tokens([PAGES - 1], 4), _tokens([PAGES - 1], 4), 4)
        assert torch.equal(_raw(target[-7:-3]), _raw(source[-4:]))
        assert not target[-3:].any()

    def test_a_page_outside_a_buffer_is_refused_and_nothing_is_written(self) -> None:
        source, target = self._rows(4, torch.float32), self._rows(4, torch.float32)
        before = _raw(target)
        for src, dst in ((PAGES, 1), (1, PAGES), (-1, 1), (1, -1)):
            with pytest.raises(IndexError):
                transfer_kv_direct([source], [target], _tokens([0, src], 4), _tokens([0, dst], 4), 4)
        assert torch.equal(_raw(target), before)

    def test_index_lists_that_do_not_fit_each_other_or_a_page_are_refused(self) -> None:
        source, target = self._rows(4, torch.float32), self._rows(4, torch.float32)
        with pytest.raises(ValueError, match="8 source indices for 4 target indices"):
            transfer_kv_direct([source], [target], _tokens([0, 1], 4), _tokens([0], 4), 4)
        with pytest.raises(ValueError, match="3 indices are no whole number of pages of 4"):
            transfer_kv_direct([source], [target], torch.arange(3), torch.arange(3), 4)
        with pytest.raises(ValueError, match="a source page has 80 bytes, a target page 40"):
            transfer_kv_direct([source], [target.half()], torch.arange(4), torch.arange(4), 4)

    def test_pages_that_start_in_the_middle_or_are_torn_fail_an_assertion(self) -> None:
        source, target = self._rows(4, torch.float32), self._rows(4, torch.float32)
        for slots in (torch.arange(1, 5), torch.tensor([0, 1, 2, 7])):
            with pytest.raises(AssertionError, match="not whole pages of 4"):
                transfer_kv_direct([source], [target], slots, torch.arange(4), 4)

    def _cases(self) -> list[tuple[torch.dtype, int, int]]:
        return [(dtype, page_size, pages) for dtype in DTYPES for page_size in (1, 4) for pages in (0, 1, 7)]

    def _rows(self, page_size: int, dtype: torch.dtype) -> torch.Tensor:
        return self._random((PAGES * page_size, 1, WIDTH), dtype)

    def _blocks(self, page_size: int, dtype: torch.dtype) -> torch.Tensor:
        return self._random((PAGES, LAYERS, page_size, 1, WIDTH), dtype)

    def _random(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        wide = (*shape[:-1], shape[-1] * dtype.itemsize)
        return torch.randint(0, 256, wide, dtype=torch.uint8, generator=self.generator).view(dtype)

    def _slots(self, page_size: int, pages: int) -> tuple[torch.Tensor, torch.Tensor]:
        source, target = (torch.randperm(PAGES, generator=self.generator)[:pages].tolist() for _ in range(2))
        return _tokens(source, page_size), _tokens(target, page_size)


def _tokens(pages: list[int], page_size: int) -> torch.Tensor:
    return (torch.tensor(pages, dtype=torch.int64)[:, None] * page_size + torch.arange(page_size)).reshape(-1)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a copy of `tensor`: NaN compares equal to itself, and no dtype lacks an operation."""
    return tensor.clone().view(torch.uint8)


if __name__ == "__main__":
    unittest.main()
