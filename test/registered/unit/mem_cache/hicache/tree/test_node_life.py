"""The design's "Required unit coverage" 4: backup state, hits, splits, load-back and host eviction of tree nodes."""

from __future__ import annotations

import unittest
from typing import TYPE_CHECKING, Any

import numpy as np
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.test.ci.ci_register import register_cpu_ci

from sglang.srt.mem_cache.hicache.tree.calls import Insertion
from sglang.srt.mem_cache.layouts import CpHiCacheNodeMetadata, LayoutInvariantError
from support.caches import CacheSpec, CacheTestCase, Rank, chain
from support.groups import Group, Request

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache.tree.node import LayoutTreeNode

register_cpu_ci(est_time=20, suite="base-a-test-cpu")


class TestBackupState(CacheTestCase):
    def test_a_sharded_node_counts_as_backed_up_by_its_metadata_and_keeps_no_host_value(self) -> None:
        group = Group(CacheSpec(ranks=4))
        group.serve(chain(group.spec, 1, 2))
        for rank in group.ranks:
            node = _node(rank, chain(group.spec, 1, 2))
            self.assertTrue(node.backuped)
            self.assertEqual(node.host_len, 8)
            self.assertIsInstance(node.metadata, CpHiCacheNodeMetadata)
            self.assertIsNone(node.host_value)
        owned = sorted(len(_metadata(rank.nodes()[0]).host_pages) for rank in group.ranks)
        self.assertEqual(owned, [0, 0, 1, 1], "two ranks must own nothing for this to mean something")

    def test_without_a_backup_a_node_has_no_host_length(self) -> None:
        group = Group(CacheSpec(policy="write_back"))
        group.serve(chain(group.spec, 1, 2))
        for rank in group.ranks:
            (node,) = rank.nodes()
            self.assertEqual((node.backuped, node.host_len, node.host_value), (False, 0, None))

    def test_a_backed_up_node_is_not_written_again_on_further_hits(self) -> None:
        for layout in ("cp_shared", "identity"):
            group = Group(CacheSpec(layout=layout))
            for _ in range(5):
                group.serve(chain(group.spec, 1, 2, 3))
            for rank in group.ranks:
                self.assertEqual(len(rank.engine.writes), 1)
                self.assertEqual(rank.nodes()[0].hit_count, 5)
            group.check()

    def test_write_through_selective_waits_for_the_second_hit(self) -> None:
        group = Group(CacheSpec(policy="write_through_selective"))
        group.serve(chain(group.spec, 1, 2))
        self.assertEqual(group.each(lambda rank: len(rank.engine.writes)), [0, 0, 0])
        group.serve(chain(group.spec, 1, 2))
        self.assertEqual(group.each(lambda rank: len(rank.engine.writes)), [1, 1, 1])
        self.assertTrue(all(rank.nodes()[0].backuped for rank in group.ranks))

    def test_chunks_of_one_request_are_no_hits_of_each_other(self) -> None:
        group = Group(CacheSpec())
        request = _start(group, 1, 2)
        for rank in group.ranks:
            key, value = rank.key(request.tokens), rank.allocator.slots(request.pages)
            rank.cache.put(Insertion(key=key, value=value, is_use=False))
            (node,) = rank.nodes()
            self.assertEqual((node.hit_count, node.backuped, len(rank.engine.writes)), (0, False, 0))

    def test_a_child_is_not_backed_up_before_its_parent(self) -> None:
        group = Group(CacheSpec(policy="write_through_selective"))
        group.serve(chain(group.spec, 1, 2))
        group.serve(chain(group.spec, 1, 3))
        for rank in group.ranks:
            child = _node(rank, chain(group.spec, 1, 3))
            assert child.parent is not None
            rank.cache.parts.host_room.drop_copy(child.parent)  # as if the parent's backup had been refused
            self.assertEqual(rank.cache.write_backup(child), 0)
            self.assertIsNone(child.metadata)


class TestSplit(CacheTestCase):
    def test_split_divides_slots_host_length_and_metadata_by_ownership(self) -> None:
        for cut in (1, 2, 3):
            group = Group(CacheSpec())
            group.serve(chain(group.spec, 1, 2, 3, 4))
            before = group.each(lambda rank: _metadata(rank.nodes()[0]))
            group.serve(chain(group.spec, *range(1, cut + 1)))
            for rank, whole in zip(group.ranks, before, strict=True):
                upper, lower = rank.nodes()
                self.assertEqual((upper.host_len, lower.host_len), (cut * 4, (4 - cut) * 4))
                first, rest = whole.split(cut * 4)
                for node, part in ((upper, first), (lower, rest)):
                    metadata = _metadata(node)
                    self.assertEqual(metadata.owned_positions.tolist(), part.owned_positions.tolist())
                    self.assertEqual(metadata.host_indices.tolist(), part.host_indices.tolist())
                    self.assertEqual((metadata.lanes % 3).tolist(), (node.slot_pages % 3).tolist())
                joined = np.concatenate([_metadata(upper).host_pages, _metadata(lower).host_pages])
                self.assertEqual(joined.tolist(), whole.host_pages.tolist())
            group.check()

    def test_identity_split_divides_the_legacy_host_value_in_place(self) -> None:
        group = Group(CacheSpec(layout="identity"))
        group.serve(chain(group.spec, 1, 2, 3))
        whole = group.ranks[0].nodes()[0].host_value
        group.serve(chain(group.spec, 1))
        upper, lower = group.ranks[0].nodes()
        assert whole is not None
        assert upper.host_value is not None
        assert lower.host_value is not None
        self.assertEqual([*upper.host_value.tolist(), *lower.host_value.tolist()], whole.tolist())

    def test_both_halves_of_a_node_split_under_backup_are_backed_up_and_unlocked_once(self) -> None:
        group = Group(CacheSpec())
        group.hold()
        group.finish(_start(group, 1, 2, 3, 4))
        for cut in (3, 1):
            group.abort(_start(group, *range(1, cut + 1)))
        for rank in group.ranks:
            self.assertEqual([node.tokens for node in rank.nodes()], [4, 8, 4])
            self.assertEqual([node.lock_ref for node in rank.nodes()], [1, 1, 1])
        group.check()
        group.release()
        group.settle()
        for rank in group.ranks:
            self.assertEqual([(node.lock_ref, node.backuped) for node in rank.nodes()], [(0, True)] * 3)
            self.assertEqual(len(rank.engine.writes), 1)
        group.check()
        group.evict_all()
        self.assertEqual(_start(group, 1, 2, 3, 4).host_pages, 4)

    def test_a_split_under_load_keeps_protection_and_lock_on_both_halves_until_the_ack(self) -> None:
        group = Group(CacheSpec())
        group.serve(chain(group.spec, 1, 2, 3, 4))
        group.evict_all()
        group.hold()
        request = _start(group, 1, 2, 3, 4)
        group.abort(request)
        group.abort(_start(group, 1, 2))
        for rank in group.ranks:
            self.assertEqual([(n.lock_ref, n.host_ref_counter) for n in rank.nodes()], [(1, 1), (1, 1)])
        group.release()
        group.settle()
        for rank in group.ranks:
            self.assertEqual([(n.lock_ref, n.host_ref_counter) for n in rank.nodes()], [(0, 0), (0, 0)])
        group.check()

    def test_a_split_of_an_evicted_node_leaves_both_halves_on_the_host(self) -> None:
        group = Group(CacheSpec())
        group.serve(chain(group.spec, 1, 2, 3, 4))
        group.evict_all()
        request = _start(group, 1, 2, 9)
        self.assertEqual((request.device_pages, request.host_pages), (0, 2))
        for rank in group.ranks:
            upper, lower = rank.nodes()
            self.assertEqual((upper.value is None, lower.value is None), (False, True))
            self.assertEqual((upper.host_len, lower.host_len), (8, 8))
        group.settle()
        group.check()


class TestLoadBack(CacheTestCase):
    def test_the_hit_is_counted_in_host_lengths_although_no_node_has_a_host_value(self) -> None:
        group = Group(CacheSpec())
        group.serve(chain(group.spec, 1, 2))
        group.serve(chain(group.spec, 1, 2, 3, 4, 5))
        group.evict_all()
        for rank in group.ranks:
            match = rank.cache.match(rank.key(chain(group.spec, 1, 2, 3, 4, 5)))
            self.assertEqual((len(match.slots), match.host_tokens), (0, 20))
            self.assertIs(match.device_node, rank.cache.root_node)
            loaded = rank.cache.load_back(match.host_node)
            assert loaded is not None
            self.assertEqual(len(loaded), 20)
            self.assertEqual([len(node.value) for node in rank.nodes() if node.value is not None], [8, 12])

    def test_a_hit_shorter_than_the_threshold_is_recomputed_with_every_lock_as_before(self) -> None:
        group = Group(CacheSpec(load_back_pages=3))
        group.serve(chain(group.spec, 1, 2))
        group.evict_all()
        for rank in group.ranks:
            node = _node(rank, chain(group.spec, 1, 2))
            self.assertIsNone(rank.cache.load_back(node))
            self.assertEqual((node.lock_ref, node.host_ref_counter, rank.engine.loads), (0, 0, []))
        group.check()
        request = _start(group, 1, 2)
        self.assertEqual((request.device_pages, request.host_pages), (0, 0))
        group.finish(request)  # the recomputed slots become the node's, its host copy stays
        for rank in group.ranks:
            (node,) = rank.nodes()
            self.assertTrue(node.backuped)
            self.assertIsNotNone(node.value)
        group.check()

    def test_nodes_being_loaded_outlive_the_eviction_that_makes_room_for_them(self) -> None:
        # Under write_back, device eviction needs host pages and deletes host-only leaves for them.
        group = Group(CacheSpec(ranks=1, policy="write_back", device_pages=4, host_pages=4))
        group.serve(chain(group.spec, 1, 2, 3))
        group.evict_all()
        group.serve(chain(group.spec, 5, 6))
        group.serve(chain(group.spec, 7, 8))
        request = _start(group, 1, 2, 3)
        self.assertEqual(request.host_pages, 3)
        group.check()

    def test_a_load_without_room_returns_none_and_the_request_recomputes(self) -> None:
        group = Group(CacheSpec(device_pages=2))
        group.serve(chain(group.spec, 1, 2, 3))
        group.evict_all()
        running = _start(group, 21, 22, 23, 24)
        before = group.ranks[0].allocator.available_size()
        digest_of = [(n.lock_ref, n.host_ref_counter) for n in group.ranks[0].nodes()]
        request = group.start(chain(group.spec, 1, 2, 3))
        self.assertIsNone(request)
        self.assertEqual(group.ranks[0].allocator.available_size(), before)
        self.assertEqual([(n.lock_ref, n.host_ref_counter) for n in group.ranks[0].nodes()], digest_of)
        group.check()
        group.finish(running)
        group.settle()
        self.assertEqual(_start(group, 1, 2, 3).host_pages, 3)

    def test_a_load_of_a_node_deleted_after_the_match_is_recomputed(self) -> None:
        group = Group(CacheSpec(ranks=2, load_back_pages=0))
        group.serve(chain(group.spec, 1, 2, 3))
        for rank in group.ranks:
            rank.cache.evict(EvictParams(num_tokens=12))
            (node,) = rank.nodes()
            self.assertEqual(rank.cache.evict_host(12), 12)
            loaded, last = rank.cache.bring_back(node)
            self.assertEqual((len(loaded), last), (0, rank.cache.root_node))
        group.check()

    def test_a_load_of_what_is_on_the_device_returns_none_and_locks_nothing(self) -> None:
        group = Group(CacheSpec(ranks=2, load_back_pages=0))
        group.serve(chain(group.spec, 1, 2, 3))
        for rank in group.ranks:
            (node,) = rank.nodes()
            self.assertIsNone(rank.cache.load_back(node))
            self.assertIsNone(rank.cache.load_back(rank.cache.root_node))
            self.assertEqual((node.lock_ref, rank.cache.root_node.lock_ref), (0, 1))
        group.check()


class TestStaleNodes(CacheTestCase):
    def test_unlocking_a_node_of_before_a_reset_raises_and_leaves_the_new_tree_as_it_is(self) -> None:
        for step in ("dec_lock_ref", "inc_lock_ref"):
            group = Group(CacheSpec(ranks=2))
            group.serve(chain(group.spec, 1, 2, 3))
            for rank in group.ranks:
                (stale,) = rank.nodes()
                rank.cache.inc_lock_ref(stale)
                rank.cache.reset()
                rank.allocator.clear()
                with self.assertRaisesRegex(LayoutInvariantError, "another tree"):
                    getattr(rank.cache, step)(stale)
                self.assertEqual((rank.cache.evictable_size(), rank.cache.protected_size()), (0, 0))
                self.assertEqual(len(rank.accounting.device_order), 0)
            group.check()


class TestHostEviction(CacheTestCase):
    def test_deleting_a_host_copy_frees_the_owned_pages_and_counts_logical_tokens(self) -> None:
        group = Group(CacheSpec())
        group.serve(chain(group.spec, 1, 2, 3, 4))
        group.evict_all()
        self.assertEqual(group.agreed(lambda rank: rank.cache.evict_host(1)), 16)
        for rank in group.ranks:
            self.assertEqual((rank.nodes(), rank.host_free_pages()), ([], group.spec.host_pages))
        group.check()

    def test_a_copy_that_has_no_page_in_the_short_lane_stays_though_it_is_the_least_recent(self) -> None:
        group = Group(CacheSpec(ranks=4, host_pages=2, device_pages=8))
        lane_of = _chains_by_lane(group)
        # Host pages of lane 1 are full; the least recent victims lie in lane 0.
        for page in (lane_of[0][0], lane_of[0][1], lane_of[1][0], lane_of[1][1]):
            group.serve(chain(group.spec, page))
        group.evict_all()
        group.serve(chain(group.spec, lane_of[1][2]))
        group.evict_all()
        for rank in group.ranks:
            self.assertEqual(rank.controller.ledger.used_pages, (2, 2, 0, 0))
            left = {int(node.key.token_ids[0]) // 1_000 for node in rank.nodes()}
            self.assertEqual(left, {*lane_of[0][:2], *lane_of[1][1:3]})
        group.check()

    def test_a_leaf_goes_before_its_parent_and_devices_nodes_stay(self) -> None:
        group = Group(CacheSpec())
        group.serve(chain(group.spec, 1, 2))
        group.serve(chain(group.spec, 1, 2, 3))
        group.evict_all()
        group.abort(_start(group, 1, 2))
        group.settle()
        self.assertEqual(group.agreed(lambda rank: rank.cache.evict_host(100)), 4)
        for rank in group.ranks:
            (node,) = rank.nodes()
            self.assertTrue(node.backuped)
        group.check()

    def test_a_backup_that_is_put_off_leaves_every_rank_as_it_was(self) -> None:
        group = Group(CacheSpec(host_pages=2, device_pages=8))
        group.serve(chain(group.spec, 1, 2, 3, 4, 5, 6))  # fills the host, stays on the device
        request = _start(group, 11, 12)
        group.finish(request)
        for rank in group.ranks:
            node = _node(rank, request.tokens)
            self.assertEqual((node.backuped, node.lock_ref, len(rank.engine.writes)), (False, 0, 1))
            self.assertEqual(rank.controller.ledger.used_pages, (2, 2, 2))
            digest = group.digests()
            self.assertEqual(rank.cache.write_backup(node), 0)
            self.assertEqual(group.digests(), digest)
        group.check()

    def test_nothing_is_given_up_for_a_node_larger_than_the_whole_host_tier(self) -> None:
        group = Group(CacheSpec(host_pages=2, device_pages=8))
        group.serve(chain(group.spec, 1, 2, 3, 4, 5, 6))  # fills the host
        group.evict_all()
        group.serve(chain(group.spec, *range(31, 51)))
        group.evict_all()
        for rank in group.ranks:
            self.assertEqual(rank.controller.ledger.used_pages, (2, 2, 2))
            self.assertEqual(rank.cache.stats.refused_backups, 1)
        group.check()


class TestDeviceEviction(CacheTestCase):
    def test_write_back_backs_up_on_eviction_and_waits_for_the_copy_before_slots_are_free(self) -> None:
        group = Group(CacheSpec(policy="write_back"))
        group.hold()
        group.finish(_start(group, 1, 2, 3))
        self.assertEqual(group.each(lambda rank: len(rank.engine.writes)), [0, 0, 0])
        evicted = group.agreed(lambda rank: rank.cache.evict(EvictParams(num_tokens=1)).num_tokens_evicted)
        self.assertEqual(evicted, 12)
        for rank in group.ranks:
            (node,) = rank.nodes()
            self.assertEqual((node.value, node.host_len, node.host_ref_counter), (None, 12, 0))
            self.assertEqual((rank.engine.waits, rank.controller.ack_write_queue), (1, []))
        group.each(lambda rank: rank.scribble())
        self.assertEqual(_start(group, 1, 2, 3).host_pages, 3)

    def test_write_back_without_host_room_deletes_the_node_and_what_lies_below_it(self) -> None:
        group = Group(CacheSpec(ranks=1, policy="write_back", host_pages=2, device_pages=8))
        group.serve(chain(group.spec, 1, 2, 3, 4))
        group.serve(chain(group.spec, 1, 2, 3, 4, 5))
        group.evict_all()
        self.assertEqual(group.ranks[0].nodes(), [])
        group.check()
        self.assertEqual(group.ranks[0].allocator.available_size(), group.ranks[0].allocator.size)

    def test_a_leaf_without_host_copy_is_deleted_under_write_through(self) -> None:
        group = Group(CacheSpec(policy="write_through_selective"))
        group.serve(chain(group.spec, 1, 2))
        group.evict_all()
        for rank in group.ranks:
            self.assertEqual((rank.nodes(), rank.cache.root_node.children), ([], {}))


def _start(group: Group, *pages: int) -> Request:
    request = group.start(chain(group.spec, *pages))
    assert request is not None, "the request finds no room"
    return request


def _node(rank: Rank, tokens: Any) -> LayoutTreeNode[Any]:  # noqa: ANN401  # tokens of a chain
    return rank.cache.parts.tree._walk(rank.key(tokens), [])  # noqa: SLF001  # a match ends at the host


def _metadata(node: LayoutTreeNode[Any]) -> Any:  # noqa: ANN401  # the layout's metadata
    assert node.metadata is not None
    return node.metadata


def _chains_by_lane(group: Group) -> dict[int, list[int]]:
    """First pages of chains, by the lane that their hash selects."""
    rank = group.ranks[0]
    lanes: dict[int, list[int]] = {}
    for page in range(1, 60):
        lanes.setdefault(rank.layout.chain_base(chain(group.spec, page).tobytes(), ""), []).append(page)
    return lanes


if __name__ == "__main__":
    unittest.main()
