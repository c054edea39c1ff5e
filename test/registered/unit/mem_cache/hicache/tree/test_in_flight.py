"""`InFlight`: each transfer under way is recorded once, follows splits, and ends once; anything else is an error."""

from __future__ import annotations

import unittest
from array import array
from typing import Any

from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

from sglang.srt.mem_cache.hicache.tree.in_flight import InFlight
from sglang.srt.mem_cache.hicache.tree.node import LayoutTreeNode
from sglang.srt.mem_cache.layouts.errors import LayoutInvariantError

register_cpu_ci(est_time=10, suite="base-a-test-cpu")


def _make_chain(length: int) -> list[LayoutTreeNode[Any]]:
    """Nodes 0, 1, ..., each the parent of the next."""
    nodes: list[LayoutTreeNode[Any]] = []
    for number in range(length):
        node: LayoutTreeNode[Any] = LayoutTreeNode(node_id=number, tick=number, key=RadixKey(array("q", [number])))
        node.parent = nodes[-1] if nodes else None
        nodes.append(node)
    return nodes


class TestBackups(CustomTestCase):
    def test_a_second_backup_of_a_node_under_way_raises_and_leaves_the_first(self) -> None:
        under_way: InFlight[Any] = InFlight()
        node = _make_chain(1)[0]
        under_way.begin_backup(node, locked=True)
        with self.assertRaisesRegex(LayoutInvariantError, "node 0 is backed up while its backup 0 is under way"):
            under_way.begin_backup(node, locked=False)
        self.assertTrue(under_way.end_backup(0).locked)
        self.assertEqual(under_way.backups, {})

    def test_an_ack_without_its_backup_raises_and_names_those_under_way(self) -> None:
        under_way: InFlight[Any] = InFlight()
        first, second = _make_chain(2)
        under_way.begin_backup(first, locked=True)
        under_way.begin_backup(second, locked=True)
        with self.assertRaisesRegex(LayoutInvariantError, r"ack for backup 7, but under way are \[0, 1\]"):
            under_way.end_backup(7)
        under_way.end_backup(1)
        with self.assertRaisesRegex(LayoutInvariantError, r"ack for backup 1, but under way are \[0\]"):
            under_way.end_backup(1)

    def test_a_node_split_twice_under_backup_is_covered_from_top_to_bottom(self) -> None:
        under_way: InFlight[Any] = InFlight()
        top, middle, bottom = _make_chain(3)
        under_way.begin_backup(bottom, locked=True)
        under_way.split(middle, bottom)
        under_way.split(top, middle)
        self.assertEqual(under_way.end_backup(2).parts, [top, middle, bottom])

    def test_a_split_of_a_node_without_a_backup_or_with_an_ended_one_is_not_recorded(self) -> None:
        under_way: InFlight[Any] = InFlight()
        top, middle, bottom = _make_chain(3)
        under_way.begin_backup(bottom, locked=True)
        under_way.split(top, middle)
        self.assertEqual(under_way.end_backup(2).parts, [bottom])
        under_way.split(middle, bottom)
        under_way.begin_backup(middle, locked=True)
        self.assertEqual(under_way.end_backup(1).parts, [middle])


class TestLoads(CustomTestCase):
    def test_a_second_load_of_a_node_under_way_raises_and_leaves_the_first(self) -> None:
        under_way: InFlight[Any] = InFlight()
        top, middle, bottom = _make_chain(3)
        under_way.begin_load(bottom, top)
        with self.assertRaisesRegex(LayoutInvariantError, "node 2 is loaded while its load is under way"):
            under_way.begin_load(bottom, middle)
        self.assertEqual(list(under_way.end_load(2).nodes()), [bottom, middle])

    def test_an_ack_without_its_load_raises_and_names_those_under_way(self) -> None:
        under_way: InFlight[Any] = InFlight()
        top, bottom = _make_chain(2)
        under_way.begin_load(bottom, top)
        with self.assertRaisesRegex(LayoutInvariantError, r"ack for load 0, but under way are \[1\]"):
            under_way.end_load(0)

    def test_a_load_that_has_lost_the_node_above_it_raises_and_names_both(self) -> None:
        under_way: InFlight[Any] = InFlight()
        elsewhere, *_ = _make_chain(1)
        _, bottom = _make_chain(2)
        elsewhere.id = 9
        under_way.begin_load(bottom, elsewhere)
        with self.assertRaisesRegex(LayoutInvariantError, "load of node 1 lost the node 9 above it"):
            list(under_way.end_load(1).nodes())

    def test_nothing_is_under_way_after_a_clear(self) -> None:
        under_way: InFlight[Any] = InFlight()
        top, bottom = _make_chain(2)
        under_way.begin_backup(bottom, locked=True)
        under_way.begin_load(bottom, top)
        under_way.clear()
        self.assertEqual((under_way.backups, under_way.loads), ({}, {}))
        under_way.begin_backup(bottom, locked=False)
        under_way.split(top, bottom)
        self.assertEqual(under_way.end_backup(1).parts, [top, bottom], "nothing of the first backup is left")


if __name__ == "__main__":
    unittest.main()
