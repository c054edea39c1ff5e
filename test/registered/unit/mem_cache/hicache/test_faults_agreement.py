"""Faults 1 to 14 of docs/faults.md that no other test covers with every layout: agreement and accounting."""

from __future__ import annotations

import unittest
from typing import TYPE_CHECKING, get_args

import numpy as np
from sglang.test.ci.ci_register import register_cpu_ci

from sglang.srt.mem_cache.hicache.accepted import WritePolicy
from sglang.srt.mem_cache.hicache.host.ledger import HostShortfall
from support.caches import CacheTestCase, Rank, chain
from support.faults import RANKS, begin, each_layout, evict, fault_spec, fill_host_lane, locks, node_of, roots
from support.groups import Group

if TYPE_CHECKING:
    from collections.abc import Sequence

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

POLICIES: tuple[WritePolicy, ...] = get_args(WritePolicy)


class TestAgreement(CacheTestCase):
    @each_layout
    def test_01_each_rank_takes_part_in_one_reduction_whatever_is_pending(self, layout: str) -> None:
        group = Group(fault_spec(layout))
        self._settle_once(group, writes=0, loads=0)
        group.hold(0)
        group.finish(begin(group, 1, 2))
        self._settle_once(group, writes=1, loads=0)
        group.release()
        self._settle_once(group, writes=0, loads=0)
        group.evict_all()
        group.hold(3)
        group.abort(begin(group, 1, 2))
        self._settle_once(group, writes=0, loads=1)

    def _settle_once(self, group: Group, *, writes: int, loads: int) -> None:
        calls = list(group.lockstep.calls)
        group.settle()
        self.assertEqual(group.lockstep.calls, [count + 1 for count in calls])
        for rank in group.ranks:
            queues = (rank.controller.ack_write_queue, rank.controller.ack_load_queue)
            self.assertEqual([len(queue) for queue in queues], [writes, loads])

    @each_layout
    def test_02_one_full_rank_makes_every_rank_refuse_alike(self, layout: str) -> None:
        group = Group(fault_spec(layout, host=16, pages=64))
        fill_host_lane(group, 2)
        request = begin(group, *range(300, 304))  # a page for every rank
        before = group.each(lambda rank: (rank.host_free_pages(), rank.controller.ledger.free_pages))
        writes = group.agreed(lambda rank: len(rank.engine.writes))
        group.finish(request)
        self.assertEqual(group.each(lambda rank: (rank.host_free_pages(), rank.controller.ledger.free_pages)), before)
        self.assertEqual(group.agreed(lambda rank: len(rank.engine.writes)), writes)
        self.assertEqual(group.agreed(lambda rank: rank.cache.stats.refused_backups), 0, "put off")
        for rank in group.ranks:
            node = node_of(rank, *range(300, 304))
            self.assertEqual((node.backuped, node.lock_ref), (False, 0))
            with self.subTest("asked directly", rank=rank.number):
                self.assertIsInstance(rank.controller.write(node.slot_pages, node_id=node.id), HostShortfall)
        self.assertTrue(group.agreed(lambda rank: rank.cache.parts.backups.put_off))
        group.check()

    @each_layout
    def test_03_a_rank_that_is_told_two_waits_for_the_second(self, layout: str) -> None:
        group = Group(fault_spec(layout))
        for rank in group.ranks:
            rank.cache.parts.transfers.agreement = Told((2, 0))
        group.hold()
        for root in (1, 2, 3):
            group.finish(begin(group, root))
        for rank in group.ranks:
            rank.engine.finish_writes(1)
            rank.cache.check_hicache_events()
            self.assertEqual(rank.engine.waits, 1)
            self.assertEqual([len(rank.controller.ack_write_queue), *rank.cache.parts.in_flight.backups], [1, 4])
        group.check()

    @each_layout
    def test_04_ready_counts_of_3_1_2_2_settle_one_on_every_rank(self, layout: str) -> None:
        group = Group(fault_spec(layout))
        group.hold()
        for root in (1, 2, 3):
            group.finish(begin(group, root, root + 10))
        for rank, ready in zip(group.ranks, (3, 1, 2, 2), strict=True):
            rank.engine.finish_writes(ready)
        group.settle()
        self.assertEqual(group.agreed(lambda rank: sorted(rank.cache.parts.in_flight.backups)), [3, 4])
        self.assertEqual(group.each(lambda rank: rank.engine.waits), [0] * RANKS)
        group.check()

    @each_layout
    def test_05_a_rank_that_owns_nothing_of_a_node_has_one_ack_each_way_and_its_full_length(self, layout: str) -> None:
        group = Group(fault_spec(layout))
        free = group.ranks[0].host_free_pages()
        group.hold()
        group.finish(begin(group, 1))
        self.assertEqual(group.agreed(lambda rank: len(rank.controller.ack_write_queue)), 1)
        group.release()
        group.settle()
        group.evict_all()
        group.hold()
        group.abort(begin(group, 1))
        self.assertEqual(group.agreed(lambda rank: len(rank.controller.ack_load_queue)), 1)
        taken = group.each(lambda rank: free - rank.host_free_pages())
        copied = group.each(lambda rank: sum(len(transfers) for transfers in (*rank.engine.writes, *rank.engine.loads)))
        self.assertEqual(sorted(taken), [0, 0, 0, 1] if group.spec.host_lanes > 1 else [1] * RANKS)
        self.assertEqual(copied, [2 * pages for pages in taken])
        self.assertEqual(group.agreed(lambda rank: node_of(rank, 1).host_len), 4)
        self.assertEqual(group.agreed(lambda rank: rank.controller.ack_load_queue[0].num_tokens), 4)

    @each_layout
    def test_06_the_host_capacity_of_a_group_is_that_of_its_smallest_rank(self, layout: str) -> None:
        spec = fault_spec(layout)
        group = Group(spec, host_pages=[9, 7, 12, 8])
        self.assertEqual(group.agreed(lambda rank: rank.controller.ledger.capacity_pages), 7)
        fill_host_lane(group, 1)
        group.check()
        self.assertEqual(max(group.ranks[0].controller.ledger.used_pages), 7)


class TestAccounting(CacheTestCase):
    @each_layout
    def test_08_slots_add_up_after_every_event_under_each_policy(self, layout: str) -> None:
        for policy in POLICIES:
            group = Group(fault_spec(layout, host=8, policy=policy))
            group.hold()
            for root in range(5):
                first, second = begin(group, root, root + 10, root + 20), begin(group, root, root + 30)
                group.check()
                group.finish(first)
                group.check()
                evict(group, 2)
                group.check()
                if root % 2:
                    group.finish(second)
                else:
                    group.abort(second)
                group.check()
                group.each(lambda rank: rank.engine.finish_writes(1))
                group.settle()
                group.check()
            group.release()
            group.settle()
            group.check()
            self.assertEqual(group.agreed(lambda rank: rank.cache.protected_size()), 0)

    @each_layout
    def test_09_two_requests_that_share_pages_count_them_once(self, layout: str) -> None:
        group = Group(fault_spec(layout))
        first, second = begin(group, 1, 2, 3), begin(group, 1, 2, 3)
        group.check()
        self.assertEqual([group.finish(first), group.finish(second)], [0, 12])
        group.settle()
        group.check()
        self.assertEqual(group.agreed(lambda rank: rank.cache.evictable_size()), 12)

    @each_layout
    def test_10_a_shortfall_of_one_page_evicts_one_page(self, layout: str) -> None:
        group = Group(fault_spec(layout, pages=16))
        room = int(group.ranks[0].allocator.room_pages()[0])
        for root in roots(group, 0, room - 2):
            group.serve(chain(group.spec, root))
        self.assertEqual(group.agreed(lambda rank: int(rank.allocator.room_pages()[0])), 2)
        taken = group.each(lambda rank: rank.cache.alloc_slots(np.zeros(3, dtype=np.int16)))
        self.assertTrue(all(pages is not None and len(pages) == 3 for pages in taken))
        self.assertEqual(group.agreed(lambda rank: rank.cache.stats.evicted_device_tokens), 4)

    @each_layout
    def test_11_whatever_is_called_evictable_is_freed_and_in_every_lane(self, layout: str) -> None:
        for policy in POLICIES:
            group = Group(fault_spec(layout, pages=64, host=8, policy=policy))
            for root in range(4):
                group.serve(chain(group.spec, root, root + 10, root + 20, root + 30))
                group.serve(chain(group.spec, root, root + 10, root + 40))
            held = begin(group, 0, 10)
            evictable = group.agreed(lambda rank: rank.cache.evictable_size()) // 4
            promised = group.ranks[0].accounting.evictable_lane_pages + group.ranks[0].allocator.room_pages()
            self.assertEqual(evictable, 18)
            self.assertEqual(evict(group, evictable), evictable)
            self.assertEqual(group.agreed(lambda rank: rank.allocator.room_pages().tolist()), promised.tolist())
            group.check()
            group.abort(held)

    @each_layout
    def test_12_a_hit_of_ten_pages_loads_with_a_quota_of_ten_pages_and_not_of_nine(self, layout: str) -> None:
        for quota, loaded in ((10, 10), (9, 0)):
            group = Group(fault_spec(layout))
            group.serve(chain(group.spec, *range(10)))
            group.evict_all()
            before = locks(group)
            self.assertEqual(_load(group, range(10), quota), loaded)
            if not loaded:
                self.assertEqual(locks(group), before)
                self.assertEqual(group.agreed(lambda rank: rank.controller.start_loading()), -1)
            group.check()

    @each_layout
    def test_13_a_request_whose_load_fails_twice_recomputes_and_others_go_on(self, layout: str) -> None:
        group = Group(fault_spec(layout, pages=8))
        group.serve(chain(group.spec, 1, 2, 3, 4, 5))
        group.evict_all()
        running = begin(group, *range(20, 26))
        for failed in (1, 2):
            self.assertEqual(_load(group, range(1, 6), None), 0)
            self.assertEqual(group.agreed(lambda rank: rank.cache.stats.refused_loads), failed)
            group.check()
        group.finish(running)
        group.settle()
        recomputing = begin(group, 1, 2, 3, 4, 5, quota=0)
        self.assertEqual(recomputing.prefix_pages, 0)
        group.finish(recomputing)
        group.settle()
        group.check()
        self.assertEqual(begin(group, 1, 2, 3, 4, 5).device_pages, 5)

    @each_layout
    def test_14_host_eviction_goes_on_until_every_lane_has_room(self, layout: str) -> None:
        group = Group(fault_spec(layout, host=12))
        for root in range(40):
            group.serve(chain(group.spec, root))
            group.evict_all()
        group.serve(chain(group.spec, 100, 101, 102, 103))
        group.evict_all()
        for rank in group.ranks:
            self.assertEqual((node_of(rank, 100, 101, 102, 103).host_len, rank.cache.stats.refused_backups), (16, 0))
        group.check()


class Told:
    """The agreement of a later pipeline stage, which hears what the first one decided."""

    def __init__(self, decision: tuple[int, ...]) -> None:
        self._decision = decision

    def minimum(self, values: Sequence[int]) -> tuple[int, ...]:
        """See `Agreement`."""
        assert len(values) == len(self._decision)
        return self._decision

    def capacity(self, value: int) -> int:
        """See `Agreement`."""
        return value


def _load(group: Group, pages: Sequence[int], quota_pages: int | None) -> int:
    """Match and load back on every rank, without starting the copies; the pages that came."""
    quota = None if quota_pages is None else quota_pages * group.spec.page_size

    def load(rank: Rank) -> int:
        match = rank.cache.match(rank.key(chain(rank.spec, *pages)))
        value, node = rank.cache.bring_back(match.host_node, quota)
        assert node.value is not None, "the node that the scheduler locks is on the device"
        return len(value) // rank.spec.page_size

    return group.agreed(load)


if __name__ == "__main__":
    unittest.main()
