"""Free slot pages by lane: in a list for each lane, and in one list where pages are dealt in turn."""

from __future__ import annotations

import unittest
from typing import TYPE_CHECKING
from unittest.mock import patch

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

from sglang.srt.mem_cache.hicache.slots.free_pages import PageLanes, PageTurns, free_slot_pages_of
from sglang.srt.mem_cache.hicache.slots.page_runs import PageRuns
from sglang.srt.mem_cache.layouts import CpSharedLayout, IdentityLayout
from sglang.srt.mem_cache.layouts.errors import LayoutConfigError, LayoutInvariantError

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache.slots.free_pages import SlotPages
    from sglang.srt.mem_cache.layouts.pages import LaneArray

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

KINDS = (PageLanes, PageTurns)


def make(kind: type[PageLanes | PageTurns], *, lanes: int = 3, rows: int = 8) -> PageLanes | PageTurns:
    """`rows` pages a lane, dealt in turn, behind one reserved page each."""
    owners: LaneArray = (np.arange(lanes * rows) % lanes).astype(np.int16)
    return kind(owners, lane_count=lanes, first=lanes)


def take(pages: SlotPages, *lanes: int) -> list[int]:
    """The pages handed out for `lanes`."""
    taken = pages.take(np.array(lanes, dtype=np.int16))
    assert taken is not None
    return [int(page) for page in taken]


class TestBothKinds(CustomTestCase):
    def test_pages_lie_in_the_lanes_asked_for_in_that_order(self) -> None:
        for kind in KINDS:
            pages = make(kind)
            self.assertEqual([page % 3 for page in take(pages, 2, 0, 2, 1)], [2, 0, 2, 1])
            self.assertEqual(pages.room(), [7, 7, 6])
            self.assertEqual(take(pages), [])

    def test_a_short_lane_refuses_the_whole_demand(self) -> None:
        for kind in KINDS:
            pages = make(kind, rows=2)
            self.assertIsNone(pages.take(np.array([0, 1, 1, 1], dtype=np.int16)))
            self.assertEqual(pages.room(), [2, 2, 2])

    def test_a_lane_that_does_not_exist_is_refused_with_nothing_taken(self) -> None:
        for kind in KINDS:
            pages = make(kind)
            for lane in (-1, 3):
                with self.assertRaisesRegex(LayoutInvariantError, "lanes must lie in"):
                    pages.take(np.array([0, lane], dtype=np.int16))
            self.assertEqual(pages.room(), [8, 8, 8])

    def test_pages_that_are_idle_reserved_or_given_twice_are_refused_with_nothing_freed(self) -> None:
        for kind in KINDS:
            pages = make(kind)
            taken = take(pages, 0, 1, 2)
            for wrong, words in (([*taken, 9], "not in use"), ([0], "not in use"), ([taken[0]] * 2, "twice")):
                with self.assertRaisesRegex(LayoutInvariantError, words):
                    pages.give(np.array(wrong, dtype=np.int64))
            self.assertEqual(pages.room(), [7, 7, 7])
            pages.give(np.array(taken, dtype=np.int64))
            self.assertEqual(pages.room(), [8, 8, 8])

    def test_numbers_that_are_no_pages_are_refused_with_nothing_freed(self) -> None:
        for kind in KINDS:
            pages = make(kind, rows=2)
            take(pages, 0, 0, 1, 1, 2, 2)
            for wrong in (-1, 9, -100, 2**62):
                with self.assertRaisesRegex(LayoutInvariantError, "must lie in \\[0, 8\\]"):
                    pages.give(np.array([3, wrong], dtype=np.int64))
            self.assertEqual(pages.room(), [0, 0, 0])

    def test_a_page_zero_is_refused_since_it_stands_for_every_negative_number(self) -> None:
        for kind in KINDS:
            with self.assertRaisesRegex(LayoutConfigError, "first must be >= 1, got 0"):
                kind(np.zeros(3, dtype=np.int16), lane_count=1, first=0)

    @given(lanes=st.integers(1, 5), rows=st.integers(1, 12), seed=st.integers(0, 1 << 16), in_turn=st.floats(0, 1))
    @settings(max_examples=120, deadline=None)
    def test_whatever_is_taken_and_given_back_each_page_is_held_once_in_its_lane_or_free(
        self, lanes: int, rows: int, seed: int, in_turn: float
    ) -> None:
        for kind in KINDS:
            rng = np.random.default_rng(seed)
            pages, twin = make(kind, lanes=lanes, rows=rows), make(kind, lanes=lanes, rows=rows)
            every = set(range(lanes, lanes * (rows + 1)))
            held: list[int] = []
            for _ in range(40):
                if rng.random() < 0.6:
                    count = int(rng.integers(0, lanes * rows + 1))
                    chain = (int(rng.integers(lanes)) + np.arange(count)) % lanes
                    wanted = (chain if rng.random() < in_turn else rng.integers(lanes, size=count)).astype(np.int16)
                    room = pages.room()
                    fits = bool((np.bincount(wanted, minlength=lanes) <= room).all())
                    taken, same = pages.take(wanted), twin.take(wanted)
                    self.assertEqual(taken is not None, fits, "a demand is served exactly if each lane has room")
                    if taken is None:
                        self.assertEqual(pages.room(), room)
                        continue
                    np.testing.assert_array_equal(taken, same, "equal calls, equal pages")
                    np.testing.assert_array_equal(taken % lanes, wanted)
                    held += taken.tolist()
                else:
                    back = [held.pop(int(rng.integers(len(held)))) for _ in range(int(rng.integers(len(held) + 1)))]
                    for side in (pages, twin):
                        side.give(np.array(back, dtype=np.int64))
                self.assertEqual(len(set(held)), len(held))
                free = pages.all_free().tolist()
                self.assertEqual((len(free), set(free)), (len(every) - len(held), every - set(held)))
                self.assertEqual(pages.room(), [sum(page % lanes == lane for page in free) for lane in range(lanes)])


class TestPageLanes(CustomTestCase):
    def test_runs_are_runs_of_rows_in_each_lane(self) -> None:
        pages = make(PageLanes)
        taken = take(pages, *[0] * 8)
        pages.give(np.array(taken[2:4] + taken[5:8], dtype=np.int64))
        self.assertEqual(take(pages, 0, 0, 0), taken[5:8], "the hole of two rows is too short")
        self.assertEqual(take(pages, 0, 0), taken[2:4])

    def test_the_last_rows_of_a_lane_do_not_join_the_first_ones_of_the_next(self) -> None:
        pages = make(PageLanes, rows=2)
        self.assertEqual(take(pages, 0, 0, 1, 1), [3, 6, 4, 7])
        pages.give(np.array([6, 4], dtype=np.int64))
        self.assertIsNone(pages.take(np.array([0, 0], dtype=np.int16)))
        self.assertEqual(pages.room(), [1, 1, 2])


class TestPageTurns(CustomTestCase):
    def test_a_chain_is_a_range_of_slot_pages_from_a_page_of_its_first_lane_on(self) -> None:
        pages = make(PageTurns)
        self.assertEqual(take(pages, 1, 2, 0, 1), [4, 5, 6, 7])
        self.assertEqual(take(pages, 1, 2, 0, 1, 2), [10, 11, 12, 13, 14])
        self.assertEqual(take(pages, 0), [3], "what was left out in front of a chain serves the shortest demand")

    def test_chains_of_several_requests_are_ranges_one_after_the_other(self) -> None:
        pages = make(PageTurns)
        self.assertEqual(take(pages, 0, 1, 2, 2, 0, 1), [3, 4, 5, 8, 9, 10])

    def test_many_single_pages_make_whole_turns_and_take_few_searches(self) -> None:
        rng = np.random.default_rng(5)
        pages = make(PageTurns, lanes=4, rows=40)
        for times in ([16, 16, 16, 16], [20, 14, 16, 18]):
            wanted = rng.permutation(np.repeat(np.arange(4), times)).astype(np.int16)
            with patch.object(PageRuns, "take", autospec=True, side_effect=PageRuns.take) as searches:
                taken = pages.take(wanted)
            assert taken is not None
            np.testing.assert_array_equal(taken % 4, wanted)
            self.assertEqual(len(np.unique(taken)), len(wanted))
            self.assertLessEqual(searches.call_count, 1 if len(set(times)) == 1 else 8)
        self.assertEqual(pages.room(), [4, 10, 8, 6])

    def test_chains_are_ranges_however_many_they_are(self) -> None:
        pages = make(PageTurns, lanes=4, rows=100)
        chains = [(first + np.arange(5)) % 4 for first in [2, 0, 3, 1] * 10]
        taken = pages.take(np.concatenate(chains).astype(np.int16))
        assert taken is not None
        for chain in np.split(taken, 40):
            self.assertEqual(chain.tolist(), list(range(chain[0], chain[0] + 5)))

    def test_what_comes_back_joins_its_neighbours(self) -> None:
        pages = make(PageTurns, rows=3)
        taken = take(pages, 0, 1, 2, 0, 1, 2, 0, 1, 2)
        pages.give(np.array([taken[4], taken[3]], dtype=np.int64))
        pages.give(np.array([taken[5], taken[2]], dtype=np.int64))
        self.assertEqual(take(pages, 2, 0, 1, 2), taken[2:6])

    def test_pages_that_are_not_dealt_in_turn_are_refused(self) -> None:
        for owners, first in (([0, 0, 1, 1], 2), ([1, 0, 1, 0], 2), ([0, 1, 0], 3)):
            with self.assertRaisesRegex(LayoutConfigError, "must have the owners page % 2"):
                PageTurns(np.array(owners, dtype=np.int16), lane_count=2, first=first)

    def test_the_refusal_names_the_first_such_page_in_one_line(self) -> None:
        owners = (np.arange(600) % 3).astype(np.int16)
        owners[500:] = 0
        with self.assertRaisesRegex(LayoutConfigError, "^pages .* page % 3, got 0 for page 503$"):
            PageTurns(owners, lane_count=3, first=3)


class _Unmarked(CpSharedLayout):
    """A strategy that does not say that it deals in turn."""

    deals_in_turn = False  # type: ignore[misc]  # it takes back what its parent says


class TestChoice(CustomTestCase):
    def test_the_kind_follows_from_what_the_strategy_says_about_itself(self) -> None:
        for layout, kind in (
            (CpSharedLayout(page_size=4, shard_size=3, shard_rank=1), PageTurns),
            (_Unmarked(page_size=4, shard_size=3, shard_rank=1), PageLanes),
            (CpSharedLayout(page_size=4, shard_size=1, shard_rank=0), PageLanes),
            (IdentityLayout(page_size=4), PageLanes),
        ):
            pages = free_slot_pages_of(layout, 12)
            self.assertIs(type(pages), kind)
            self.assertEqual(sorted(pages.all_free()), list(range(layout.lane_count, layout.lane_count + 12)))


if __name__ == "__main__":
    unittest.main()
