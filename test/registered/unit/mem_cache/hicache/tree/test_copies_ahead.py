"""A full host tier: what leaves the device next is copied before, so that no eviction waits for it.

Nodes are of one page, on a device of 64, so the window is of two.
"""

from __future__ import annotations

import unittest
from typing import TYPE_CHECKING
from unittest import mock

from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.test.ci.ci_register import register_cpu_ci

from sglang.srt.mem_cache.hicache.tree.leaf_heap import EvictionOrder
from support.caches import CacheSpec, CacheTestCase, chain
from support.groups import Group

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache.accepted import WritePolicy

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

FULL_AFTER = 16


class TestCopiesAhead(CacheTestCase):
    def test_an_eviction_finds_on_the_host_what_an_earlier_one_had_copied(self) -> None:
        group = _group()
        _serve(group, *range(FULL_AFTER + 12))
        _evict(group, FULL_AFTER)  # these were copied at their first use
        for end in range(FULL_AFTER + 2, FULL_AFTER + 12, 2):
            self.assertEqual(_on_host(group), {*range(end - FULL_AFTER, end)}, "the last two are still on the device")
            _evict(group, 2)
            group.settle()
        self.assertEqual(group.agreed(lambda rank: rank.cache.stats.late_backups), 0)
        group.check()

    def test_nothing_is_copied_ahead_before_a_backup_had_to_be_put_off(self) -> None:
        group = _group(policy="write_through_selective")
        _serve(group, 1, 2, 3)
        _serve(group, 2, 3, 4)  # used twice: 2 and 3 are copied at once, 4 has not earned it
        with mock.patch.object(EvictionOrder, "first_until") as looks_at_what_is_next:
            _evict(group, 1)
        looks_at_what_is_next.assert_not_called()

    def test_only_what_has_the_hits_for_it_is_copied(self) -> None:
        group = _group(policy="write_through_selective")
        twice = [*range(FULL_AFTER), 21]
        _serve(group, *twice[:-1], *twice[:-1], 20, 21, 21, 22)
        _evict(group, FULL_AFTER)
        self.assertEqual(_on_host(group), {*range(1, FULL_AFTER), 21})

    def test_a_copy_in_the_window_does_not_give_way_to_another_one(self) -> None:
        group = _group()
        _serve(group, *range(FULL_AFTER + 2))
        _evict(group, FULL_AFTER - 1)  # the next two are one that was copied at its first use, and one that was not
        self.assertEqual(_on_host(group), {*range(1, FULL_AFTER + 1)}, "0 gave way, which is on the host alone")

    def test_the_window_is_of_whole_pages_as_in_a_plan_which_counts_in_pages(self) -> None:
        spec = CacheSpec(layout="identity", ranks=2, device_pages=47, host_pages=FULL_AFTER, policy="write_through")
        group = Group(spec)
        _serve(group, *range(FULL_AFTER + 4))
        _evict(group, FULL_AFTER)
        self.assertEqual(
            _on_host(group), {*range(1, FULL_AFTER + 1)}, "one is copied: a 32nd of 47 pages, rounded down"
        )

    def test_a_host_smaller_than_a_window_of_the_device_serves_what_has_left_it(self) -> None:
        group = _group(host_pages=2)
        for _ in range(3):
            _serve(group, *range(65))  # each leaves the device when the one before it comes back
        self.assertEqual(group.agreed(lambda rank: rank.cache.stats.loads), 2 * 65)
        group.check()

    def test_nothing_is_locked_and_slots_are_free_when_their_copy_has_ended(self) -> None:
        group = _group()
        _serve(group, *range(FULL_AFTER + 4))
        group.hold()
        _evict(group, FULL_AFTER)
        for rank in group.ranks:
            under_way = [node for ack in rank.controller.ack_write_queue for node in ack.node_ids]
            self.assertEqual((len(under_way), rank.cache.protected_size()), (2, 0))
            self.assertEqual(rank.cache.evictable_size(), 4 * rank.spec.page_size)
        self.assertEqual(_evict(group, 4), 4)
        group.release()
        group.settle()
        for page in range(FULL_AFTER, FULL_AFTER + 4):
            request = group.start(chain(group.spec, page))
            assert request is not None
            self.assertEqual(request.host_pages, 1, "with the right bytes, which `start` compares")
            group.abort(request)
        group.check()

    def test_an_eviction_waits_for_the_copies_of_what_leaves_and_for_no_later_ones(self) -> None:
        group = _group()
        _serve(group, *range(FULL_AFTER + 6))
        group.hold()
        _evict(group, FULL_AFTER)  # the next two are copied together
        _evict(group, 1)
        _evict(group, 1)  # and then one by one
        second = [rank.controller.ack_write_queue[1] for rank in group.ranks]
        _evict(group, 1)
        for rank, ack in zip(group.ranks, second, strict=True):
            self.assertIs(rank.controller.ack_write_queue[0], ack)
        group.check()

    def test_an_eviction_goes_on_with_what_its_wait_for_a_copy_has_unlocked(self) -> None:
        group = _group(host_pages=FULL_AFTER)
        _serve(group, *range(FULL_AFTER - 1))  # copied
        group.hold()
        _serve(group, 100, settle=False)  # its copy is under way, so it is locked
        _serve(group, 101, settle=False)  # and this one was put off: it is copied as it leaves
        pages = FULL_AFTER + 1
        self.assertEqual(_evict(group, pages), pages)
        group.check()

    def test_what_finds_no_room_stays_as_it_was(self) -> None:
        group = _group()
        group.hold()
        _serve(group, *range(FULL_AFTER + 2), settle=False)  # all but the last two are under way
        _evict(group, 1)
        self.assertEqual(_on_host(group), {*range(FULL_AFTER)})
        self.assertEqual(group.agreed(lambda rank: rank.cache.stats.refused_backups), 1, "what left, not what is next")
        group.check()

    def test_under_write_back_nothing_is_copied_before_it_leaves(self) -> None:
        group = _group(policy="write_back")
        _serve(group, *range(20))
        _evict(group, FULL_AFTER)
        _evict(group, 1)
        self.assertEqual(_on_host(group), {*range(1, FULL_AFTER + 1)})


def _group(host_pages: int = FULL_AFTER, policy: WritePolicy = "write_through") -> Group:
    return Group(CacheSpec(layout="identity", ranks=2, device_pages=64, host_pages=host_pages, policy=policy))


def _serve(group: Group, *pages: int, settle: bool = True) -> None:
    for page in pages:
        request = group.start(chain(group.spec, page))
        assert request is not None, "the request finds no room"
        group.finish(request)
        if settle:
            group.settle()


def _evict(group: Group, pages: int) -> int:
    """Evict so many pages; returns how many it were."""
    size = group.spec.page_size
    return group.agreed(lambda rank: rank.cache.evict(EvictParams(num_tokens=pages * size)).num_tokens_evicted) // size


def _on_host(group: Group) -> set[int]:
    """The pages, by name, that have a host copy."""
    return set(
        group.agreed(
            lambda rank: sorted(node.key.token_ids[0] // 1_000 for node in rank.nodes() if node.metadata is not None)
        )
    )


if __name__ == "__main__":
    unittest.main()
