from __future__ import annotations

import random
import unittest
from dataclasses import dataclass

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

from sglang.srt.mem_cache.hicache.tree.leaf_heap import EvictionOrder

register_cpu_ci(est_time=5, suite="base-a-test-cpu")


@dataclass(slots=True, eq=False)
class Leaf:
    """A candidate: smaller `rank` goes first, ties by id."""

    id: int
    rank: int


class TestEvictionOrder(CustomTestCase):
    def test_order_is_that_of_sorting_all_candidates_after_any_changes(self) -> None:
        for seed in range(20):
            self._compare_with_sorting(random.Random(seed), leaves=30, steps=600)

    def _compare_with_sorting(self, rng: random.Random, *, leaves: int, steps: int) -> None:
        order: EvictionOrder[Leaf] = EvictionOrder(lambda leaf: leaf.rank)
        everyone = [Leaf(number, rng.randrange(10)) for number in range(leaves)]
        members: set[Leaf] = set()
        for _ in range(steps):
            leaf = rng.choice(everyone)
            action = rng.choice(("add", "add", "move", "discard", "pop"))
            if action == "add":
                order.add(leaf)
                members.add(leaf)
            elif action == "move":
                leaf.rank = rng.randrange(10)
                order.touch(leaf)
            elif action == "discard":
                order.discard(leaf)
                members.discard(leaf)
            else:
                first = min(members, key=lambda m: (m.rank, m.id), default=None)
                self.assertIs(order.pop_first(), first)
                if first is not None:
                    members.discard(first)
            self.assertEqual((len(order), set(order)), (len(members), members))
            self.assertEqual(leaf in order, leaf in members)
        drained = []
        while (popped := order.pop_first()) is not None:
            drained.append(popped)
        self.assertEqual(drained, sorted(members, key=lambda m: (m.rank, m.id)))

    def test_a_leaf_that_left_and_came_back_has_one_place_only(self) -> None:
        order: EvictionOrder[Leaf] = EvictionOrder(lambda leaf: leaf.rank)
        early, late = Leaf(1, 1), Leaf(2, 2)
        order.add(early)
        order.add(late)
        order.discard(early)
        early.rank = 3
        order.add(early)
        order.add(early)
        self.assertEqual([order.pop_first(), order.pop_first(), order.pop_first()], [late, early, None])

    def test_touching_a_leaf_that_is_no_candidate_does_not_make_it_one(self) -> None:
        order: EvictionOrder[Leaf] = EvictionOrder(lambda leaf: leaf.rank)
        order.touch(Leaf(1, 1))
        self.assertIsNone(order.pop_first())

    def test_a_move_looks_at_no_leaf_but_the_one_that_moved(self) -> None:
        asked: list[int] = []

        def priority(leaf: Leaf) -> int:
            asked.append(leaf.id)
            return leaf.rank

        order: EvictionOrder[Leaf] = EvictionOrder(priority)
        leaves = [Leaf(number, number) for number in range(1_000)]
        for leaf in leaves:
            order.add(leaf)
        asked.clear()
        for leaf in leaves[:50]:
            order.touch(leaf)
            order.pop_first()
        self.assertEqual(asked, list(range(50)))

    def test_stale_entries_stay_within_twice_the_candidates(self) -> None:
        order: EvictionOrder[Leaf] = EvictionOrder(lambda leaf: leaf.rank)
        leaves = [Leaf(number, number) for number in range(100)]
        for leaf in leaves:
            order.add(leaf)
        for turn in range(20_000):
            leaf = leaves[turn % 100]
            leaf.rank = turn
            order.touch(leaf)
        self.assertLessEqual(len(order._heap), 64 + 2 * 100)  # noqa: SLF001  # memory has no public measure
        self.assertEqual([leaf.id for leaf in iter(order.pop_first, None)], list(range(100)))

    def test_clear_forgets_everyone(self) -> None:
        order: EvictionOrder[Leaf] = EvictionOrder(lambda leaf: leaf.rank)
        order.add(Leaf(1, 1))
        order.clear()
        self.assertEqual((len(order), order.pop_first()), (0, None))


if __name__ == "__main__":
    unittest.main()
