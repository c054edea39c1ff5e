"""Backups of one step are one copy on every rank: queued, and submitted where SGLang's scheduler asks for it."""

from __future__ import annotations

import unittest
from typing import TYPE_CHECKING, Any
from unittest import mock

from sglang.test.ci.ci_register import register_cpu_ci

from sglang.srt.mem_cache.hicache.seam.features import SINCE_0_5_23
from support.caches import CacheSpec, CacheTestCase, chain
from support.faults import begin, each_layout, fault_spec
from support.groups import Group
from support.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Sequence

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

BATCH = (1, 2, 3)


class TestMergedBackups(CacheTestCase):
    @each_layout
    def test_requests_that_end_with_one_batch_are_one_copy_with_one_ack_for_each_of_them(self, layout: str) -> None:
        group = Group(fault_spec(layout))
        self._end_together(group, BATCH)
        self.assertEqual(group.agreed(_submissions), 0)
        ids = group.agreed(lambda rank: list(rank.cache.ongoing_write_through))
        group.submit()
        group.submit()
        self.assertEqual(group.agreed(_submissions), 1)
        self.assertEqual(group.agreed(lambda rank: [ack.node_ids for ack in rank.controller.ack_write_queue]), [ids])
        self.assertEqual(group.agreed(lambda rank: rank.controller.ack_write_queue[0].num_tokens), 3 * 4)
        self.assertEqual(group.agreed(lambda rank: rank.cache.protected_size()), 3 * 4, "locked until the ack")
        group.settle()
        self.assertEqual(group.agreed(lambda rank: (rank.cache.stats.backups, rank.cache.protected_size())), (3, 0))
        group.check()
        group.evict_all()
        for page in BATCH:
            self.assertEqual(begin(group, page).host_pages, 1, "with the right bytes, which `begin` compares")

    @each_layout
    def test_a_turn_of_the_event_loop_submits_what_no_batch_has(self, layout: str) -> None:
        group = Group(fault_spec(layout))
        self._end_together(group, BATCH)
        group.lockstep.gather([(1, 0)] * group.spec.ranks)
        group.each(lambda rank: rank.cache.check_hicache_events())
        self.assertEqual(group.agreed(_submissions), 1)
        self.assertEqual(group.agreed(lambda rank: (rank.cache.stats.backups, rank.cache.protected_size())), (3, 0))

    @each_layout
    def test_no_rank_settles_a_merged_copy_before_the_slowest(self, layout: str) -> None:
        group = Group(fault_spec(layout))
        group.hold()
        self._end_together(group, BATCH)
        group.submit()
        group.release(0, 1, 2)
        group.settle()
        self.assertEqual(group.agreed(lambda rank: rank.cache.protected_size()), 3 * 4)
        group.release(3)
        group.settle()
        self.assertEqual(group.agreed(lambda rank: rank.cache.protected_size()), 0)

    @each_layout
    def test_a_node_that_is_split_before_its_copy_is_submitted_is_copied_whole(self, layout: str) -> None:
        group = Group(fault_spec(layout))
        group.finish(begin(group, 1, 2), submit=False)
        group.finish(begin(group, 1, 3), submit=False)
        group.settle()
        self.assertEqual((group.agreed(_submissions), group.agreed(lambda rank: len(rank.nodes()))), (1, 3))
        group.evict_all()
        for pages in ((1, 2), (1, 3)):
            self.assertEqual(begin(group, *pages).host_pages, 1 + (pages == (1, 2)))

    def test_what_leaves_in_one_eviction_is_one_copy_and_one_wait(self) -> None:
        group = Group(CacheSpec(ranks=2, policy="write_back"))
        for page in BATCH:
            group.serve(chain(group.spec, page))
        group.hold()
        group.evict_all()
        self.assertEqual(group.agreed(lambda rank: (_submissions(rank), rank.engine.waits)), (1, 1))
        self.assertEqual(group.agreed(lambda rank: rank.cache.stats.backups), 3)
        group.release()
        for page in BATCH:
            self.assertEqual(begin(group, page).host_pages, 1)

    def test_a_flush_of_the_cache_drops_what_is_queued(self) -> None:
        group = Group(CacheSpec(ranks=2))
        self._end_together(group, BATCH)
        for rank in group.ranks:
            rank.cache.reset()
            rank.allocator.clear()
        group.submit()
        self.assertEqual(group.agreed(_submissions), 0)
        group.check()

    def test_what_is_queued_still_needs_its_rows(self) -> None:
        (rank,) = Group(CacheSpec(ranks=1)).ranks
        self.assertFalse(rank.controller.has_inflight_device_transfers())
        pages = rank.cache.slots.alloc_lanes(rank.layout.extend_lanes(0, 0, 1))
        assert pages is not None
        rank.controller.write(pages, node_id=7)
        self.assertTrue(rank.controller.has_inflight_device_transfers())

    @unittest.skipUnless(SINCE_0_5_23, "older schedulers do not ask for it: a turn of the event loop does it there")
    def test_sglangs_scheduler_submits_when_it_has_put_a_batch_into_the_tree(self) -> None:
        scheduler = Scheduler(CacheSpec(ranks=1))
        cache: Any = scheduler.cache  # older releases have no such call
        transfer = scheduler.cache.cache_controller.transfer
        requests = [scheduler.start(chain(scheduler.spec, page, page + 10)) for page in BATCH]
        with mock.patch.object(transfer, "back_up", wraps=transfer.back_up) as submitted:
            for request in requests:
                scheduler.finish(request)
            cache.flush_pending_backups()
            cache.flush_pending_backups()
        self.assertEqual([call.args[0].pages for call in submitted.call_args_list], [6])
        scheduler.settle()
        scheduler.check()

    def _end_together(self, group: Group, pages: Sequence[int]) -> None:
        requests = [begin(group, page) for page in pages]
        for request in requests:
            group.finish(request, submit=False)


def _submissions(rank: Any) -> int:  # noqa: ANN401  # a `Rank`
    return len(rank.engine.writes)


if __name__ == "__main__":
    unittest.main()
