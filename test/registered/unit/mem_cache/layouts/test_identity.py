"""`IdentityLayout` by hand: a slot is a row, and every rank holds every page."""

from __future__ import annotations

import re

import numpy as np
import pytest
from sglang.test.ci.ci_register import register_cpu_ci

from sglang.srt.mem_cache.layouts import CopyPlan, IdentityLayout, LayoutConfigError, LayoutInvariantError
from sglang.srt.mem_cache.layouts.pages import page_array
from sglang.srt.mem_cache.layouts.testing_metadata import stored_arrays

register_cpu_ci(est_time=5, suite="base-a-test-cpu")


def test_a_backup_copies_every_page_from_the_row_page_of_its_own_number() -> None:
    layout = IdentityLayout(page_size=4)
    plan = layout.plan_backup(page_array([7, 8, 3]))
    assert plan.demand_pages == (3,)
    assert plan.lanes.tolist() == [0, 0, 0]
    assert plan.owned_pages == plan.logical_pages == 3
    assert plan.logical_tokens == 12
    copies = CopyPlan.from_pages(page_size=4, host_pages=page_array([20, 21, 9]), device_pages=page_array([7, 8, 3]))
    assert plan.bind(page_array([20, 21, 9])) == copies


def test_metadata_keeps_the_legacy_meaning_one_host_index_a_token() -> None:
    layout = IdentityLayout(page_size=2)
    node = layout.finish_backup(layout.plan_backup(page_array([5, 6])), page_array([9, 4]))
    assert node.logical_len == 4
    assert node.legacy_host_value.tolist() == [18, 19, 8, 9]
    assert node.pages_per_lane == (2,)
    assert sum(array.nbytes for array in stored_arrays(node)) == 16


def test_a_split_slices_the_host_pages() -> None:
    layout = IdentityLayout(page_size=2)
    node = layout.finish_backup(layout.plan_backup(page_array([5, 6, 7])), page_array([9, 4, 1]))
    first, second = node.split(2)
    assert first.host_pages.tolist() == [9]
    assert second.host_pages.tolist() == [4, 1]
    empty, all_of_it = node.split(0)
    assert empty.logical_len == 0
    assert empty.legacy_host_value.numel() == 0
    assert all_of_it.legacy_host_value.tolist() == node.legacy_host_value.tolist()


def test_a_load_of_two_nodes_copies_to_the_new_pages_in_order() -> None:
    layout = IdentityLayout(page_size=4)
    one = layout.finish_backup(layout.plan_backup(page_array([5])), page_array([30]))
    two = layout.finish_backup(layout.plan_backup(page_array([6, 7])), page_array([31, 2]))
    assert layout.load_lanes([one, two]).tolist() == [0, 0, 0]
    plan = layout.plan_load([one, two], page_array([11, 12, 13]))
    assert plan.logical_pages == 3
    assert plan.logical_tokens == 12
    assert [(run.host_page, run.device_page, run.pages) for run in plan.copies.runs()] == [(30, 11, 2), (2, 13, 1)]


def test_a_load_into_too_few_slots_raises_with_both_numbers() -> None:
    layout = IdentityLayout(page_size=4)
    node = layout.finish_backup(layout.plan_backup(page_array([5, 6])), page_array([30, 31]))
    with pytest.raises(LayoutInvariantError, match="2 host pages cannot be paired with 1"):
        layout.plan_load([node], page_array([11]))


def test_a_backup_given_too_few_host_pages_raises_with_both_numbers() -> None:
    layout = IdentityLayout(page_size=4)
    with pytest.raises(LayoutInvariantError, match="backup of 2 pages was given 1 host pages"):
        layout.finish_backup(layout.plan_backup(page_array([5, 6])), page_array([30]))


def test_a_plan_is_not_changed_by_what_happens_to_its_argument() -> None:
    pages = page_array([5, 6])
    plan = IdentityLayout(page_size=4).plan_backup(pages)
    pages[:] = 1
    assert plan.device_pages.tolist() == [5, 6]


def test_the_padding_page_is_refused() -> None:
    layout = IdentityLayout(page_size=4)
    node = layout.finish_backup(layout.plan_backup(page_array([1])), page_array([0]))
    for refused in (layout.plan_backup, lambda pages: layout.plan_load([node], pages)):
        with pytest.raises(LayoutConfigError, match=r"slot page must be >= 1 .*got 0"):
            refused(page_array([0]))


def test_there_is_one_lane_and_no_more_slots_than_rows() -> None:
    layout = IdentityLayout(page_size=4)
    assert (layout.name, layout.lane_count, layout.lane) == ("identity", 1, 0)
    assert layout.chain_base(b"any", "thing") == 0
    assert layout.extend_lanes(0, 7, 3).tolist() == [0, 0, 0]
    assert layout.lanes_of(page_array([3, 4])).tolist() == [0, 0]
    assert layout.lanes_of(page_array([3, 4])).dtype == np.int16
    assert layout.logical_tokens(1000) == 1000


@pytest.mark.parametrize("split_len", [-4, 1, 3, 9, 12])
def test_a_split_outside_the_node_or_off_a_page_names_value_and_range(split_len: int) -> None:
    layout = IdentityLayout(page_size=4)
    node = layout.finish_backup(layout.plan_backup(page_array([5, 6])), page_array([30, 31]))
    accepted = "in [0, 8]" if not 0 <= split_len <= 8 else "a multiple of page_size 4 and >= 0"
    with pytest.raises(ValueError, match=f"^{re.escape(f'split_len must be {accepted}, got {split_len}')}$"):
        node.split(split_len)


def test_a_page_size_below_one_names_value_and_range() -> None:
    with pytest.raises(LayoutConfigError, match=r"^page_size must be >= 1, got 0$"):
        IdentityLayout(page_size=0)
