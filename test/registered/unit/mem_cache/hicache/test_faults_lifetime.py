"""Faults 15 to 36 of docs/faults.md that no other test covers with every layout: lifetimes, splits, keys, payload."""

from __future__ import annotations

import unittest
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from sglang.srt.disaggregation.kv_events import BlockStored, StorageMedium
from sglang.test.ci.ci_register import register_cpu_ci

from sglang.srt.mem_cache.hicache.accepted import WritePolicy
from sglang.srt.mem_cache.hicache.tree.calls import Insertion
from sglang.srt.mem_cache.layouts import PoolKind
from support.caches import CacheTestCase, Rank, chain, page_views
from support.faults import RANKS, begin, each_layout, evict, fault_spec, fill_host_lane, locks, node_of
from support.groups import Group

if TYPE_CHECKING:
    from collections.abc import Callable

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

POLICIES: tuple[WritePolicy, ...] = get_args(WritePolicy)


class TestLeaks(CacheTestCase):
    @each_layout
    def test_15_a_request_aborted_at_any_stage_of_its_load_gives_everything_back(self, layout: str) -> None:
        stages: tuple[Callable[[Group], object], ...] = (
            lambda group: None,  # the copy is under way
            lambda group: group.each(lambda rank: rank.engine.finish_loads()),  # it has ended, no rank has settled it
            lambda group: group.ranks[0].engine.finish_loads(),  # it has ended on one rank only
            lambda group: begin(group, 1, 2),  # its node was split
        )
        for stage in stages:
            group = Group(fault_spec(layout))
            group.serve(chain(group.spec, 1, 2, 3, 4))
            group.evict_all()
            before = _held(group)
            group.hold()
            request = begin(group, 1, 2, 3, 4, 5)
            stage(group)
            for running in list(group.running):
                group.abort(running)
            self.assertIn(request.host_pages, (4,))
            group.release()
            group.settle()
            group.check()
            self.assertEqual(locks(group), {(0, 0)})
            evict(group, 4)
            self.assertEqual(_held(group), before)

    @each_layout
    def test_16_after_a_reset_each_free_list_holds_each_page_once(self, layout: str) -> None:
        group = Group(fault_spec(layout))
        group.serve(chain(group.spec, 1, 2, 3))
        group.evict_all()
        group.hold()
        request = begin(group, 1, 2, 3, 4, 5)
        for rank in group.ranks:
            rank.allocator.free_group_begin()
            rank.allocator.free(rank.allocator.slots(request.pages[3:]))  # queued when the reset comes
            rank.cache.reset()
            rank.allocator.clear()
            rank.allocator.free_group_end()
            slot_pages = rank.allocator.get_all_free_pages().tolist()
            self.assertEqual(len(slot_pages), len(set(slot_pages)))
            self.assertEqual(len(slot_pages) * 4, rank.allocator.size)
            host = rank.cache.token_to_kv_pool_host
            rows = host.alloc(host.size)
            assert rows is not None
            self.assertEqual(sorted(rows.tolist()), list(range(host.size)))
            self.assertIsNone(host.alloc(4))

    @each_layout
    def test_17_host_pages_are_not_chosen_between_the_start_of_their_load_and_its_ack(self, layout: str) -> None:
        group = Group(fault_spec(layout))
        group.serve(chain(group.spec, 1, 2, 3))
        group.evict_all()
        group.hold()
        for rank in group.ranks:
            match = rank.cache.match(rank.key(chain(rank.spec, 1, 2, 3)))
            self.assertIsNotNone(rank.cache.load_back(match.host_node))
            for step in (rank.cache.ready_to_load_host_cache, rank.engine.run_loads, lambda: None):
                self.assertEqual(rank.cache.evict_host(99), 0)
                self.assertEqual(node_of(rank, 1, 2, 3).host_len, 12)
                step()
        group.release()
        group.settle()
        self.assertEqual(evict(group, 3), 3)
        self.assertEqual(group.agreed(lambda rank: rank.cache.evict_host(99)), 12)
        group.check()

    @each_layout
    def test_18_device_pages_are_not_reused_before_their_backup_has_run(self, layout: str) -> None:
        for policy in POLICIES:
            group = Group(fault_spec(layout, policy=policy))
            hits = 2 if policy == "write_through_selective" else 1
            for _ in range(hits - 1):
                group.serve(chain(group.spec, 1, 2, 3))
            group.hold()
            group.finish(begin(group, 1, 2, 3))
            evicted = evict(group, 99)
            self.assertEqual(evicted, 3 if policy == "write_back" else 0)
            self._overwrite_free_pages(group)
            group.release()
            group.settle()
            group.evict_all()
            self.assertEqual(begin(group, 1, 2, 3).host_pages, 3)  # begin() has compared the bytes

    def _overwrite_free_pages(self, group: Group) -> None:
        for rank in group.ranks:
            free = rank.allocator.get_all_free_pages().numpy()
            for _, row in rank.rows(free):
                for pages in page_views(rank.device_pool):
                    pages[row] = 0x5A

    @each_layout
    def test_19_a_load_that_finds_no_room_leaves_no_protection_on_any_of_its_nodes(self, layout: str) -> None:
        group = Group(fault_spec(layout, pages=8))
        for length in (2, 4, 6):
            group.serve(chain(group.spec, *range(length)))
        group.evict_all()
        running = begin(group, *range(20, 24))
        before = group.digests()
        for rank in group.ranks:
            self.assertIsNone(rank.cache.load_back(node_of(rank, *range(6))))
            self.assertEqual([n.host_ref_counter for n in rank.nodes()], [0] * 3)
        self.assertEqual(locks(group), {(0, 0)})
        self.assertEqual(len(set(group.digests())), 1)
        self.assertEqual(len(before), RANKS)
        group.check()
        group.abort(running)


class TestSplitAndTree(CacheTestCase):
    @each_layout
    def test_20_both_parts_of_a_node_split_under_backup_are_backed_up_with_one_release(self, layout: str) -> None:
        group = Group(fault_spec(layout))
        group.hold()
        group.finish(begin(group, 1, 2, 3, 4))
        for cut in (3, 1):
            group.abort(begin(group, *range(1, cut + 1)))
        group.check()
        group.release()
        group.settle()
        for rank in group.ranks:
            self.assertEqual(
                [(n.tokens, n.lock_ref, n.backuped) for n in rank.nodes()], [(4, 0, True), (8, 0, True), (4, 0, True)]
            )
        group.evict_all()
        self.assertEqual(begin(group, 1, 2, 3, 4).host_pages, 4)

    @each_layout
    def test_21_the_parts_of_a_split_node_come_back_as_the_whole(self, layout: str) -> None:
        every = tuple(range(1, 9))  # two pages for each of four owners
        for cut in range(1, 8):
            group = Group(fault_spec(layout))
            group.serve(chain(group.spec, *every))
            whole = group.each(lambda rank: _metadata(rank, *every).host_pages.tolist())
            group.evict_all()
            group.abort(begin(group, *every[:cut]))
            for rank, pages in zip(group.ranks, whole, strict=True):
                upper, lower = _metadata(rank, *every[:cut]), _metadata(rank, *every)
                self.assertEqual([*upper.host_pages.tolist(), *lower.host_pages.tolist()], pages)
                self.assertEqual((upper.logical_len, lower.logical_len), (cut * 4, 32 - cut * 4))
            group.settle()
            self.assertEqual(begin(group, *every).prefix_pages, 8)
            group.check()

    @each_layout
    def test_22_a_child_is_not_backed_up_where_its_parent_found_no_room(self, layout: str) -> None:
        group = Group(fault_spec(layout, host=16, pages=64))
        fill_host_lane(group, 0)
        parent = tuple(range(300, 304))
        group.serve(chain(group.spec, *parent))
        for tail in range(310, 316):  # one page each, for most of which there is room
            group.serve(chain(group.spec, *parent, tail))
            group.check()
            self.assertEqual([node_of(rank, *parent, tail).host_len for rank in group.ranks], [0] * RANKS)

    @each_layout
    def test_23_completions_of_no_whole_page_make_no_node(self, layout: str) -> None:
        group = Group(fault_spec(layout))
        for rank in group.ranks:
            for tokens in (0, 3):
                value = rank.allocator.slots(np.array([4], dtype=np.int64))[:tokens]
                result = rank.cache.put(Insertion(key=rank.key(chain(rank.spec, 1)[:tokens]), value=value))
                self.assertEqual((result.known_tokens, rank.nodes(), rank.cache.root_node.children), (0, [], {}))
        group.check()
        group.serve(chain(group.spec, 1, 2))
        group.serve(chain(group.spec, 1, 2))  # nothing new below the node
        self.assertEqual(group.agreed(lambda rank: [node.tokens for node in rank.nodes()]), [8])

    @each_layout
    def test_24_host_copies_below_a_node_that_is_dropped_are_freed_once(self, layout: str) -> None:
        group = Group(fault_spec(layout, pages=64, host=16, policy="write_back"))
        group.serve(chain(group.spec, *range(20)))
        group.serve(chain(group.spec, *range(20), 30, 31))
        self.assertEqual(evict(group, 1), 2, "the child goes to the host")
        self.assertEqual(sum(group.ranks[0].controller.ledger.used_pages), 2)
        self.assertEqual(evict(group, 1), 20, "its parent is larger than the host and is dropped with it")
        for rank in group.ranks:
            self.assertEqual((rank.nodes(), rank.host_free_pages()), ([], rank.spec.host_pages))
            self.assertEqual(set(rank.controller.ledger.used_pages), {0})
        group.check()


class TestKeys(CacheTestCase):
    @each_layout
    def test_25_a_short_eagle_key_matches_whole_pages_of_bigrams_only(self, layout: str) -> None:
        group = Group(fault_spec(layout, pages=8, host=8, pool=PoolKind.DSA, eagle=True))
        tokens, page = chain(group.spec, 1, 2), group.spec.page_size
        for rank in group.ranks:
            rank.cache.put(Insertion(key=rank.key(tokens), value=rank.take(2 * page)))
            for length, matched in ((0, 0), (1, 0), (page - 1, 0), (page, 0), (page + 1, page), (2 * page, page)):
                match = rank.cache.match(rank.key(tokens[:length]))
                self.assertEqual(len(match.slots), matched, f"{length} tokens")

    @each_layout
    def test_26_a_page_has_the_same_hash_wherever_it_is_stored_or_removed(self, layout: str) -> None:
        group = Group(fault_spec(layout, events=True))
        tokens = chain(group.spec, 1, 2, 3)
        group.serve(tokens)
        group.serve(tokens[:4])  # splits the node between its write and its next read
        group.evict_all()
        first = _events(group.ranks[0])
        group.serve(tokens)
        again = _events(group.ranks[0])
        hashes = [
            _hashes(events, medium)
            for events, medium in ((first, StorageMedium.GPU), (first, StorageMedium.CPU), (again, StorageMedium.GPU))
        ]
        self.assertEqual(len(hashes[0]), 3)
        for rank_hashes in hashes[1:]:
            self.assertEqual(rank_hashes, hashes[0])
        for rank in group.ranks[1:]:
            self.assertEqual(_hashes(_events(rank), StorageMedium.GPU), hashes[0] * 2)

    @each_layout
    def test_27_equal_tokens_under_another_extra_key_share_nothing_on_either_tier(self, layout: str) -> None:
        group = Group(fault_spec(layout))
        group.serve(chain(group.spec, 1, 2), "adapter")
        for _ in ("device", "host"):
            for namespace, found in (("other", 0), (None, 0), ("adapter", 2)):
                request = group.start(chain(group.spec, 1, 2), namespace)
                assert request is not None
                self.assertEqual(request.prefix_pages, found)
                group.abort(request)
                group.settle()
            group.evict_all()

    @each_layout
    def test_31_an_event_has_the_length_of_a_logical_page(self, layout: str) -> None:
        group = Group(fault_spec(layout, events=True))
        group.serve(chain(group.spec, 1, 2, 3))
        for rank in group.ranks:
            events = [event for event in _events(rank) if isinstance(event, BlockStored)]
            for medium in (StorageMedium.GPU, StorageMedium.CPU):
                own = [event for event in events if event.medium == medium]
                self.assertEqual(
                    [token for event in own for token in event.token_ids], chain(rank.spec, 1, 2, 3).tolist()
                )
                self.assertEqual({event.block_size for event in own}, {4})


class TestPayload(CacheTestCase):
    @each_layout
    def test_32_the_index_of_a_dsa_page_returns_with_its_kv(self, layout: str) -> None:
        group = Group(fault_spec(layout, pages=16, host=16, pool=PoolKind.DSA))
        group.serve(chain(group.spec, 1, 2, 3, 4))
        group.evict_all()  # overwrites KV and index with other bytes
        group.serve(chain(group.spec, 9))  # takes rows, so that the pages return to others
        request = begin(group, 1, 2, 3, 4)
        self.assertEqual(request.host_pages, 4)
        views = page_views(group.ranks[0].device_pool)
        self.assertEqual(len(views), 4, "KV and index of two layers were compared")

    @each_layout
    def test_36_a_scripted_sequence_gives_exact_counts_in_logical_tokens_and_own_bytes(self, layout: str) -> None:
        group = Group(fault_spec(layout))
        group.serve(chain(group.spec, 1, 2, 3))
        evict(group, 3)
        group.abort(begin(group, 1, 2, 3))
        group.settle()
        evict(group, 3)
        group.agreed(lambda rank: rank.cache.evict_host(1))
        own_pages = []
        for rank in group.ranks:
            stats, page_bytes = rank.cache.stats, sum(pages.shape[1] for pages in page_views(rank.device_pool))
            self.assertEqual((stats.backups, stats.backed_up_tokens, stats.loads, stats.loaded_tokens), (1, 12, 1, 12))
            self.assertEqual(
                (stats.evicted_device_tokens, stats.evicted_host_tokens, stats.dropped_tokens), (24, 12, 0)
            )
            self.assertEqual(stats.backed_up_bytes, stats.loaded_bytes)
            own_pages.append(stats.backed_up_bytes // page_bytes)
            self.assertEqual((stats.backed_up_bytes % page_bytes, stats.zero_owned_backups), (0, own_pages[-1] == 0))
        self.assertEqual(sorted(own_pages), [0, 1, 1, 1] if group.spec.host_lanes > 1 else [3] * RANKS)


def _held(group: Group) -> list[tuple[int, int, tuple[int, ...], int]]:
    """What can leak, on each rank: free slots, free host pages, the ledger and the queues."""
    return group.each(
        lambda rank: (
            rank.allocator.available_size(),
            rank.host_free_pages(),
            rank.controller.ledger.free_pages,
            len(rank.controller.ack_write_queue)
            + len(rank.controller.ack_load_queue)
            + len(rank.cache.parts.in_flight.loads),
        )
    )


def _metadata(rank: Rank, *pages: int) -> Any:  # noqa: ANN401  # the layout's metadata
    metadata = node_of(rank, *pages).metadata
    assert metadata is not None
    return metadata


def _events(rank: Rank) -> list[Any]:
    return list(rank.cache.take_events())


def _hashes(events: list[Any], medium: str) -> list[int]:
    """Block hashes announced as stored there, in order, each once per announcement."""
    return [
        block
        for event in events
        if isinstance(event, BlockStored) and event.medium == medium
        for block in event.block_hashes
    ]


if __name__ == "__main__":
    unittest.main()
