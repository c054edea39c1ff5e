"""`hicache.invariants` says what is wrong: each kind of damage, done to a healthy cache, is reported by name.

What all randomised tests and every soak rely on is only as good as this. Each test damages one thing on one rank.
"""

from __future__ import annotations

import unittest
from typing import TYPE_CHECKING, Any

import numpy as np
from sglang.test.ci.ci_register import register_cpu_ci

from sglang.srt.mem_cache.hicache.check.invariants import violations
from support.caches import CacheTestCase, Rank, chain
from support.faults import LAYOUTS, evict, fault_spec, node_of
from support.groups import Group

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.mem_cache.hicache.tree.node import LayoutTreeNode

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

Damage = tuple[str, "Callable[[Rank], object]"]


def _upper(rank: Rank) -> LayoutTreeNode[Any]:
    """Pages 1 to 8, with two children."""
    return node_of(rank, *range(1, 9))


def _leaf(rank: Rank) -> LayoutTreeNode[Any]:
    """Pages 9 to 12 below it, on both tiers."""
    return node_of(rank, *range(1, 13))


def _evicted(rank: Rank) -> LayoutTreeNode[Any]:
    """Pages 20 to 23 below it, only on the host."""
    return node_of(rank, *range(1, 9), *range(20, 24))


def _owned(rank: Rank) -> list[LayoutTreeNode[Any]]:
    """Nodes of equal length with host pages of this rank's own."""
    nodes = [_leaf(rank), _evicted(rank)]
    assert all(node.metadata is not None and len(node.metadata.host_pages) for node in nodes)
    return nodes


def _set(node: LayoutTreeNode[Any], **fields: object) -> None:
    for name, value in fields.items():
        setattr(node, name, value)


def _drop_metadata(rank: Rank) -> None:
    _upper(rank).clear_metadata()


def _move_child(rank: Rank) -> None:
    children = _upper(rank).children
    key = _leaf(rank).key.child_key(rank.spec.page_size)
    children["elsewhere"] = children.pop(key)


SLOTS: tuple[Damage, ...] = (
    (
        "evictable tokens: 52, but recounted: 48",
        lambda rank: setattr(rank.accounting, "evictable_tokens", 52),
    ),
    ("protected tokens: 4, but recounted: 0", lambda rank: setattr(rank.accounting, "protected_tokens", 4)),
    ("evictable pages by lane", lambda rank: rank.accounting.evictable_lane_pages.__setitem__(0, 99)),
    ("slots: available + evictable + protected + held", lambda rank: rank.allocator.alloc(4)),
    ("slot pages are held by two nodes", lambda rank: _set(_leaf(rank), slot_pages=_upper(rank).slot_pages[:4])),
    (
        "slot pages are held by a node and free",
        lambda rank: rank.allocator.free_slot_pages(_leaf(rank).slot_pages),
    ),
)

HOST: tuple[Damage, ...] = (
    ("host pages are held by two nodes", lambda rank: _owned(rank)[1].set_metadata(_owned(rank)[0].metadata)),
    (
        "host pages in use by lane",
        lambda rank: rank.controller.ledger.take([1] * rank.spec.host_lanes),
    ),
    (
        "host pages in use in the pool",
        lambda rank: rank.cache.token_to_kv_pool_host.alloc(rank.spec.page_size),
    ),
)

NODES: tuple[Damage, ...] = (
    ("is in the tree without a parent", lambda rank: _set(_evicted(rank), parent=None)),
    ("is not its parent's child under its own key", _move_child),
    ("has 15 tokens, no positive multiple of a page", lambda rank: _set(_leaf(rank), tokens=15)),
    ("has 0 tokens, no positive multiple of a page", lambda rank: _set(_leaf(rank), tokens=0)),
    ("lies on neither tier", lambda rank: _evicted(rank).clear_metadata()),
    (": slots: 12, but recounted: 16", lambda rank: _set(_leaf(rank), value=_value(_leaf(rank))[:12])),
    (
        "tokens of slot pages: 12, but recounted: 16",
        lambda rank: _set(_leaf(rank), slot_pages=_leaf(rank).slot_pages[:3]),
    ),
    ("is on the device, its parent is not", lambda rank: _upper(rank).clear_slots()),
    ("tokens of metadata: 32, but recounted: 16", lambda rank: _leaf(rank).set_metadata(_upper(rank).metadata)),
    ("is backed up, its parent is not", _drop_metadata),
)

ORDERS_AND_COUNTERS: tuple[Damage, ...] = (
    (
        "device leaf is True, but it is in the order: False",
        lambda rank: rank.accounting.device_order.discard(_leaf(rank)),
    ),
    (
        "device leaf is False, but it is in the order: True",
        lambda rank: rank.accounting.device_order.add(_upper(rank)),
    ),
    (
        "host leaf is True, but it is in the order: False",
        lambda rank: rank.accounting.host_order.discard(_evicted(rank)),
    ),
    (
        "host leaf is False, but it is in the order: True",
        lambda rank: rank.accounting.host_order.add(_leaf(rank)),
    ),
    (
        "mirror leaf is True, but it is in the order: False",
        lambda rank: rank.accounting.host_copies.mirrors.discard(_leaf(rank)),
    ),
    (
        "mirror leaf is False, but it is in the order: True",
        lambda rank: rank.accounting.host_copies.mirrors.add(_upper(rank)),
    ),
    ("host pages that can be given up by lane", lambda rank: rank.accounting.host_copies.dropped(_leaf(rank))),
    ("has 0 host holds, its children 1", lambda rank: _set(_leaf(rank), host_ref_counter=1)),
    ("has -1 locks and 0 host holds", lambda rank: _set(_leaf(rank), lock_ref=-1)),
    ("has 0 locks and -1 host holds", lambda rank: _set(_evicted(rank), host_ref_counter=-1)),
    ("children on the device: 2, but recounted: 1", lambda rank: _set(_upper(rank), device_children=2)),
    ("children on the host: 1, but recounted: 2", lambda rank: _set(_upper(rank), host_children=1)),
    ("has 0 locks, its children 1", lambda rank: _set(_leaf(rank), lock_ref=1)),
)


def _value(node: LayoutTreeNode[Any]) -> Any:  # noqa: ANN401  # a tensor
    assert node.value is not None
    return node.value


class TestDamageIsReported(CacheTestCase):
    def test_damage_to_the_accounting_of_slots_and_who_holds_them(self) -> None:
        self._assert_reported(SLOTS)

    def test_damage_to_host_pages_ledger_and_pool(self) -> None:
        self._assert_reported(HOST)

    def test_host_pages_that_a_node_has_lost_while_its_lanes_still_count_them(self) -> None:
        rank = self._group("cp_shared").ranks[1]
        object.__setattr__(_leaf(rank).metadata, "host_pages", np.empty(0, dtype=np.int64))
        found = "\n".join(violations(rank.cache))
        self.assertIn("host pages of this rank's lane: 3, but recounted: 4", found)
        self.assertIn("host pages in use in the pool: 4, but recounted: 3", found)

    def test_damage_to_nodes_and_their_place_in_the_tree(self) -> None:
        self._assert_reported(NODES)

    def test_damage_to_eviction_orders_locks_and_counters(self) -> None:
        self._assert_reported(ORDERS_AND_COUNTERS)

    def test_slots_that_a_request_holds_must_be_declared(self) -> None:
        group = self._group("cp_shared")
        request = group.start(chain(group.spec, 40, 41))
        assert request is not None
        for rank in group.ranks:
            self.assertEqual(violations(rank.cache, held_slot_pages=2), [])
            (line,) = violations(rank.cache)
            self.assertIn("slots: available + evictable + protected + held: 120, but recounted: 128", line)

    def test_an_empty_cache_has_nothing_wrong(self) -> None:
        for layout in LAYOUTS:
            for rank in Group(fault_spec(layout)).ranks:
                self.assertEqual(violations(rank.cache), [])

    def _assert_reported(self, damages: tuple[Damage, ...]) -> None:
        for layout in LAYOUTS:
            for words, damage in damages:
                with self.subTest(layout=layout, words=words):
                    rank = self._group(layout).ranks[1]
                    self.assertEqual(violations(rank.cache), [])
                    damage(rank)
                    self.assertIn(words, "\n".join(violations(rank.cache)))

    def _group(self, layout: str) -> Group:
        """Three nodes: one with two children, of which one has left the device."""
        group = Group(fault_spec(layout))
        group.serve(chain(group.spec, *range(1, 9), *range(20, 24)))
        group.serve(chain(group.spec, *range(1, 13)))
        self.assertEqual(evict(group, 1), 4)
        for rank in group.ranks:
            self.assertEqual(
                [_upper(rank).tokens, _leaf(rank).tokens, _evicted(rank).tokens, _evicted(rank).value],
                [32, 16, 16, None],
            )
        return group


if __name__ == "__main__":
    unittest.main()
