"""Free pages in runs: what is handed out lies together, and what comes back joins its neighbours."""

from __future__ import annotations

import random
import unittest
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

from sglang.srt.mem_cache.hicache.page_runs import PageLanes, PageRuns, pages_of_runs, runs_of_pages
from sglang.srt.mem_cache.layouts.errors import LayoutConfigError, LayoutInvariantError

if TYPE_CHECKING:
    from sglang.srt.mem_cache.layouts.pages import LaneArray

register_cpu_ci(est_time=5, suite="base-a-test-cpu")


class TestPageRuns(CustomTestCase):
    def _make_with_free(self, *runs: tuple[int, int]) -> PageRuns:
        pages = PageRuns(100)
        pages.take(100)
        for start, length in runs:
            pages.give(start, length)
        return pages

    def test_pages_come_in_ascending_order_from_a_fresh_list(self) -> None:
        pages = PageRuns(5, first=10)
        self.assertEqual([pages.take(2), pages.take(3)], [[(10, 2)], [(12, 3)]])

    def test_the_shortest_run_that_is_long_enough_is_taken(self) -> None:
        pages = self._make_with_free((0, 3), (10, 20), (40, 5))
        self.assertEqual(pages.take(4), [(40, 4)])
        self.assertEqual(pages.take(3), [(0, 3)])
        self.assertEqual(pages.runs(), [(10, 20), (44, 1)])

    def test_without_such_a_run_the_longest_come_first(self) -> None:
        pages = self._make_with_free((0, 3), (10, 6), (40, 5))
        self.assertEqual(pages.take(10), [(10, 6), (40, 4)])

    def test_what_comes_back_joins_the_free_runs_on_both_sides(self) -> None:
        pages = self._make_with_free((0, 3), (5, 2))
        pages.give(3, 2)
        self.assertEqual(pages.runs(), [(0, 7)])

    def test_more_than_is_free_is_refused_with_nothing_taken(self) -> None:
        pages = self._make_with_free((0, 3))
        with self.assertRaisesRegex(LayoutInvariantError, "4 pages were asked for, 3 are free"):
            pages.take(4)
        self.assertEqual(pages.runs(), [(0, 3)])

    def test_ascending_pages_are_read_as_runs_and_a_repeated_page_is_noticed(self) -> None:
        for pages, runs in (
            ([], []),
            ([4, 5, 6], [(4, 3)]),
            ([1, 3, 4, 9], [(1, 1), (3, 2), (9, 1)]),
            ([1, 2, 2, 3], None),
            ([1, 1, 3], None),
        ):
            self.assertEqual(runs_of_pages(np.array(pages, dtype=np.int64)), runs)

    def test_any_sequence_of_calls_keeps_exactly_the_pages_that_are_free_in_maximal_runs(self) -> None:
        for seed in range(20):
            rng = random.Random(seed)
            ours, twin = PageRuns(64), PageRuns(64)
            held: list[int] = []
            for _ in range(300):
                if rng.random() < 0.5 and ours.free:
                    wanted = rng.randint(1, ours.free)
                    taken = ours.take(wanted)
                    self.assertEqual(taken, twin.take(wanted), "equal calls, equal pages")
                    held += pages_of_runs(taken).tolist()
                else:
                    back = sorted(rng.sample(held, rng.randint(0, len(held))))
                    held = [page for page in held if page not in back]
                    for start, length in runs_of_pages(np.array(back, dtype=np.int64)) or []:
                        ours.give(start, length)
                        twin.give(start, length)
                self.assertEqual(len(held), len(set(held)))
                self.assertEqual(pages_of_runs(ours.runs()).tolist(), sorted(set(range(64)) - set(held)))
                self.assertEqual(ours.free, 64 - len(held))
                for (start, length), (following, _) in pairwise(ours.runs()):
                    self.assertLess(start + length, following, "neighbouring runs are one run")


class TestPageLanes(CustomTestCase):
    def _make(self, *, lanes: int = 3, rows: int = 8) -> PageLanes:
        owners: LaneArray = (np.arange(lanes * rows) % lanes).astype(np.int16)
        return PageLanes(owners, lane_count=lanes, first=lanes)

    def _take(self, pages: PageLanes, *lanes: int) -> list[int]:
        taken = pages.take(np.array(lanes, dtype=np.int16))
        assert taken is not None
        return [int(page) for page in taken]

    def test_pages_lie_in_the_lanes_asked_for_in_that_order(self) -> None:
        pages = self._make()
        self.assertEqual(self._take(pages, 2, 0, 2, 1), [5, 3, 8, 4])
        self.assertEqual(pages.room(), [7, 7, 6])

    def test_runs_are_runs_of_rows_in_each_lane(self) -> None:
        pages = self._make()
        taken = self._take(pages, *[0] * 8)
        pages.give(np.array(taken[2:4] + taken[5:8], dtype=np.int64))
        self.assertEqual(self._take(pages, 0, 0, 0), taken[5:8], "the hole of two rows is too short")
        self.assertEqual(self._take(pages, 0, 0), taken[2:4])

    def test_the_last_rows_of_a_lane_do_not_join_the_first_ones_of_the_next(self) -> None:
        pages = self._make(rows=2)
        self.assertEqual(self._take(pages, 0, 0, 1, 1), [3, 6, 4, 7])
        pages.give(np.array([6, 4], dtype=np.int64))
        self.assertIsNone(pages.take(np.array([0, 0], dtype=np.int16)))
        self.assertEqual(pages.room(), [1, 1, 2])

    def test_a_short_lane_refuses_the_whole_demand(self) -> None:
        pages = self._make(rows=2)
        self.assertIsNone(pages.take(np.array([0, 1, 1, 1], dtype=np.int16)))
        self.assertEqual(pages.room(), [2, 2, 2])

    def test_pages_that_are_idle_reserved_or_given_twice_are_refused_with_nothing_freed(self) -> None:
        pages = self._make()
        taken = self._take(pages, 0, 1, 2)
        for wrong, words in (([*taken, 9], "not in use"), ([0], "not in use"), ([taken[0]] * 2, "twice")):
            with self.assertRaisesRegex(LayoutInvariantError, words):
                pages.give(np.array(wrong, dtype=np.int64))
        self.assertEqual(pages.room(), [7, 7, 7])

    def test_numbers_that_are_no_pages_are_refused_with_nothing_freed(self) -> None:
        pages = self._make(rows=2)
        self._take(pages, 0, 0, 1, 1, 2, 2)
        for wrong in (-1, 9, -100, 2**62):
            with self.assertRaisesRegex(LayoutInvariantError, "must lie in \\[0, 8\\]"):
                pages.give(np.array([3, wrong], dtype=np.int64))
        self.assertEqual(pages.room(), [0, 0, 0])

    def test_a_page_zero_is_refused_since_it_stands_for_every_negative_number(self) -> None:
        with self.assertRaisesRegex(LayoutConfigError, "first must be >= 1, got 0"):
            PageLanes(np.zeros(3, dtype=np.int16), lane_count=1, first=0)

    def test_all_free_pages_are_those_that_nobody_holds(self) -> None:
        pages = self._make()
        taken = self._take(pages, 1, 1, 0)
        self.assertEqual(sorted(pages.all_free().tolist()), sorted(set(range(3, 27)) - set(taken)))


if __name__ == "__main__":
    unittest.main()
