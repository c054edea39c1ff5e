"""Page and token index arithmetic."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.test.ci.ci_register import register_cpu_ci

from sglang.srt.mem_cache.layouts import LayoutConfigError, LayoutInvariantError
from sglang.srt.mem_cache.layouts.pages import page_array, pages_of_tokens, tokens_of_pages, whole_pages

register_cpu_ci(est_time=5, suite="base-a-test-cpu")


def test_tokens_of_pages_by_hand() -> None:
    tokens = tokens_of_pages(page_array([5, 0, 2]), 4)
    assert tokens.tolist() == [20, 21, 22, 23, 0, 1, 2, 3, 8, 9, 10, 11]
    assert tokens.dtype == torch.int64
    assert tokens.device.type == "cpu"


@given(pages=st.lists(st.integers(0, 1000)), page_size=st.sampled_from([1, 16, 64]))
def test_pages_and_tokens_lead_to_each_other_in_any_order(pages: list[int], page_size: int) -> None:
    tokens = tokens_of_pages(page_array(pages), page_size)
    assert tokens.tolist() == [page * page_size + at for page in pages for at in range(page_size)]
    assert pages_of_tokens(tokens, page_size).tolist() == pages


def test_pages_do_not_keep_the_tokens_alive() -> None:
    for page_size in (1, 16):
        tokens = torch.arange(page_size * 8)
        pages = pages_of_tokens(tokens, page_size)
        tokens.zero_()
        assert pages.tolist() == list(range(8))


def test_tokens_that_are_no_whole_pages_raise_with_both_numbers() -> None:
    with pytest.raises(LayoutInvariantError, match="17 tokens are no whole number of pages of 16"):
        pages_of_tokens(torch.arange(17), 16)
    with pytest.raises(LayoutInvariantError, match="no multiple of page_size 16"):
        pages_of_tokens(torch.arange(1, 33), 16)
    with pytest.raises(LayoutInvariantError, match="no multiple of page_size 16"):
        pages_of_tokens(torch.cat([torch.arange(16), torch.arange(40, 56)]), 16)


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (16, 1), (160, 10)])
def test_whole_pages_counts_pages(tokens: int, pages: int) -> None:
    assert whole_pages(tokens, 16, "split_len") == pages


@pytest.mark.parametrize("tokens", [1, 15, 17, -1, -16])
def test_a_length_that_is_no_multiple_of_a_page_names_the_value_and_the_range(tokens: int) -> None:
    message = f"split_len must be a multiple of page_size 16 and >= 0, got {tokens}"
    with pytest.raises(LayoutConfigError, match=f"^{re.escape(message)}$"):
        whole_pages(tokens, 16, "split_len")


def test_a_page_array_is_a_copy_of_numbers_from_anywhere() -> None:
    source = np.arange(6, dtype=np.int32)
    array = page_array(source[::2])
    assert array.dtype == np.int64
    assert array.base is None
    assert array.tolist() == [0, 2, 4]
    wide = np.arange(3, dtype=np.int64)
    assert not np.shares_memory(page_array(wide), wide)
    assert page_array(range(3)).tolist() == [0, 1, 2]
    assert page_array([]).dtype == np.int64
