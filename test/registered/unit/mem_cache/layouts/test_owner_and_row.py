"""The slot <-> (owner, row) bijection, against its own picture and against pages dealt out one by one."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.test.ci.ci_register import register_cpu_ci

from sglang.srt.mem_cache.layouts import CpSharedKVLayout, LayoutConfigError, owner_and_row

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

PAGE_SIZES = st.sampled_from([1, 16, 64])
CP_SIZES = st.integers(1, 16)


def _dealt(slots: int, page_size: int, cp_size: int) -> list[tuple[int, int]]:
    """Owner and row of each slot, by dealing page after page to one rank after the other."""
    rows = [0] * cp_size
    result: list[tuple[int, int]] = []
    rank = 0
    while len(result) < slots:
        for _ in range(page_size):
            result.append((rank, rows[rank]))
            rows[rank] += 1
        rank = 0 if rank == cp_size - 1 else rank + 1
    return result[:slots]


def test_the_picture_in_the_docstring_is_true() -> None:
    assert owner_and_row.__doc__ is not None
    columns = {
        row: [int(number) for number in re.findall(r"\d+", line)]
        for row in ("slot", "page", "owner", "row")
        for line in re.findall(rf"^    {row} +(\d.*)$", owner_and_row.__doc__, re.MULTILINE)
    }
    layout = CpSharedKVLayout(page_size=2, cp_size=3)
    slots = np.array(columns["slot"])
    assert slots.tolist() == list(range(14))
    assert columns["page"] == list(range(7))
    assert layout.page_owners(np.array(columns["page"])).tolist() == columns["owner"]
    assert layout.logical_locs_to_physical(slots).tolist() == columns["row"]
    lines = {line.split()[0]: line for line in owner_and_row.__doc__.splitlines() if line.startswith("    ")}
    brace = re.search(r"`-+ reserved -+'", owner_and_row.__doc__)
    assert brace is not None
    start = lines["`---"].index("`")
    above = lines["slot"][start : start + len(brace.group())]
    assert [int(number) for number in re.findall(r"\d+", above)] == list(range(layout.reserved_slots))


def test_pages_are_dealt_to_owners_in_turn_by_hand() -> None:
    layout = CpSharedKVLayout(page_size=4, cp_size=2, cp_rank=1)
    slots = torch.tensor([8, 11, 12, 15, 16, 23, 31])
    assert layout.owner(slots).tolist() == [0, 0, 1, 1, 0, 1, 1]
    assert layout.owned_by_this_rank(slots).tolist() == [False, False, True, True, False, True, True]
    assert layout.logical_locs_to_physical(slots).tolist() == [4, 7, 4, 7, 8, 11, 15]


@given(page_size=PAGE_SIZES, cp_size=CP_SIZES, data=st.data())
def test_torch_and_numpy_agree_with_pages_dealt_one_by_one(page_size: int, cp_size: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, cp_size - 1))
    layout = CpSharedKVLayout(page_size=page_size, cp_size=cp_size, cp_rank=rank)
    count = page_size * cp_size * 3 + page_size // 2
    expected = _dealt(count, page_size, cp_size)
    array, tensor = np.arange(count), torch.arange(count)
    assert layout.owner(array).tolist() == layout.owner(tensor).tolist() == [owner for owner, _ in expected]
    rows = [row for _, row in expected]
    assert layout.logical_locs_to_physical(array).tolist() == rows
    assert layout.logical_locs_to_physical(tensor).tolist() == rows
    mine = [owner == rank for owner, _ in expected]
    assert layout.owned_by_this_rank(array).tolist() == layout.owned_by_this_rank(tensor).tolist() == mine


@given(page_size=PAGE_SIZES, cp_size=CP_SIZES)
def test_owner_and_row_together_lead_back_to_the_slot(page_size: int, cp_size: int) -> None:
    layout = CpSharedKVLayout(page_size=page_size, cp_size=cp_size)
    slots = np.arange(page_size * cp_size * 4)
    owners, rows = layout.owner(slots), layout.logical_locs_to_physical(slots)
    assert len(set(zip(owners.tolist(), rows.tolist(), strict=True))) == len(slots)
    for owner in range(cp_size):
        mine = owners == owner
        assert layout.physical_to_logical(rows[mine], owner).tolist() == slots[mine].tolist()
        assert layout.physical_to_logical(torch.from_numpy(rows[mine]), owner).tolist() == slots[mine].tolist()
        assert sorted(rows[mine].tolist()) == list(range(page_size * 4)), "each rank's rows are filled without a gap"


@given(page_size=PAGE_SIZES, cp_size=CP_SIZES)
def test_page_arithmetic_agrees_with_token_arithmetic(page_size: int, cp_size: int) -> None:
    layout = CpSharedKVLayout(page_size=page_size, cp_size=cp_size)
    pages = np.arange(cp_size * 5)
    firsts = pages * page_size
    assert layout.page_owners(pages).tolist() == layout.owner(firsts).tolist()
    assert (layout.row_pages(pages) * page_size).tolist() == layout.logical_locs_to_physical(firsts).tolist()
    for owner in range(cp_size):
        mine = pages[layout.page_owners(pages) == owner]
        assert layout.pages_of_rows(layout.row_pages(mine), owner).tolist() == mine.tolist()


@given(page_size=PAGE_SIZES, cp_size=CP_SIZES)
def test_the_reserved_pages_are_row_page_zero_of_each_rank(page_size: int, cp_size: int) -> None:
    layout = CpSharedKVLayout(page_size=page_size, cp_size=cp_size)
    padding = {int(layout.pages_of_rows(np.zeros(1, dtype=np.int64), owner)[0]) for owner in range(cp_size)}
    assert padding == set(range(layout.reserved_pages))
    assert layout.reserved_slots == layout.reserved_pages * page_size
    layout.check_slot_pages(np.array([layout.reserved_pages, 10_000]))
    with pytest.raises(LayoutConfigError, match=rf"slot page must be >= {cp_size} .*got {cp_size - 1}"):
        layout.check_slot_pages(np.array([10_000, layout.reserved_pages - 1]))


def test_results_have_the_kind_the_shape_and_the_dtype_of_the_input() -> None:
    layout = CpSharedKVLayout(page_size=2, cp_size=3)
    tensor = torch.arange(12).reshape(3, 4)
    for result in (
        layout.owner(tensor),
        layout.logical_locs_to_physical(tensor),
        layout.physical_to_logical(tensor, 1),
    ):
        assert result.shape == (3, 4)
        assert result.dtype == torch.int64
    array = np.arange(12, dtype=np.int64).reshape(3, 4)
    for converted in (
        layout.owner(array),
        layout.logical_locs_to_physical(array),
        layout.physical_to_logical(array, 1),
    ):
        assert isinstance(converted, np.ndarray)
        assert converted.shape == (3, 4)
        assert converted.dtype == np.int64
    assert layout.owned_by_this_rank(tensor).dtype == torch.bool
    assert layout.page_owners(np.arange(4)).dtype == np.int16


def test_empty_inputs_give_empty_results() -> None:
    layout = CpSharedKVLayout(page_size=16, cp_size=4)
    layout.check_slot_pages(np.empty(0, dtype=np.int64))
    assert layout.owner(torch.empty(0, dtype=torch.int64)).numel() == 0
    assert layout.row_pages(np.empty(0, dtype=np.int64)).size == 0


@pytest.mark.parametrize(
    ("page_size", "cp_size", "cp_rank", "message"),
    [
        (0, 2, 0, "page_size must be >= 1, got 0"),
        (-16, 2, 0, "page_size must be >= 1, got -16"),
        (16, 0, 0, "cp_size must be in [1, 32767], got 0"),
        (16, 32_768, 0, "cp_size must be in [1, 32767], got 32768"),
        (16, 4, 4, "cp_rank must be in [0, 3], got 4"),
        (16, 4, -1, "cp_rank must be in [0, 3], got -1"),
    ],
)
def test_an_impossible_geometry_names_the_value_and_the_range(
    page_size: int, cp_size: int, cp_rank: int, message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        CpSharedKVLayout(page_size=page_size, cp_size=cp_size, cp_rank=cp_rank)


@pytest.mark.parametrize("owner", [-1, 4])
def test_an_owner_outside_the_group_names_the_value_and_the_range(owner: int) -> None:
    layout = CpSharedKVLayout(page_size=16, cp_size=4)
    message = re.escape(f"owner must be in [0, 3], got {owner}")
    with pytest.raises(ValueError, match=message):
        layout.physical_to_logical(torch.arange(4), owner)
    with pytest.raises(ValueError, match=message):
        layout.pages_of_rows(np.arange(4), owner)


def test_the_largest_group_keeps_every_owner_in_an_int16() -> None:
    layout = CpSharedKVLayout(page_size=1, cp_size=32_767)
    assert layout.page_owners(np.array([32_766, 32_767])).tolist() == [32_766, 0]
