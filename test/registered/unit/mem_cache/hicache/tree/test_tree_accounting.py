"""Locks, quotas, shortfalls, lifetimes: kinds of fault that caches like this one have had."""

from __future__ import annotations

import unittest
from typing import Any, get_args

import numpy as np
from sglang.srt.disaggregation.kv_events import BlockStored, StorageMedium
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
from sglang.test.ci.ci_register import register_cpu_ci

from sglang.srt.mem_cache.hicache.accepted import WritePolicy
from sglang.srt.mem_cache.hicache.check.invariants import violations
from sglang.srt.mem_cache.hicache.tree.calls import Insertion
from sglang.srt.mem_cache.layouts import LayoutInvariantError
from sglang.srt.mem_cache.layouts.testing_metadata import stored_arrays
from support.caches import CacheSpec, CacheTestCase, Rank, chain
from support.groups import Group, Request

register_cpu_ci(est_time=20, suite="base-a-test-cpu")


class TestMemQuota(CacheTestCase):
    def test_a_hit_of_ten_pages_loads_with_a_quota_of_ten_and_not_of_nine(self) -> None:
        for quota, loaded_pages in ((10, 10), (9, 0), (0, 0), (None, 10)):
            group = Group(CacheSpec())
            group.serve(chain(group.spec, *range(10)))
            group.evict_all()
            loaded = self._load(group, chain(group.spec, *range(10)), quota)
            self.assertEqual(loaded, loaded_pages * 4)
            if not loaded_pages:
                self.assertEqual(group.each(lambda rank: rank.engine.loads), [[]] * 3)
                for rank in group.ranks:
                    self.assertEqual([(n.lock_ref, n.host_ref_counter) for n in rank.nodes()], [(0, 0)])
            group.check()

    def test_the_devices_part_of_the_prefix_uses_up_quota_while_it_can_be_evicted(self) -> None:
        for quota, loaded_pages in ((6, 4), (5, 0)):
            group = Group(CacheSpec())
            group.serve(chain(group.spec, *range(6)))
            group.evict_all()
            group.serve(chain(group.spec, 0, 1))  # loads two pages: four stay on the host
            self.assertEqual(self._load(group, chain(group.spec, *range(6)), quota), loaded_pages * 4)
            group.settle()
            self.assertEqual(group.each(lambda rank: {node.lock_ref for node in rank.nodes()}), [{0}] * 3)
            group.check()

    def _load(self, group: Group, tokens: Any, quota_pages: int | None) -> int:  # noqa: ANN401  # tokens of a chain
        quota = None if quota_pages is None else quota_pages * 4

        def load(rank: Rank) -> int:
            match = rank.cache.match(rank.key(tokens))
            value, node = rank.cache.bring_back(match.host_node, quota)
            self.assertIsNotNone(node.value, "the node that the scheduler locks is on the device")
            rank.cache.ready_to_load_host_cache()
            return len(value)

        return group.agreed(load)


class TestLocks(CacheTestCase):
    def test_locks_move_a_whole_prefix_between_evictable_and_protected(self) -> None:
        group = Group(CacheSpec())
        group.serve(chain(group.spec, 1, 2))
        group.serve(chain(group.spec, 1, 2, 3))
        for rank in group.ranks:
            cache, leaf = rank.cache, rank.nodes()[1]
            self.assertEqual(cache.inc_lock_ref(leaf).delta, -12)
            self.assertEqual(cache.inc_lock_ref(leaf).delta, 0)
            self.assertEqual((cache.evictable_size(), cache.protected_size()), (0, 12))
            self.assertEqual(cache.evict(EvictParams(num_tokens=4)).num_tokens_evicted, 0)
            self.assertEqual(cache.dec_lock_ref(leaf).delta, 0)
            self.assertEqual(cache.dec_lock_ref(leaf).delta, 12)
        group.check()

    def test_unlocking_too_often_raises_and_changes_nothing(self) -> None:
        group = Group(CacheSpec())
        group.serve(chain(group.spec, 1))
        for rank in group.ranks:
            (node,) = rank.nodes()
            with self.assertRaisesRegex(LayoutInvariantError, f"node {node.id} is unlocked 1 times but holds 0 locks"):
                rank.cache.dec_lock_ref(node)
        group.check()

    def test_unlocking_a_node_of_a_tree_that_was_reset_is_a_loud_error(self) -> None:
        (rank,) = Group(CacheSpec(ranks=1)).ranks
        node = _insert(rank, chain(rank.spec, 1))
        rank.cache.reset()
        with self.assertRaisesRegex(LayoutInvariantError, "node of another tree .* was the cache reset"):
            rank.cache.inc_lock_ref(node)

    def test_two_requests_that_share_pages_lock_them_twice(self) -> None:
        group = Group(CacheSpec())
        group.serve(chain(group.spec, 1, 2))
        first, second = _start(group, 1, 2, 3), _start(group, 1, 2, 3)
        group.check()
        self.assertEqual(group.finish(first), 8)
        self.assertEqual(group.finish(second), 12, "the second one brings duplicates")
        group.settle()
        group.check()
        self.assertEqual(group.agreed(lambda rank: rank.cache.evictable_size()), 12)


class TestEvictionByShortfall(CacheTestCase):
    def test_three_pages_with_two_free_evict_one(self) -> None:
        group = Group(CacheSpec(layout="identity", ranks=2))
        for page in range(6):
            group.serve(chain(group.spec, page))
        pages = group.agreed(lambda rank: _count(rank.cache.alloc_slots(np.zeros(3, dtype=np.int16))))
        self.assertEqual(pages, 3)
        self.assertEqual(group.agreed(lambda rank: rank.cache.stats.evicted_device_tokens), 4)

    def test_eviction_goes_on_until_the_lane_that_is_short_has_room(self) -> None:
        group = Group(CacheSpec(device_pages=2))
        roots = _roots_by_lane(group)
        for root in (*roots[0][:2], *roots[1][:2]):
            group.serve(chain(group.spec, root))
        lanes = np.array([1], dtype=np.int16)
        self.assertEqual(group.agreed(lambda rank: _count(rank.cache.alloc_slots(lanes))), 1)
        # Two leaves of lane 0 are older and go first; the second one of lane 1 stays.
        self.assertEqual(group.agreed(lambda rank: rank.allocator.room_pages().tolist()), [2, 0, 2])
        self.assertEqual(group.agreed(lambda rank: rank.cache.evictable_size()), 4)

    def test_a_demand_that_one_lane_can_never_meet_evicts_nothing(self) -> None:
        group = Group(CacheSpec(device_pages=4))
        group.serve(chain(group.spec, *range(6)))
        before = group.digests()
        lanes = np.array([1] * 5, dtype=np.int16)
        self.assertEqual(group.agreed(lambda rank: _count(rank.cache.alloc_slots(lanes))), -1)
        self.assertEqual(group.digests(), before)
        group.check()

    def test_enough_room_evicts_nothing(self) -> None:
        group = Group(CacheSpec())
        group.serve(chain(group.spec, 1, 2))
        group.each(lambda rank: rank.cache.alloc_slots(np.array([0, 1, 2], dtype=np.int16)))
        self.assertEqual(group.agreed(lambda rank: rank.cache.stats.evicted_device_tokens), 0)

    def test_whatever_is_called_evictable_can_be_evicted(self) -> None:
        policies: tuple[WritePolicy, ...] = get_args(WritePolicy)
        for policy in policies:
            group = Group(CacheSpec(policy=policy, host_pages=3))
            for tail in range(3):
                group.serve(chain(group.spec, 1, 2, 10 + tail, 20 + tail))
            held = _start(group, 1, 2)
            self.assertEqual(group.agreed(lambda rank: rank.cache.evictable_size()), 24)
            freed = group.agreed(lambda rank: rank.cache.evict(EvictParams(num_tokens=24)).num_tokens_evicted)
            self.assertEqual(freed, 24)
            group.check()
            group.abort(held)

    def test_tokens_that_write_back_could_not_keep_are_counted_as_dropped(self) -> None:
        group = Group(CacheSpec(policy="write_back", host_pages=2))
        group.serve(chain(group.spec, *range(12)))
        group.evict_all()
        self.assertEqual(group.agreed(lambda rank: rank.cache.stats.dropped_tokens), 48)
        self.assertEqual(group.agreed(lambda rank: rank.cache.stats.refused_backups), 1)


class TestTreeShape(CacheTestCase):
    def test_looking_for_what_is_absent_creates_no_child(self) -> None:
        group = Group(CacheSpec())
        group.serve(chain(group.spec, 1, 2))
        for rank in group.ranks:
            for tokens in (chain(group.spec, 7), chain(group.spec, 1, 9), chain(group.spec, 1, 2, 3)):
                rank.cache.match(rank.key(tokens))
            for node in (rank.cache.root_node, *rank.nodes()):
                self.assertIs(type(node.children), dict)
            self.assertEqual([node.tokens for node in rank.nodes()], [4, 4])  # split by the second look

    def test_insert_with_too_few_slots_raises_with_both_numbers_and_changes_nothing(self) -> None:
        (rank,) = Group(CacheSpec(ranks=1)).ranks
        with self.assertRaisesRegex(LayoutInvariantError, "insert of 8 tokens came with 4 slots"):
            rank.cache.put(Insertion(key=rank.key(chain(rank.spec, 1, 2)), value=rank.take(4)))
        with self.assertRaisesRegex(LayoutInvariantError, "insert of 8 tokens came without slots"):
            rank.cache.insert(InsertParams(key=rank.key(chain(rank.spec, 1, 2))))
        self.assertEqual(rank.nodes(), [])

    def test_insert_with_too_few_page_numbers_raises_and_leaves_no_empty_node(self) -> None:
        (rank,) = Group(CacheSpec(ranks=1)).ranks
        key, value = rank.key(chain(rank.spec, 1, 2)), rank.take(8)
        with self.assertRaisesRegex(LayoutInvariantError, "insert of 8 tokens came with 1 slot pages"):
            rank.cache.put(Insertion(key=key, value=value, slot_pages=np.array([2], dtype=np.int64)))
        self.assertEqual((rank.nodes(), rank.cache.root_node.children), ([], {}))

    def test_page_numbers_that_come_with_an_insert_are_copied_and_those_of_the_slots(self) -> None:
        (rank,) = Group(CacheSpec(ranks=1)).ranks
        pages = rank.allocator.alloc_lanes(np.zeros(3, dtype=np.int16))
        assert pages is not None
        kept, value = pages.tolist(), rank.allocator.slots(pages)
        key = rank.key(chain(rank.spec, 1, 2, 3))
        rank.cache.put(Insertion(key=key, value=value, slot_pages=pages))
        pages.fill(0)
        (node,) = rank.nodes()
        self.assertEqual(node.slot_pages.tolist(), kept)
        self.assertEqual(violations(rank.cache), [])

    def test_a_chain_shorter_than_a_page_is_neither_kept_nor_found(self) -> None:
        (rank,) = Group(CacheSpec(ranks=1)).ranks
        tokens = chain(rank.spec, 1)[:3]
        inserted = rank.cache.put(Insertion(key=rank.key(tokens), value=rank.take(4)))
        self.assertEqual(inserted.known_tokens, 0)
        match = rank.cache.match(rank.key(tokens))
        self.assertEqual((len(match.slots), match.host_tokens, rank.nodes()), (0, 0, []))

    def test_both_halves_of_a_node_split_under_backup_are_announced_as_stored_on_the_host(self) -> None:
        group = Group(CacheSpec(events=True))
        group.hold()
        group.finish(_start(group, 1, 2, 3))
        group.abort(_start(group, 1))
        for rank in group.ranks:
            self.assertEqual(_stored(rank, StorageMedium.CPU), [])
        group.release()
        group.settle()
        for rank in group.ranks:
            self.assertEqual(_stored(rank, StorageMedium.CPU), chain(group.spec, 1, 2, 3).tolist())


class TestLifetimes(CacheTestCase):
    def test_reset_gives_everything_back_also_with_copies_under_way(self) -> None:
        group = Group(CacheSpec())
        group.serve(chain(group.spec, 1, 2, 3))
        group.evict_all()
        group.hold()
        group.finish(_start(group, 1, 2, 3, 4, 5))
        for rank in group.ranks:
            rank.cache.reset()
            rank.allocator.clear()
            self.assertEqual((rank.nodes(), rank.cache.evictable_size(), rank.cache.protected_size()), ([], 0, 0))
            self.assertEqual((len(rank.accounting.device_order), len(rank.accounting.host_order)), (0, 0))
            self.assertEqual(rank.controller.ack_write_queue + rank.controller.ack_load_queue, [])
            self.assertEqual(rank.controller.ledger.used_pages, (0, 0, 0))
            self.assertEqual(rank.host_free_pages(), group.spec.host_pages)
            self.assertEqual(rank.engine.write_events + rank.engine.load_events, [], "a copy would still run")
        group.release()
        group.settle()
        group.check()
        group.serve(chain(group.spec, 1, 2, 3))
        group.evict_all()
        self.assertEqual(_start(group, 1, 2, 3).host_pages, 3)

    def test_nodes_keep_no_larger_array_or_tensor_alive(self) -> None:
        for layout in ("cp_shared", "identity"):
            group = Group(CacheSpec(layout=layout, device_pages=20, host_pages=40))
            group.serve(chain(group.spec, *range(12)))
            for cut in (9, 5, 2):
                group.serve(chain(group.spec, *range(cut)))
            self._check_sizes(group)
            group.evict_all()
            group.serve(chain(group.spec, *range(12)))
            self._check_sizes(group)

    def _check_sizes(self, group: Group) -> None:
        for rank in group.ranks:
            self.assertEqual(len(rank.nodes()), 4)
            for node in rank.nodes():
                assert node.value is not None
                assert node.metadata is not None
                self.assertEqual(node.value.untyped_storage().nbytes(), node.tokens * 8)
                arrays = [node.slot_pages, node.metadata.host_pages, getattr(node.metadata, "lanes", node.slot_pages)]
                for owner in arrays:
                    self.assertIsNone(owner.base)
                self.assertLessEqual(
                    sum(array.nbytes for array in stored_arrays(node.metadata)), node.tokens // 4 * (8 + 2)
                )


def _start(group: Group, *pages: int) -> Request:
    request = group.start(chain(group.spec, *pages))
    assert request is not None, "the request finds no room"
    return request


def _insert(rank: Rank, tokens: Any) -> Any:  # noqa: ANN401  # tokens of a chain; a node
    value = rank.take(len(tokens))
    return rank.cache.put(Insertion(key=rank.key(tokens), value=value)).node


def _stored(rank: Rank, medium: StorageMedium) -> list[int]:
    """Tokens announced as stored there, in order."""
    events = [event for event in rank.cache.take_events() if isinstance(event, BlockStored) and event.medium == medium]
    return [token for event in events for token in event.token_ids]


def _count(pages: np.ndarray[Any, Any] | None) -> int:
    return -1 if pages is None else len(pages)


def _roots_by_lane(group: Group) -> dict[int, list[int]]:
    lanes: dict[int, list[int]] = {}
    for page in range(1, 60):
        lane = group.ranks[0].layout.chain_base(chain(group.spec, page).tobytes(), "")
        lanes.setdefault(lane, []).append(page)
    return lanes


if __name__ == "__main__":
    unittest.main()
