"""Free pages in runs: what is handed out lies together, and what comes back joins its neighbours."""

from __future__ import annotations

import random
import unittest
from collections import Counter
from itertools import pairwise
from unittest import mock

import numpy as np
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

from sglang.srt.mem_cache.hicache.slots import page_runs
from sglang.srt.mem_cache.hicache.slots.page_runs import PageRuns, pages_of_runs, runs_of_pages
from sglang.srt.mem_cache.layouts.errors import LayoutInvariantError

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


class TestOwnersInTurn(CustomTestCase):
    def _make_with_free(self, *runs: tuple[int, int]) -> PageRuns:
        pages = PageRuns(60, turn=3)
        pages.take(60)
        for start, length in runs:
            pages.give(start, length)
        return pages

    def test_the_first_page_is_one_of_the_owner_asked_for_and_pages_before_it_stay_free(self) -> None:
        pages = self._make_with_free((3, 9))
        self.assertEqual(pages.take(4, owner=2), [(5, 4)])
        self.assertEqual(pages.runs(), [(3, 2), (9, 3)])

    def test_the_shortest_run_that_holds_the_pages_behind_the_first_one_of_the_owner_is_taken(self) -> None:
        pages = self._make_with_free((0, 4), (10, 5), (30, 9))
        self.assertEqual(pages.take(4, owner=1), [(10, 4)], "in the shortest run only three follow a page of owner 1")
        self.assertEqual(pages.take(4, owner=0), [(0, 4)])

    def test_without_such_a_run_the_longest_come_first_and_the_next_one_goes_on_with_the_next_owner(self) -> None:
        pages = self._make_with_free((0, 2), (9, 3), (21, 5))
        self.assertEqual(pages.take(7, owner=0), [(21, 5), (11, 1), (9, 1)])
        self.assertEqual(pages.runs(), [(0, 2), (10, 1)])

    def test_a_page_of_the_owner_is_found_in_any_run(self) -> None:
        pages = self._make_with_free((0, 2), (4, 1), (9, 2), (14, 1))
        self.assertEqual([pages.take(1, owner=2), pages.take(1, owner=1)], [[(14, 1)], [(4, 1)]])
        self.assertEqual(pages.take(1, owner=1), [(10, 1)])

    def _make_scattered(self, rng: random.Random, turn: int) -> PageRuns:
        pages, at = PageRuns(300, turn=turn), 0
        pages.take(300)
        while at < 280:
            length = rng.randint(1, rng.choice((2, turn, 2 * turn)))
            pages.give(at, length)
            at += length + rng.randint(1, turn)
        return pages

    def test_the_first_run_is_the_shortest_that_holds_all_pages_or_else_the_longest_with_the_owner(self) -> None:
        for seed in range(60):
            rng = random.Random(seed)
            turn = rng.randint(2, 9)
            pages = self._make_scattered(rng, turn)
            for _ in range(20):
                wanted, owner = rng.randint(1, 3 * turn), rng.randrange(turn)
                free = Counter(page % turn for page in pages_of_runs(pages.runs()).tolist())
                if not Counter((owner + n) % turn for n in range(wanted)) <= free:
                    continue
                runs = [(length, start % turn, (owner - start) % turn) for start, length in pages.runs()]
                enough = [run for run in runs if run[2] + wanted <= run[0]]
                length, first_owner, skipped = min(enough) if enough else max(run for run in runs if run[2] < run[0])
                lengths = dict(pages.runs())
                start, taken = pages.take(wanted, owner)[0]
                start -= skipped
                self.assertEqual((lengths[start], start % turn), (length, first_owner))
                self.assertEqual(taken, min(wanted, length - skipped))

    def test_few_runs_are_looked_at_where_those_of_every_length_begin_with_the_wrong_owner(self) -> None:
        turn, at = 64, 0
        pages = PageRuns(200_000, turn=turn)
        pages.take(200_000)
        for length in range(1, turn):
            for first_owner in range(turn - length):  # none has a page of the last owner
                at += (first_owner - at) % turn
                pages.give(at, length)
                at += length + 1
        only = at + (-1 - at) % turn
        for length, wanted in ((1, 2), (turn - 1, 1)):  # from the longest run down, from the shortest one up
            pages.give(only, length)
            with mock.patch.object(page_runs, "divmod", side_effect=divmod, create=True) as look:
                self.assertEqual(pages.take(wanted, owner=turn - 1)[0], (only, 1))
            self.assertLess(look.call_count, 4 * turn)

    def test_an_owner_without_a_page_is_refused(self) -> None:
        pages = self._make_with_free((0, 2), (3, 2))
        with self.assertRaisesRegex(LayoutInvariantError, "owner 2 of 3 has no free page"):
            pages.take(1, owner=2)
        self.assertEqual(pages.runs(), [(0, 2), (3, 2)])


if __name__ == "__main__":
    unittest.main()
