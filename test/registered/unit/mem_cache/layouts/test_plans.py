"""Copy plans: coalescing into runs, expansion back, comparison and print."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.test.ci.ci_register import register_cpu_ci

from sglang.srt.mem_cache.layouts import BackupPlan, CopyPlan, CopyRun, LayoutInvariantError, LoadPlan
from sglang.srt.mem_cache.layouts.pages import NO_PAGES, page_array

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

# Page numbers from a small range, so that neighbours are frequent.
PAIRS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=40)


def _make_copy_plan(host: list[int], device: list[int], page_size: int = 4) -> CopyPlan:
    return CopyPlan.from_pages(page_size=page_size, host_pages=page_array(host), device_pages=page_array(device))


def _make_backup_plan(device: list[int], lanes: list[int] | None = None) -> BackupPlan:
    return BackupPlan(
        page_size=4,
        lanes=np.array(lanes or [0, 1, 0], dtype=np.int16),
        demand_pages=(2, 1),
        device_pages=page_array(device),
    )


def test_the_picture_in_the_docstring_is_true() -> None:
    plan = _make_copy_plan([7, 8, 9, 4], [20, 21, 22, 30])
    assert list(plan.runs()) == [
        CopyRun(host_page=7, device_page=20, pages=3),
        CopyRun(host_page=4, device_page=30, pages=1),
    ]


def test_a_gap_on_the_host_side_alone_ends_a_run() -> None:
    assert [run.pages for run in _make_copy_plan([1, 2, 9], [5, 6, 7]).runs()] == [2, 1]


def test_a_gap_on_the_device_side_alone_ends_a_run() -> None:
    assert [run.pages for run in _make_copy_plan([5, 6, 7], [1, 2, 9]).runs()] == [2, 1]


def test_descending_and_repeated_pages_are_runs_of_one() -> None:
    assert [run.pages for run in _make_copy_plan([3, 2, 2], [7, 8, 9]).runs()] == [1, 1, 1]


@given(pairs=PAIRS)
def test_runs_expand_to_the_pairs_that_they_were_made_of(pairs: list[tuple[int, int]]) -> None:
    host, device = [h for h, _ in pairs], [d for _, d in pairs]
    plan = _make_copy_plan(host, device, page_size=16)
    expanded = [(run.host_page + n, run.device_page + n) for run in plan.runs() for n in range(run.pages)]
    assert expanded == pairs
    assert plan.host_pages().tolist() == host
    assert plan.device_pages().tolist() == device
    assert plan.pages == len(pairs)
    assert plan.tokens == 16 * len(pairs)


@given(pairs=PAIRS)
def test_runs_are_as_long_as_they_can_be(pairs: list[tuple[int, int]]) -> None:
    runs = list(_make_copy_plan([h for h, _ in pairs], [d for _, d in pairs]).runs())
    for one, following in itertools.pairwise(runs):
        end = (one.host_page + one.pages, one.device_page + one.pages)
        assert end != (following.host_page, following.device_page)


@given(parts=st.lists(PAIRS, max_size=4))
def test_concat_performs_the_plans_in_order(parts: list[list[tuple[int, int]]]) -> None:
    plans = [_make_copy_plan([h for h, _ in part], [d for _, d in part]) for part in parts]
    whole = CopyPlan.concat(plans, page_size=4)
    assert list(whole.runs()) == [run for plan in plans for run in plan.runs()]
    pairs = list(zip(whole.host_pages().tolist(), whole.device_pages().tolist(), strict=True))
    assert pairs == list(itertools.chain.from_iterable(parts))


def test_concat_of_one_plan_has_arrays_of_its_own() -> None:
    plan = _make_copy_plan([1, 2], [3, 4])
    whole = CopyPlan.concat([plan], page_size=4)
    assert whole == plan
    assert not np.shares_memory(whole.host_starts, plan.host_starts)


def test_concat_refuses_a_plan_of_another_page_size() -> None:
    for plans in ([_make_copy_plan([1], [2], page_size=4)], [_make_copy_plan([1], [2], page_size=4)] * 2):
        with pytest.raises(LayoutInvariantError, match=r"page_size 4 .*16"):
            CopyPlan.concat(plans, page_size=16)


def test_an_empty_plan_has_no_runs() -> None:
    plan = _make_copy_plan([], [])
    assert list(plan.runs()) == []
    assert plan.pages == plan.tokens == 0
    assert plan.host_pages().size == plan.device_pages().size == 0
    assert plan == CopyPlan.concat([], page_size=4)


def test_pages_that_cannot_be_paired_raise_with_both_numbers() -> None:
    with pytest.raises(LayoutInvariantError, match="2 host pages cannot be paired with 3 device pages"):
        _make_copy_plan([1, 2], [1, 2, 3])


def test_a_copy_plan_keeps_no_view_of_the_pages_it_was_made_of() -> None:
    pages = np.arange(100, dtype=np.int64)
    plan = CopyPlan.from_pages(page_size=1, host_pages=pages[:2], device_pages=pages[50:52])
    pages[:] = 0
    assert list(plan.runs()) == [CopyRun(host_page=0, device_page=50, pages=2)]
    assert plan.host_starts.base is None
    assert plan.device_starts.base is None


def test_a_backup_plan_binds_host_pages_in_node_order() -> None:
    plan = _make_backup_plan([6, 9])
    assert plan.logical_pages == 3
    assert plan.logical_tokens == 12
    assert plan.owned_pages == 2
    assert plan.bind(page_array([31, 30])) == _make_copy_plan([31, 30], [6, 9])
    with pytest.raises(LayoutInvariantError, match="1 host pages cannot be paired with 2"):
        plan.bind(page_array([31]))


def test_a_load_plan_counts_the_tokens_of_every_node() -> None:
    plan = LoadPlan(page_size=16, logical_pages=5, copies=_make_copy_plan([], [], page_size=16))
    assert plan.logical_tokens == 80


def test_plans_compare_by_content() -> None:
    assert _make_copy_plan([1, 2], [3, 4]) == _make_copy_plan([1, 2], [3, 4])
    for other in (
        _make_copy_plan([2, 3], [3, 4]),
        _make_copy_plan([1, 2], [4, 5]),
        _make_copy_plan([1], [3]),
        _make_copy_plan([1, 2], [3, 4], page_size=8),
    ):
        assert _make_copy_plan([1, 2], [3, 4]) != other
    assert _make_copy_plan([], []) != ()
    assert _make_backup_plan([6, 9]) == _make_backup_plan([6, 9])
    assert _make_backup_plan([6, 9]) != _make_backup_plan([6, 8])
    assert _make_backup_plan([6, 9]) != _make_backup_plan([6, 9], lanes=[0, 0, 1])
    assert _make_backup_plan([6, 9]) != dataclasses.replace(_make_backup_plan([6, 9]), demand_pages=(1, 2))
    assert _make_backup_plan([6, 9]) != dataclasses.replace(_make_backup_plan([6, 9]), page_size=8)
    assert _make_backup_plan([6, 9]) != "a plan"
    load = LoadPlan(page_size=4, logical_pages=2, copies=_make_copy_plan([1, 2], [3, 4]))
    assert load == LoadPlan(page_size=4, logical_pages=2, copies=_make_copy_plan([1, 2], [3, 4]))
    assert load != LoadPlan(page_size=4, logical_pages=2, copies=_make_copy_plan([1, 2], [3, 5]))


def test_plans_are_no_dictionary_keys() -> None:
    load = LoadPlan(page_size=4, logical_pages=0, copies=_make_copy_plan([], []))
    for plan in (_make_copy_plan([], []), _make_backup_plan([6, 9]), load):
        with pytest.raises(TypeError, match="unhashable"):
            hash(plan)


def test_plans_print_what_they_copy() -> None:
    plan = _make_copy_plan([7, 8, 4], [20, 21, 30])
    text = "CopyPlan(page_size=4, pages=3, runs=[host 7 <-> device 20 x2, host 4 <-> device 30 x1])"
    assert repr(plan) == text
    assert repr(LoadPlan(page_size=4, logical_pages=3, copies=plan)) == (
        f"LoadPlan(page_size=4, logical_pages=3, copies={text}, exchange=NO_EXCHANGE)"
    )
    assert "demand_pages=(2, 1), device_pages=array([6, 9])" in repr(_make_backup_plan([6, 9]))


@pytest.mark.parametrize(
    "plan", [CopyRun(host_page=1, device_page=2, pages=3), _make_copy_plan([1], [2]), _make_backup_plan([6, 9])]
)
def test_plans_are_frozen_and_survive_copying_and_pickling(plan: CopyRun | CopyPlan | BackupPlan) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(plan, dataclasses.fields(plan)[0].name, 8)
    assert copy.deepcopy(plan) == plan
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_the_shared_empty_page_array_cannot_be_written() -> None:
    assert NO_PAGES.dtype == np.int64
    assert not NO_PAGES.flags.writeable
