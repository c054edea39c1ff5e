"""Memory that stays: hundreds of chains come and go, and nothing but the last few may be left of them.

`benchmark/memory_cycles.py` does the same a hundred thousand times and looks at the process's memory.
"""

from __future__ import annotations

import gc
import sys
import unittest
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from sglang.test.ci.ci_register import register_cpu_ci

from sglang.srt.mem_cache.hicache.tree.node import LayoutTreeNode
from sglang.srt.mem_cache.layouts import CpHiCacheNodeMetadata, IdentityNodeMetadata
from support.caches import CacheSpec, CacheTestCase, chain
from support.faults import each_layout, evict
from support.groups import Group

if TYPE_CHECKING:
    from collections.abc import Iterator

register_cpu_ci(est_time=30, suite="base-a-test-cpu")

CYCLES = 800
KINDS = (LayoutTreeNode, CpHiCacheNodeMetadata, IdentityNodeMetadata, torch.Tensor)


class TestBoundedMemory(CacheTestCase):
    @each_layout
    def test_what_remains_of_many_chains_does_not_depend_on_how_many_there_were(self, layout: str) -> None:
        group = Group(_spec(layout))
        self._cycles(group, range(200))
        counted = _objects(group)
        self._cycles(group, range(200, CYCLES))
        for kind, count in _objects(group).items():
            spread = (CYCLES - 200) // 2 if kind == "blocks" else 40  # one of either a cycle would be more
            self.assertLess(count, counted[kind] + spread, f"{kind}: {counted[kind]} before, {count} now")
        self.assertGreater(group.ranks[0].cache.stats.evicted_host_tokens, CYCLES * 4)
        self._check_nothing_is_left(group)

    @each_layout
    def test_host_pages_ledger_and_locks_return_to_their_start_after_reset(self, layout: str) -> None:
        group = Group(_spec(layout))
        start = _held(group)
        for _ in range(3):
            self._cycles(group, range(20))
            self.assertNotEqual(_held(group), start)
            for rank in group.ranks:
                rank.cache.reset()
                rank.allocator.clear()
            self.assertEqual(_held(group), start)
            group.check()
        gc.collect()
        for rank in group.ranks:
            self.assertEqual(rank.nodes(), [])
            nodes = [node for node in gc.get_objects() if type(node) is LayoutTreeNode]
            self.assertFalse(
                [node for node in nodes if node in rank.accounting.device_order or node in rank.accounting.host_order]
            )

    @each_layout
    def test_no_metadata_slots_or_page_numbers_are_a_view_of_something_larger(self, layout: str) -> None:
        group = Group(_spec(layout))
        group.serve(chain(group.spec, *range(6)))
        for cut in (4, 2, 1):
            group.serve(chain(group.spec, *range(cut)))
        group.evict_all()
        group.serve(chain(group.spec, *range(6)))
        for array, nbytes in _arrays(group):
            self.assertLessEqual(nbytes, array.nbytes, "more is kept alive than is seen")

    def _cycles(self, group: Group, numbers: range) -> None:
        """Each brings a chain that was never seen, below a page that others share."""
        for number in numbers:
            group.finish(_begin(group, number))
            group.settle()
            if number % 7 == 0:
                evict(group, 4)
                group.agreed(lambda rank: rank.cache.evict_host(16))
            for rank in group.ranks:  # the harness keeps what it saw
                rank.engine.writes.clear()
                rank.engine.loads.clear()

    def _check_nothing_is_left(self, group: Group) -> None:
        group.evict_all()
        group.agreed(lambda rank: rank.cache.evict_host(1_000_000))
        for rank in group.ranks:
            self.assertEqual((rank.nodes(), rank.host_free_pages()), ([], rank.spec.host_pages))
            self.assertEqual((set(rank.controller.ledger.used_pages), rank.cache.protected_size()), ({0}, 0))
            self.assertEqual(rank.allocator.available_size(), rank.allocator.size)
        group.check()


def _spec(layout: str) -> CacheSpec:
    asked = CacheSpec(layout=layout, ranks=2)
    return replace(asked, device_pages=16 // asked.lanes, host_pages=24 // asked.host_lanes)


def _begin(group: Group, number: int) -> Any:  # noqa: ANN401  # a Request
    request = group.start(chain(group.spec, number // 5 % 3, *(10 + number * 3 + at for at in range(3))))
    assert request is not None, "the request finds no room"
    return request


def _objects(group: Group) -> Counter[str]:
    """What nodes are made of, alive in this process, its blocks of memory of any kind, and the orders' heap entries."""
    gc.collect()
    alive = Counter(kind.__name__ for kind in map(type, gc.get_objects()) if kind in KINDS)
    alive["blocks"] = sys.getallocatedblocks()
    for rank in group.ranks:
        for order in (rank.accounting.device_order, rank.accounting.host_order):
            alive["heap entries"] += len(order._heap)  # noqa: SLF001  # stale entries would show only here
    return alive


def _held(group: Group) -> list[tuple[Any, ...]]:
    return group.each(
        lambda rank: (
            rank.allocator.available_size(),
            rank.host_free_pages(),
            rank.controller.ledger.free_pages,
            (rank.cache.evictable_size(), rank.cache.protected_size(), rank.cache.root_node.lock_ref),
            (len(rank.accounting.device_order), len(rank.accounting.host_order)),
            (len(rank.cache.parts.in_flight.backups), len(rank.cache.parts.in_flight.loads)),
        )
    )


def _arrays(group: Group) -> Iterator[tuple[Any, int]]:
    """Every array and tensor of a node, and the bytes that it keeps alive."""
    for rank in group.ranks:
        for node in rank.nodes():
            assert node.value is not None
            assert node.metadata is not None
            yield node.value, node.value.untyped_storage().nbytes()
            for array in (node.slot_pages, node.metadata.host_pages, getattr(node.metadata, "lanes", node.slot_pages)):
                yield array, array.nbytes if array.base is None else array.base.nbytes


if __name__ == "__main__":
    unittest.main()
