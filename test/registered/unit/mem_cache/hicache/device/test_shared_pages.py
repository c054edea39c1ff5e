"""Sharded device pools: several ranks in threads, compared with one pool that stores everything."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import torch
from sglang.test.ci.ci_register import register_cpu_ci

from sglang.srt.mem_cache.hicache.cpu.pools import CpuDSATokenToKVPool
from sglang.srt.mem_cache.hicache.device.kinds import pool_kind
from sglang.srt.mem_cache.hicache.device.page_reader import WholePages, as_integer_pages
from sglang.srt.mem_cache.hicache.device.pools import bytes_of, index_buffers
from sglang.srt.mem_cache.layouts import PoolKind
from sglang.srt.mem_cache.layouts.errors import LayoutInvariantError
from support.caches import CacheTestCase
from support.shared_ranks import (
    LATENT,
    PAGE,
    ROTARY,
    ROW_PAGES,
    Ranks,
    access_of,
    as_bits,
    index_pages,
    make_pool,
    slots_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.mem_cache.hicache.device.shared_pools import LayoutMLATokenToKVPool

register_cpu_ci(est_time=20, suite="base-a-test-cpu")


class TestSharedPages(CacheTestCase):
    def test_readers_of_any_batch_get_the_bits_that_one_big_pool_holds(self) -> None:
        for kind in (PoolKind.MLA, PoolKind.DSA):
            for ranks in (2, 3):
                with self.subTest(kind=kind, ranks=ranks):
                    self._check_random_batches(kind, ranks)

    def _check_random_batches(self, kind: PoolKind, ranks: int) -> None:
        rng = random.Random(ranks)
        group = Ranks(kind, ranks)
        pages = list(range(ranks, ranks * (ROW_PAGES + 1)))
        for layer in (0, 1):
            group.write(layer, slots_of(pages))
        for _ in range(6):
            batch = rng.sample(pages, rng.randrange(1, len(pages)))
            wanted = slots_of(batch)
            group.begin_batch(batch)
            for layer in (0, 1):
                group.write(layer, wanted[-3:])  # a forward pass writes before it reads
                self._check_kv(group, layer, batch)
                self._check_index(group, layer, batch)

    def _check_kv(self, group: Ranks, layer: int, batch: list[int]) -> None:
        wanted = slots_of(batch)
        expected = as_bits(group.whole.get_key_buffer(layer)[wanted])
        for found in group.everywhere(lambda pool: pool.get_key_buffer(layer)):
            self.assertTrue(torch.equal(as_bits(found[wanted]), expected))
        for found in group.everywhere(lambda pool: pool.get_value_buffer(layer)):
            self.assertTrue(torch.equal(as_bits(found[wanted]), expected[..., :LATENT]))

    def _check_index(self, group: Ranks, layer: int, batch: list[int]) -> None:
        if isinstance(group.whole, CpuDSATokenToKVPool):
            index = index_pages(group.whole, layer)[batch]
            for found in group.everywhere(lambda pool: index_pages(pool, layer)):
                self.assertTrue(torch.equal(found[batch], index))

    def test_a_rank_stores_its_own_pages_and_no_others(self) -> None:
        group = Ranks(PoolKind.DSA, 2)
        group.write(0, slots_of(list(range(2, 10))))
        for rank, pool in enumerate(group.shared):
            for slot_page in range(2, 10):
                rows = as_integer_pages(pool.kv_buffer[0], PAGE)[slot_page // 2]
                whole = as_integer_pages(group.whole.kv_buffer[0], PAGE)[slot_page]
                self.assertEqual(torch.equal(rows, whole), slot_page % 2 == rank)

    def test_only_the_pages_of_the_batch_are_gathered_and_once_a_layer(self) -> None:
        group = Ranks(PoolKind.MLA, 2)
        group.write(0, slots_of([2, 3, 4, 5]))
        group.begin_batch([2, 5])
        for _ in range(3):
            group.everywhere(lambda pool: (pool.get_key_buffer(0), pool.get_value_buffer(0)))
        self.assertEqual(group.reduce.calls, 1)
        page_bytes = PAGE * (LATENT + ROTARY) * 2
        self.assertEqual([access_of(pool).gathered_bytes for pool in group.shared], [2 * page_bytes] * 2)
        group.write(0, slots_of([5])[:1])
        group.everywhere(lambda pool: pool.get_key_buffer(0))
        self.assertEqual(group.reduce.calls, 2)

    def test_a_batch_of_all_pages_gathers_everything(self) -> None:
        group = Ranks(PoolKind.MLA, 2)
        wanted = slots_of([2, 3, 6, 9])
        for pool in group.shared:
            pool.access.begin_batch(None)
        group.write(1, wanted)
        expected = as_bits(group.whole.get_key_buffer(1)[wanted])
        for found in group.everywhere(lambda pool: pool.get_key_buffer(1)):
            self.assertTrue(torch.equal(as_bits(found[wanted]), expected))

    def test_before_the_first_batch_nothing_is_gathered(self) -> None:
        group = Ranks(PoolKind.DSA, 2)
        slots = (ROW_PAGES + 1) * 2 * PAGE
        self.assertEqual(group.shared[0].get_value_buffer(0).shape, (slots, 1, LATENT))  # one rank alone
        self.assertEqual(index_pages(group.shared[1], 0).shape[0], slots // PAGE)
        self.assertEqual(group.reduce.calls, 0)

    def test_padding_slots_write_to_the_padding_page_on_every_rank(self) -> None:
        group = Ranks(PoolKind.MLA, 2)
        group.write(0, torch.zeros(3, dtype=torch.int64))
        for pool in group.shared:
            self.assertEqual(int(as_integer_pages(pool.kv_buffer[0], PAGE)[1:].count_nonzero()), 0)

    def test_where_nothing_is_shared_the_buffer_itself_is_read(self) -> None:
        pool = make_pool(PoolKind.MLA, 2)
        self.assertIsInstance(pool.access, WholePages)
        self.assertEqual(pool.get_key_buffer(0).data_ptr(), pool.kv_buffer[0].data_ptr())
        slots = torch.tensor([64, 70])
        self.assertIs(pool.access.rows(slots), slots)

    def test_hicache_knows_the_pools_by_what_they_extend(self) -> None:
        self.assertEqual(pool_kind(make_pool(PoolKind.MLA, 1)), PoolKind.MLA)
        self.assertEqual(pool_kind(make_pool(PoolKind.DSA, 1)), PoolKind.DSA)

    def test_a_rank_of_two_takes_half_the_device_memory_for_the_same_slots(self) -> None:
        padding = bytes_of(make_pool(PoolKind.DSA, 1)) // 2
        whole, half = bytes_of(make_pool(PoolKind.DSA, 8)), bytes_of(make_pool(PoolKind.DSA, 4))
        self.assertEqual(whole - padding, 2 * (half - padding))

    def test_while_a_batch_is_attended_to_the_pools_size_is_that_of_what_readers_get(self) -> None:
        group = Ranks(PoolKind.DSA, 3)
        readable = [len(pool.get_key_buffer(0)) for pool in group.shared]
        for pool, slots in zip((*group.shared, group.whole), (*readable, len(group.whole.kv_buffer[0])), strict=True):
            rows = pool.size
            with pool.sized_by_slots():
                self.assertEqual(pool.size + PAGE, slots)
            self.assertEqual(pool.size, rows)

    def test_whatever_would_take_slots_for_rows_is_refused_before_it_touches_the_pool(self) -> None:
        pool = Ranks(PoolKind.DSA, 2).shared[0]
        slots = torch.tensor([PAGE * 2])
        calls: dict[str, Callable[[], object]] = {
            "move_kv_cache": lambda: pool.move_kv_cache(slots, slots + 1),
            "get_cpu_copy": lambda: pool.get_cpu_copy(slots),
            "load_cpu_copy": lambda: pool.load_cpu_copy({}, slots),
        }
        for method, call in calls.items():
            with self.subTest(method), self.assertRaisesRegex(LayoutInvariantError, f"^{method} .* 1 of 2 pages"):
                call()
        whole = make_pool(PoolKind.MLA, 2)
        whole.kv_buffer[0][PAGE] = 1
        whole.move_kv_cache(torch.tensor([PAGE + 1]), torch.tensor([PAGE]))
        self.assertEqual(int(whole.kv_buffer[0][PAGE + 1].sum()), LATENT + ROTARY)

    def test_a_layer_that_is_being_loaded_is_waited_for_before_its_pages_are_sent(self) -> None:
        group = Ranks(PoolKind.DSA, 2)
        group.write(1, slots_of([2, 3]))
        for check in (self._check_index, self._check_kv):
            group.begin_batch([2, 3])
            for pool in group.shared:
                LateLoad(pool, layer=1)
            check(group, 1, [2, 3])


class LateLoad:
    """A copy of a layer to the device that arrives when somebody waits for the layer, and no sooner."""

    def __init__(self, pool: LayoutMLATokenToKVPool, *, layer: int) -> None:
        self._layer = layer
        self._buffers = [pool.kv_buffer[layer], *index_buffers(pool)[layer : layer + 1]]
        self._arriving = [buffer.clone() for buffer in self._buffers]
        for buffer in self._buffers:
            buffer.fill_(0)
        waiting: Any = pool
        waiting.layer_transfer_counter = self

    def wait_until(self, layer: int) -> None:
        """What SGLang's counter of loaded layers does."""
        if layer == self._layer:
            for buffer, arrived in zip(self._buffers, self._arriving, strict=True):
                buffer.copy_(arrived)
