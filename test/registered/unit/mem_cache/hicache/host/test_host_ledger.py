from __future__ import annotations

import random
import unittest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

from sglang.srt.mem_cache.hicache.host.ledger import HostLedger
from sglang.srt.mem_cache.layouts import LayoutConfigError, LayoutInvariantError

register_cpu_ci(est_time=5, suite="base-a-test-cpu")


class TestHostLedger(CustomTestCase):
    def test_a_demand_is_admitted_only_if_every_lane_has_room(self) -> None:
        ledger = HostLedger(lane_count=3, capacity_pages=4)
        ledger.take((4, 0, 2))
        self.assertTrue(ledger.admits((0, 4, 2)))
        self.assertFalse(ledger.admits((1, 0, 0)))
        self.assertEqual(ledger.missing_pages((1, 4, 5)), (1, 0, 3))

    def test_take_and_give_balance_against_a_plain_count(self) -> None:
        rng = random.Random(0)
        ledger, held = HostLedger(lane_count=4, capacity_pages=6), [[0, 0, 0, 0]]
        for _ in range(500):
            demand = [rng.randrange(3) for _ in range(4)]
            used = [sum(column) for column in zip(*held, strict=True)]
            self.assertEqual(ledger.used_pages, tuple(used))
            self.assertEqual(ledger.free_pages, tuple(6 - pages for pages in used))
            fits = all(pages + more <= 6 for pages, more in zip(used, demand, strict=True))
            self.assertEqual(ledger.admits(demand), fits)
            if fits:
                ledger.take(demand)
                held.append(demand)
            elif len(held) > 1:
                ledger.give(held.pop(rng.randrange(1, len(held))))

    def test_taking_too_much_raises_with_both_numbers_and_books_nothing(self) -> None:
        ledger = HostLedger(lane_count=2, capacity_pages=3)
        ledger.take((1, 3))
        with self.assertRaisesRegex(LayoutInvariantError, r"needs \(2, 1\) host pages, ledger has \(2, 0\)"):
            ledger.take((2, 1))
        self.assertEqual(ledger.free_pages, (2, 0))

    def test_giving_too_much_raises_with_both_numbers_and_books_nothing(self) -> None:
        ledger = HostLedger(lane_count=2, capacity_pages=3)
        ledger.take((1, 3))
        with self.assertRaisesRegex(LayoutInvariantError, r"release of \(2, 1\) .* \(2, 0\) .* capacity 3"):
            ledger.give((2, 1))
        self.assertEqual(ledger.free_pages, (2, 0))

    def test_clear_frees_everything(self) -> None:
        ledger = HostLedger(lane_count=2, capacity_pages=3)
        ledger.take((1, 3))
        ledger.clear()
        self.assertEqual((ledger.free_pages, ledger.used_pages), ((3, 3), (0, 0)))

    def test_an_impossible_size_names_the_value_and_the_range(self) -> None:
        with self.assertRaisesRegex(LayoutConfigError, "lane_count must be >= 1, got 0"):
            HostLedger(lane_count=0, capacity_pages=3)
        with self.assertRaisesRegex(LayoutConfigError, "capacity_pages must be >= 0, got -1"):
            HostLedger(lane_count=1, capacity_pages=-1)


if __name__ == "__main__":
    unittest.main()
