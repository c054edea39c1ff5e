"""`CpSharedLayout` by hand: the node in the module's picture, on all three ranks; and how chains are spread."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.test.ci.ci_register import register_cpu_ci

from sglang.srt.mem_cache.layouts import (
    CopyRun,
    CpHiCacheNodeMetadata,
    CpSharedLayout,
    LayoutConfigError,
    LayoutInvariantError,
    cp_shared,
)
from sglang.srt.mem_cache.layouts.pages import page_array
from sglang.srt.mem_cache.layouts.testing_metadata import stored_arrays

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

# Three ranks, two tokens a page, slot pages 4 .. 8: owners 1 2 0 1 2, row pages 1 1 2 2 2.
SLOT_PAGES = page_array([4, 5, 6, 7, 8])
LANES = [1, 2, 0, 1, 2]
ROW_PAGES = ([2], [1, 2], [1, 2])
HOST_PAGES = ([17], [40, 41], [8, 3])


def _make_layout(rank: int, cp_size: int = 3, page_size: int = 2) -> CpSharedLayout:
    return CpSharedLayout(page_size=page_size, shard_size=cp_size, shard_rank=rank)


def _make_node(rank: int) -> CpHiCacheNodeMetadata:
    layout = _make_layout(rank)
    return layout.finish_backup(layout.plan_backup(SLOT_PAGES), page_array(HOST_PAGES[rank]))


def test_the_picture_in_the_docstring_is_true() -> None:
    assert cp_shared.__doc__ is not None
    lines = {line.split("  ")[2]: line for line in cp_shared.__doc__.splitlines() if line.startswith("    ")}
    columns = [match.start() for match in re.finditer(r"\d", lines["page of the node"])]
    numbers = re.findall(r"\d", lines["lane (owner)"])
    assert [int(number) for number in numbers] == LANES
    for rank in range(3):
        cells = list(re.compile(r"\d+").finditer(lines[f"host page on rank {rank}"], columns[0]))
        node = _make_node(rank)
        assert [int(cell.group()) for cell in cells] == node.host_pages.tolist()
        assert [columns.index(cell.start()) for cell in cells] == node.owned_page_positions.tolist()


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_backup_copies_only_the_pages_of_this_rank(rank: int) -> None:
    plan = _make_layout(rank).plan_backup(SLOT_PAGES)
    assert plan.lanes.tolist() == LANES
    assert plan.demand_pages == (1, 2, 2)
    assert plan.logical_tokens == 10
    assert plan.device_pages.tolist() == ROW_PAGES[rank]


def test_neighbours_on_one_rank_are_one_run_although_they_are_apart_in_the_node() -> None:
    plan = _make_layout(1).plan_backup(SLOT_PAGES)
    assert list(plan.bind(page_array([40, 41])).runs()) == [CopyRun(host_page=40, device_page=1, pages=2)]


@pytest.mark.parametrize(
    ("rank", "positions", "host_indices"),
    [
        (0, [4, 5], [34, 35]),
        (1, [0, 1, 6, 7], [80, 81, 82, 83]),
        (2, [2, 3, 8, 9], [16, 17, 6, 7]),
    ],
)
def test_metadata_names_the_owned_tokens_and_their_host_slots(
    rank: int, positions: list[int], host_indices: list[int]
) -> None:
    node = _make_node(rank)
    assert node.logical_len == 10
    assert node.owned_positions.tolist() == positions
    assert node.host_indices.tolist() == host_indices
    assert node.pages_per_lane == (1, 2, 2)
    assert node.legacy_host_value is None


def test_metadata_costs_two_bytes_a_page_and_eight_an_owned_page() -> None:
    arrays = [stored_arrays(_make_node(rank)) for rank in range(3)]
    assert [sum(array.nbytes for array in stored) for stored in arrays] == [10 + 8, 10 + 16, 10 + 16]


@pytest.mark.parametrize(
    ("rank", "host_pages", "row_pages"),
    [(0, [17], [3]), (1, [40, 41], [3, 1]), (2, [8, 3], [4, 3])],
)
def test_a_load_copies_to_the_rows_of_new_slots_in_the_same_lanes(
    rank: int, host_pages: list[int], row_pages: list[int]
) -> None:
    layout = _make_layout(rank)
    first, second = _make_node(rank).split(4)
    assert layout.load_lanes([first, second]).tolist() == LANES
    plan = layout.plan_load([first, second], page_array([10, 14, 9, 4, 11]))
    assert plan.logical_pages == 5
    assert plan.logical_tokens == 10
    assert plan.copies.host_pages().tolist() == host_pages
    assert plan.copies.device_pages().tolist() == row_pages


def test_new_slots_in_other_lanes_are_refused_with_both_patterns() -> None:
    with pytest.raises(LayoutInvariantError, match=r"lanes \[1 2 0 2 1\], the backup in lanes \[1 2 0 1 2\]"):
        _make_layout(0).plan_load([_make_node(0)], page_array([10, 14, 9, 11, 4]))


def test_host_pages_that_do_not_match_the_owned_pages_are_refused_with_both_numbers() -> None:
    layout = _make_layout(1)
    with pytest.raises(LayoutInvariantError, match="rank 1 owns 2 pages of the node but holds 3 host pages"):
        layout.finish_backup(layout.plan_backup(SLOT_PAGES), page_array([1, 2, 3]))


def test_reserved_pages_are_refused() -> None:
    for page in (0, 1, 2):
        message = rf"slot page must be >= 3 .*got {page}"
        with pytest.raises(LayoutConfigError, match=message):
            _make_layout(0).plan_backup(page_array([3, page]))
        with pytest.raises(LayoutConfigError, match=message):
            _make_layout(0).plan_load([_make_node(0)], page_array([10, 14, 9, 4, page]))


def test_one_rank_alone_behaves_like_identity() -> None:
    layout = _make_layout(0, cp_size=1)
    plan = layout.plan_backup(SLOT_PAGES)
    assert plan.device_pages.tolist() == SLOT_PAGES.tolist()
    assert plan.demand_pages == (5,)
    assert layout.logical_tokens(640) == 640


def test_slots_are_cp_size_times_the_rows_of_a_rank() -> None:
    assert _make_layout(2).logical_tokens(640) == 1920
    assert (_make_layout(2).name, _make_layout(2).lane_count, _make_layout(2).lane) == ("cp_shared", 3, 2)


# Chains.


def test_owners_rotate_from_the_base() -> None:
    layout = _make_layout(0, cp_size=4)
    assert layout.extend_lanes(3, 0, 6).tolist() == [3, 0, 1, 2, 3, 0]
    assert layout.extend_lanes(3, 5, 2).tolist() == [0, 1]
    assert layout.extend_lanes(3, 5, 0).tolist() == []
    assert layout.extend_lanes(3, 0, 6).dtype == np.int16


def test_the_base_of_a_chain_is_the_same_number_in_every_process_and_release() -> None:
    bases = [
        _make_layout(rank, cp_size=97).chain_base(content, namespace)
        for rank, content, namespace in [
            (0, b"", ""),
            (5, b"tokens", ""),
            (96, b"tokens", "lora-a"),
            (1, b"", "lora-a"),
        ]
    ]
    assert bases == [32, 51, 36, 23]


def test_the_base_depends_on_content_and_on_all_of_the_namespace() -> None:
    layout = _make_layout(0, cp_size=16)
    tenant = "tenant-" + "0" * 100
    for vary in (
        lambda n: (n.to_bytes(4, "little"), ""),
        lambda n: (b"prompt", str(n)),
        lambda n: (b"p", f"{tenant}{n}"),
    ):
        assert len({layout.chain_base(*vary(n)) for n in range(200)}) == 16


def test_first_pages_are_spread_evenly_over_the_ranks() -> None:
    layout = _make_layout(0, cp_size=8)
    counts = Counter(layout.chain_base(n.to_bytes(4, "little"), "") for n in range(4000))
    assert len(counts) == 8
    assert max(counts.values()) < 1.2 * 500


@given(cp_size=st.integers(1, 16), data=st.data(), pages=st.integers(0, 70))
def test_any_prefix_is_spread_to_within_one_page(cp_size: int, data: st.DataObject, pages: int) -> None:
    base = data.draw(st.integers(0, cp_size - 1))
    lanes = _make_layout(0, cp_size=cp_size).extend_lanes(base, 0, pages)
    counts = [int((lanes == rank).sum()) for rank in range(cp_size)]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(
    ("cp_size", "cp_rank", "message"),
    [(0, 0, "cp_size must be in [1, 32767], got 0"), (4, 4, "cp_rank must be in [0, 3], got 4")],
)
def test_an_impossible_group_names_the_value_and_the_range(cp_size: int, cp_rank: int, message: str) -> None:
    with pytest.raises(LayoutConfigError, match=re.escape(message)):
        CpSharedLayout(page_size=16, shard_size=cp_size, shard_rank=cp_rank)
