"""A broken invariant of ours raises `LayoutInvariantError` with both numbers, at once: no wrong answer comes of it.

Each test breaks one thing behind the cache's back and makes the call that depends on it.
"""

from __future__ import annotations

import unittest
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang.srt.mem_cache.hicache.check.invariants import violations
from sglang.srt.mem_cache.hicache.tree.calls import Insertion
from sglang.srt.mem_cache.layouts.errors import LayoutInvariantError
from support.caches import CacheTestCase, Rank, chain
from support.faults import begin, each_layout, fault_spec, node_of
from support.groups import Group

if TYPE_CHECKING:
    from collections.abc import Callable

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=15, suite="base-a-test-cpu")


class TestBackupsAndHostMemory(CacheTestCase):
    @each_layout
    def test_a_host_pool_with_less_room_than_its_ledger(self, layout: str) -> None:
        group = Group(fault_spec(layout))
        rank = group.ranks[1]
        rank.cache.token_to_kv_pool_host.alloc(rank.cache.token_to_kv_pool_host.available_size())
        self._assert_loud(
            lambda: self._back_up(rank), r"ledger admitted \d+ host pages with .*, but the host pool has 0"
        )

    @each_layout
    def test_a_host_pool_that_others_take_pages_from(self, layout: str) -> None:
        group = Group(fault_spec(layout))
        rank = group.ranks[1]
        rank.cache.token_to_kv_pool_host.alloc(rank.spec.page_size)
        self._assert_loud(
            lambda: self._back_up(rank), r"ledger has \d+ free host pages for this rank, its host pool \d+"
        )

    @each_layout
    def test_room_that_was_made_and_is_not_there(self, layout: str) -> None:
        group = Group(fault_spec(layout, host=8))
        rank = group.ranks[0]
        rank.cache.parts.host_room.make = _room_that_is_not_there  # type: ignore[method-assign]  # the fault
        self._back_up(rank, pages=24)  # put off: the host has no room
        self._assert_loud(
            lambda: rank.cache.evict(EvictParams(num_tokens=1)),
            r"room was made for \(.*\) pages, yet \(.*\) are missing",
        )

    @each_layout
    def test_metadata_of_another_length_than_its_node(self, layout: str) -> None:
        group = Group(fault_spec(layout))
        rank = group.ranks[0]
        finish = rank.layout.finish_backup

        def finish_half(plan: Any, host_pages: Any) -> Any:  # noqa: ANN401  # of whatever strategy
            return finish(plan, host_pages).split(4)[0]

        object.__setattr__(rank.controller, "layout", _With(rank.layout, finish_backup=finish_half))
        self._assert_loud(lambda: self._back_up(rank), r"metadata of 4 tokens for node \d+ of 16")

    @each_layout
    def test_a_node_without_a_host_copy_among_those_to_delete(self, layout: str) -> None:
        group = Group(fault_spec(layout))
        group.serve(chain(group.spec, 1, 2))
        rank = group.ranks[0]
        node = node_of(rank, 1, 2)
        node.clear_metadata()
        rank.accounting.host_order.add(node)
        self._assert_loud(lambda: rank.cache.evict_host(1), rf"node {node.id} has no host copy to drop")

    def _back_up(self, rank: Rank, *, pages: int = 4) -> None:
        tokens = chain(rank.spec, *range(pages))
        slots = rank.take(len(tokens))
        rank.cache.put(Insertion(key=rank.key(tokens), value=slots))

    def _assert_loud(self, call: Callable[[], object], words: str) -> None:
        with self.assertRaisesRegex(LayoutInvariantError, words):
            call()


class TestTreeAndLoads(CacheTestCase):
    @each_layout
    def test_a_load_into_a_tree_whose_root_has_left_the_device(self, layout: str) -> None:
        group = self._evicted(layout)
        rank = group.ranks[0]
        node = node_of(rank, 1, 2)
        rank.cache.root_node.value = None
        with self.assertRaisesRegex(LayoutInvariantError, f"node {node.id} has no ancestor on the device"):
            rank.cache.load_back(node)

    @each_layout
    def test_a_load_of_fewer_pages_than_its_nodes_have(self, layout: str) -> None:
        group = self._evicted(layout)
        rank = group.ranks[0]
        load = rank.controller.load
        rank.controller.load = lambda parts, *, node_id: load(parts, node_id=node_id)[:1]  # type: ignore[method-assign,index]  # the fault
        with self.assertRaisesRegex(LayoutInvariantError, r"node \d+ of 8 tokens was given 4 slots in 1 pages"):
            rank.cache.load_back(node_of(rank, 1, 2))

    @each_layout
    def test_a_child_that_its_parent_files_under_another_key(self, layout: str) -> None:
        group = Group(fault_spec(layout, policy="write_back", host=8))
        group.serve(chain(group.spec, *range(24)))  # more than the host can keep, so it will be deleted
        rank = group.ranks[0]
        children = rank.cache.root_node.children
        _, node = children.popitem()
        children["elsewhere"] = node
        with self.assertRaisesRegex(
            LayoutInvariantError, rf"node {node.id} is not the child of node {rank.cache.root_node.id} under"
        ):
            rank.cache.evict(EvictParams(num_tokens=4))

    @each_layout
    def test_a_node_whose_parent_is_lost(self, layout: str) -> None:
        group = Group(fault_spec(layout))
        group.serve(chain(group.spec, 1, 2))
        rank = group.ranks[0]
        node = node_of(rank, 1, 2)
        node.parent = None
        with self.assertRaisesRegex(LayoutInvariantError, rf"node {node.id} has no parent; the walk should have ended"):
            rank.cache.evict(EvictParams(num_tokens=4))

    @each_layout
    def test_slots_that_are_no_whole_pages_and_nothing_is_kept_of_them(self, layout: str) -> None:
        group = Group(fault_spec(layout))
        rank = group.ranks[0]
        slots = rank.allocator.alloc(8)
        assert slots is not None
        tokens = chain(rank.spec, 1, 2)
        shifted, swapped = slots.flip(0), slots.clone()
        swapped[1], swapped[2] = slots[2], slots[1]
        for value, words in (
            (shifted, "a page starts at a token that is no multiple of page_size 4"),
            (swapped, "8 slots to insert are no whole pages of 4"),
        ):
            with self.assertRaisesRegex(LayoutInvariantError, words):
                rank.cache.put(Insertion(key=rank.key(tokens), value=value))
        self.assertEqual(rank.nodes(), [])
        self.assertEqual(violations(rank.cache, held_slot_pages=2), [])

    def _evicted(self, layout: str) -> Group:
        group = Group(fault_spec(layout))
        group.finish(begin(group, 1, 2))
        group.settle()
        group.evict_all()
        return group


class _With:
    """A strategy with some of its methods replaced."""

    def __init__(self, strategy: Any, **methods: Any) -> None:  # noqa: ANN401  # any strategy
        self.__dict__.update(methods)
        self._strategy = strategy

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # any attribute
        return getattr(self._strategy, name)


def _room_that_is_not_there(demand_pages: Any, *, below: Any) -> bool:  # noqa: ANN401  # as `HostRoom.make`
    return True


if __name__ == "__main__":
    unittest.main()
