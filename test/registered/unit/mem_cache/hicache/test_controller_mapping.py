"""The design's "Required unit coverage" 2 and 3: what the controller hands to SGLang's host pool, and what it acks."""

from __future__ import annotations

import unittest
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import ANY, Mock, call, patch

import numpy as np
from sglang.test.ci.ci_register import register_cpu_ci

from sglang.srt.mem_cache.hicache.copies.transfer import HostTransfer
from sglang.srt.mem_cache.hicache.host.ledger import HostShortfall
from sglang.srt.mem_cache.hicache.settings import HiCacheSettings
from sglang.srt.mem_cache.layouts import CpSharedKVLayout, LayoutConfigError, LayoutInvariantError, PoolKind
from support.caches import LAYERS, CacheSpec, CacheTestCase, Rank, chain, page_views
from support.groups import Group, check_host

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang.srt.mem_cache.layouts.pages import PageArray

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

POOLS = (PoolKind.MHA, PoolKind.MLA, PoolKind.DSA)


class TestWriteMapping(CacheTestCase):
    def test_full_logical_slots_take_host_pages_only_for_what_the_rank_owns(self) -> None:
        for pool in POOLS:
            group = Group(CacheSpec(pool=pool))
            pages = _alloc(group, [1, 2, 0, 1, 2])
            for rank in group.ranks:
                metadata = _write(rank, pages)
                owned = (1, 2, 2)[rank.number]
                self.assertEqual(metadata.logical_len, 5 * group.spec.page_size)
                self.assertEqual(metadata.pages_per_lane, (1, 2, 2))
                self.assertEqual(len(metadata.host_pages), owned)
                self.assertEqual(rank.host_free_pages(), group.spec.host_pages - owned)
                self.assertEqual(rank.controller.ledger.used_pages, (1, 2, 2))

    def test_rows_handed_to_the_host_pool_are_those_of_the_geometry(self) -> None:
        group = Group(CacheSpec(ranks=4))
        pages = _alloc(group, [3, 0, 1, 2, 3, 0, 1])
        for rank in group.ranks:
            metadata = _write(rank, pages)
            geometry = CpSharedKVLayout(page_size=4, cp_size=4, cp_rank=rank.number)
            slots = rank.allocator.slots(pages)
            mask = geometry.owned_by_this_rank(slots)
            ((transfer,),) = rank.engine.writes
            self.assertEqual(transfer.device_indices.tolist(), geometry.logical_locs_to_physical(slots[mask]).tolist())
            self.assertEqual(transfer.host_indices.tolist(), metadata.host_indices.tolist())
            self.assertEqual(metadata.owned_positions.tolist(), mask.nonzero().flatten().tolist())
            self.assertTrue((transfer.device_indices < group.spec.device_pages * 4 + 4).all())

    def test_a_dsa_index_moves_with_the_rows_of_its_kv_once(self) -> None:
        group = Group(CacheSpec(pool=PoolKind.DSA))
        pages = _alloc(group, [0, 1, 2])
        for rank in group.ranks:
            _write(rank, pages)
            ((kv, index),) = rank.engine.writes
            self.assertIs(kv.host_indices, index.host_indices)
            self.assertIs(kv.device_indices, index.device_indices)
            self.assertIsNot(kv.host_pool, index.host_pool)

    def test_a_rank_that_owns_nothing_gets_metadata_no_host_page_and_one_finished_ack(self) -> None:
        group = Group(CacheSpec(ranks=4))
        pages = _alloc(group, [2])
        for rank in group.ranks:
            metadata = _write(rank, pages, node_id=9)
            owned = int(rank.number == 2)
            self.assertEqual((metadata.logical_len, len(metadata.host_indices)), (4, 4 * owned))
            self.assertEqual(rank.host_free_pages(), group.spec.host_pages - owned)
            self.assertEqual([len(transfers) for transfers in rank.engine.writes], [owned])
            (ack,) = rank.controller.ack_write_queue
            self.assertEqual((ack.node_ids, ack.num_tokens), ([9], 4))
            self.assertTrue(ack.finish_event.query())

    def test_acks_count_logical_tokens_and_physical_bytes(self) -> None:
        group = Group(CacheSpec(pool=PoolKind.DSA))
        pages = _alloc(group, [0, 1, 2, 0])
        for rank in group.ranks:
            _write(rank, pages)
            (ack,) = rank.controller.ack_write_queue
            page_bytes = sum(views.shape[1] for views in page_views(rank.device_pool))
            self.assertEqual((ack.num_tokens, ack.num_tokens_by_pool), (4 * 64, {"kv": 4 * 64}))
            self.assertEqual(ack.num_bytes, (2, 1, 1)[rank.number] * page_bytes)

    def test_a_backup_without_room_on_one_rank_changes_nothing_on_any(self) -> None:
        group = Group(CacheSpec(host_pages=3))
        first = _alloc(group, [0, 0, 1])
        for rank in group.ranks:
            _write(rank, first)
        second = _alloc(group, [0, 0, 2])
        for rank in group.ranks:
            outcome = rank.controller.write(second, node_id=8)
            assert isinstance(outcome, HostShortfall)
            self.assertEqual((outcome.plan.demand_pages, outcome.missing_pages), ((2, 0, 1), (1, 0, 0)))
            self.assertEqual(rank.controller.ledger.used_pages, (2, 1, 0))
            self.assertEqual(rank.host_free_pages(), 3 - (2, 1, 0)[rank.number])
            self.assertEqual([ack.node_ids for ack in rank.controller.ack_write_queue], [[7]])

    def test_a_host_pool_that_disagrees_with_the_ledger_is_a_loud_error_with_both_numbers(self) -> None:
        group = Group(CacheSpec())
        pages = _alloc(group, [0, 1, 2])
        rank = group.ranks[1]
        self.assertIsNotNone(rank.cache.token_to_kv_pool_host.alloc(4))
        with self.assertRaisesRegex(LayoutInvariantError, "ledger has 15 free host pages .* its host pool 14"):
            rank.controller.write(pages, node_id=1)

    def test_a_host_pool_that_is_full_although_the_ledger_admits_is_a_loud_error(self) -> None:
        group = Group(CacheSpec())
        self.assertIsNotNone(group.ranks[1].cache.token_to_kv_pool_host.alloc(16 * 4))
        with self.assertRaisesRegex(
            LayoutInvariantError, r"ledger admitted 1 host pages with .* but the host pool has 0"
        ):
            group.ranks[1].controller.write(_alloc(group, [1]), node_id=1)


class TestLoadMapping(CacheTestCase):
    def test_full_logical_slots_are_allocated_in_the_lanes_of_the_backup(self) -> None:
        group = Group(CacheSpec())
        lanes = [2, 0, 1, 2]
        pages = _alloc(group, lanes)
        for rank in group.ranks:
            metadata = _write(rank, pages)
            loaded = rank.controller.load([metadata], node_id=7)
            assert loaded is not None
            self.assertEqual((loaded % 3).tolist(), lanes)
            self.assertFalse(set(loaded.tolist()) & set(pages.tolist()))

    def test_owned_positions_go_through_the_new_slots_to_rows_of_their_own(self) -> None:
        for pool in POOLS:
            group = Group(CacheSpec(pool=pool))
            tokens = chain(group.spec, 1, 2, 3, 4, 5)
            pages = _alloc(group, [1, 2, 0, 1, 2])
            for rank in group.ranks:
                rank.write(tokens, pages)
                size = group.spec.page_size
                first, rest = _write(rank, pages).split(2 * size)
                rank.scribble()
                loaded = rank.controller.load([first, rest], node_id=7)
                assert loaded is not None
                self.assertEqual(rank.controller.start_loading(), 0)
                geometry = CpSharedKVLayout(page_size=size, cp_size=3, cp_rank=rank.number)
                slots = rank.allocator.slots(loaded)
                own = np.concatenate([first.owned_positions, rest.owned_positions + 2 * size])
                (transfers,) = rank.engine.loads
                self.assertEqual(
                    transfers[0].device_indices.tolist(), geometry.logical_locs_to_physical(slots[own]).tolist()
                )
                self.assertEqual(
                    transfers[0].host_indices.tolist(), [*first.host_indices.tolist(), *rest.host_indices.tolist()]
                )
                self.assertEqual(rank.mismatches(tokens, loaded), 0)

    def test_a_rank_that_owns_nothing_returns_full_slots_and_one_finished_ack_and_event(self) -> None:
        group = Group(CacheSpec(ranks=4))
        pages = _alloc(group, [1])
        for rank in group.ranks:
            loaded = rank.controller.load([_write(rank, pages)], node_id=9)
            assert loaded is not None
            self.assertEqual(len(rank.allocator.slots(loaded)), 4)
            index = rank.controller.start_loading()
            self.assertEqual([len(transfers) for transfers in rank.engine.loads], [int(rank.number == 1)])
            (ack,) = rank.controller.ack_load_queue
            self.assertEqual((ack.node_ids, ack.num_tokens), ([9], 4))
            self.assertTrue(ack.finish_event.query())
            producer = rank.controller.layer_done_counter.events[index]
            self.assertEqual([event.query() for event in producer.load_events], [True] * LAYERS)
            self.assertTrue(rank.cache.is_load_back_event_done(index))

    def test_loads_queued_together_are_one_transfer_with_one_ack_of_all_ids(self) -> None:
        group = Group(CacheSpec())
        one, other = _alloc(group, [0, 1]), _alloc(group, [1, 2])
        for rank in group.ranks:
            first, second = _write(rank, one, node_id=1), _write(rank, other, node_id=2)
            rank.controller.load([first], node_id=1)
            rank.controller.load([second], node_id=2)
            self.assertEqual(rank.engine.loads, [])
            self.assertGreaterEqual(rank.controller.start_loading(), 0)
            (ack,) = rank.controller.ack_load_queue
            self.assertEqual((ack.node_ids, ack.num_tokens), ([1, 2], 16))
            self.assertEqual(len(rank.engine.loads), 1)

    def test_a_load_comes_after_its_start_event_and_the_forward_pass_and_fills_the_counter_that_is_returned(
        self,
    ) -> None:
        group = Group(CacheSpec())
        pages = _alloc(group, [0, 1, 2])
        for rank in group.ranks:
            controller = rank.controller
            for fence in (object(), None):
                log = Mock()
                events = [
                    SimpleNamespace(start_event=getattr(log, f"start_{at}"), finish_event=Mock()) for at in range(3)
                ]
                controller.load([_write(rank, pages)], node_id=1)
                engine = SimpleNamespace(host_to_device_stream=log.to_device, device_to_host_stream=log.to_host)
                with (
                    patch.object(controller, "transfer", log),
                    patch.object(log, "engine", engine),
                    patch.object(log, "bytes_per_token", 1),
                    patch.object(controller.layer_done_counter, "events", events),
                    patch.object(controller, "load_fence_stream", fence),
                    patch.object(controller, "_forward_done", log.forward_done),
                ):
                    index = controller.start_loading()
                wanted = [getattr(call, f"start_{index}").record()]
                if fence is not None:
                    wanted += [call.forward_done.record(fence), call.forward_done.wait(log.to_device)]
                self.assertEqual(log.method_calls, [*wanted, call.load(ANY, events[index])])

    def test_nothing_queued_starts_nothing(self) -> None:
        (rank, *_) = Group(CacheSpec()).ranks
        self.assertEqual(rank.controller.start_loading(), -1)
        self.assertEqual((rank.controller.ack_load_queue, rank.engine.loads), ([], []))

    def test_a_load_without_room_in_one_lane_changes_nothing(self) -> None:
        group = Group(CacheSpec())
        pages = _alloc(group, [0, 1, 1])
        _alloc(group, [1] * 5)
        for rank in group.ranks:
            metadata = _write(rank, pages)
            self.assertIsNone(rank.controller.load([metadata], node_id=7))
            self.assertEqual(rank.allocator.room_pages().tolist(), [7, 1, 8])
            self.assertEqual(rank.controller.start_loading(), -1)

    def test_released_host_pages_return_to_pool_and_ledger_on_every_rank(self) -> None:
        group = Group(CacheSpec())
        pages = _alloc(group, [0, 1, 1])
        for rank in group.ranks:
            self.assertEqual(rank.controller.release_host(_write(rank, pages)), 12)
            check_host(rank)

    def test_reset_drops_queued_loads_and_gives_all_host_memory_back(self) -> None:
        group = Group(CacheSpec())
        pages = _alloc(group, [0, 1, 1])
        for rank in group.ranks:
            rank.controller.load([_write(rank, pages)], node_id=7)
            rank.controller.reset()
            check_host(rank)
            self.assertEqual((rank.controller.start_loading(), rank.controller.ack_write_queue), (-1, []))


class TestTransferBackends(CacheTestCase):
    def test_a_backend_that_cannot_address_the_host_layout_is_refused_naming_both(self) -> None:
        rank = Group(CacheSpec(ranks=1)).ranks[0]
        host = rank.cache.token_to_kv_pool_host
        with self.assertRaisesRegex(LayoutConfigError, "--hicache-io-backend must be one of kernel, direct, got 'dma'"):
            HostTransfer(host_pool=host, device_pool=rank.device_pool, io_backend="dma")
        host.layout = "page_head"
        with self.assertRaisesRegex(
            LayoutConfigError, "--hicache-io-backend direct needs --hicache-mem-layout .*'page_head'"
        ):
            HostTransfer(host_pool=host, device_pool=rank.device_pool, io_backend="direct")

    def test_an_unknown_write_policy_names_the_accepted_ones(self) -> None:
        with self.assertRaisesRegex(
            LayoutConfigError, "--hicache-write-policy must be one of write_through, .* 'never'"
        ):
            HiCacheSettings(write_policy="never")  # type: ignore[arg-type]  # the mistake under test


def _alloc(group: Group, lanes: Sequence[int]) -> PageArray:
    """The same new pages on every rank."""
    pages = group.each(lambda rank: rank.allocator.alloc_lanes(np.array(lanes, dtype=np.int16)))
    assert pages[0] is not None
    assert all(np.array_equal(pages[0], other) for other in pages if other is not None)
    return pages[0]


def _write(rank: Rank, pages: PageArray, *, node_id: int = 7) -> Any:  # noqa: ANN401  # the layout's metadata
    outcome = rank.controller.write(pages, node_id=node_id)
    assert not isinstance(outcome, HostShortfall)
    rank.controller.start_writing()
    return outcome


if __name__ == "__main__":
    unittest.main()
