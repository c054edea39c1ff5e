"""Sharded device pools: several ranks in threads, compared with one pool that stores everything."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from _caches import CacheTestCase
from sglang.test.ci.ci_register import register_cpu_ci

from sglang.srt.mem_cache.hicache.cpu.pools import CpuDSATokenToKVPool, CpuMLATokenToKVPool
from sglang.srt.mem_cache.hicache.device_pools import bytes_of
from sglang.srt.mem_cache.hicache.page_reader import SharedPages, WholePages, as_integer_pages
from sglang.srt.mem_cache.hicache.pool_kinds import pool_kind
from sglang.srt.mem_cache.layouts import CpSharedLayout, PoolKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.mem_cache.hicache.shared_pools import LayoutMLATokenToKVPool

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

PAGE = 64  # a DSA pool has no other
ROW_PAGES = 4
LATENT, ROTARY = 4, 2
INDEX_WIDTH = 128


class Sum:
    """Adds tensors of `ranks` threads up, as a process group would, and counts how often."""

    def __init__(self, ranks: int) -> None:
        self.calls = 0
        self._parts: list[torch.Tensor] = []
        self._barrier = threading.Barrier(ranks, timeout=20)
        self._lock = threading.Lock()

    def __call__(self, tensor: torch.Tensor) -> None:
        with self._lock:
            self._parts.append(tensor.clone())
        self._barrier.wait()
        total = torch.stack(self._parts).sum(0).to(tensor.dtype)
        if self._barrier.wait() == 0:
            self._parts.clear()
            self.calls += 1
        self._barrier.wait()
        tensor.copy_(total)


class Ranks:
    """`ranks` pools that share pages, and one that has them all."""

    def __init__(self, kind: PoolKind, ranks: int) -> None:
        self.reduce = Sum(ranks)
        self.shared = [make_pool(kind, ROW_PAGES) for _ in range(ranks)]
        for rank, pool in enumerate(self.shared):
            layout = CpSharedLayout(page_size=PAGE, cp_size=ranks, cp_rank=rank)
            pool.access = SharedPages(layout, page_size=PAGE, lane_count=ranks, reduce=self.reduce)
        self.whole = make_pool(kind, ROW_PAGES * ranks + ranks)
        self._threads = ThreadPoolExecutor(ranks)

    def everywhere(self, act: Callable[[LayoutMLATokenToKVPool], Any]) -> list[Any]:
        """Do the same on every rank at once."""
        return list(self._threads.map(act, self.shared))

    def begin_batch(self, pages: list[int]) -> None:
        """The next forward pass reads these logical pages."""
        for pool in self.shared:
            pool.access.begin_batch(torch.tensor(pages))

    def write(self, layer: int, slots: torch.Tensor) -> None:
        """Store random bits, NaNs and negative zeros among them, on the ranks and in the whole pool."""
        bits = torch.randint(-(2**15), 2**15, (len(slots), 1, LATENT + ROTARY), dtype=torch.int16)
        bits[0, 0, 0], bits[-1, 0, -1] = -(2**15), 0x7FC1  # -0.0 and a NaN of bfloat16
        rows = bits.view(torch.bfloat16)
        keys = torch.randint(0, 256, (len(slots), INDEX_WIDTH), dtype=torch.uint8)
        scales = torch.rand(len(slots), 1)

        def store(pool: LayoutMLATokenToKVPool) -> None:
            at: Any = SimpleNamespace(layer_id=layer)
            if layer % 2:
                pool.set_kv_buffer(at, slots, rows, rows)
            else:
                pool.set_mla_kv_buffer(at, slots, rows[..., :LATENT], rows[..., LATENT:])
            if isinstance(pool, CpuDSATokenToKVPool):
                pool.set_index_k_scale_buffer(layer, slots, keys, scales)

        for pool in (*self.shared, self.whole):
            store(pool)


def make_pool(kind: PoolKind, pages: int) -> LayoutMLATokenToKVPool:
    """A CPU pool of two layers for `pages` pages."""
    shape: dict[str, Any] = {
        "size": pages * PAGE,
        "page_size": PAGE,
        "dtype": torch.bfloat16,
        "kv_lora_rank": LATENT,
        "qk_rope_head_dim": ROTARY,
        "layer_num": 2,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    if kind is PoolKind.DSA:
        return CpuDSATokenToKVPool(**shape, index_head_dim=INDEX_WIDTH, kv_cache_dim=LATENT + ROTARY)
    return CpuMLATokenToKVPool(**shape)


def slots_of(pages: list[int]) -> torch.Tensor:
    """All slots of logical pages."""
    return (torch.tensor(pages).unsqueeze(1) * PAGE + torch.arange(PAGE)).reshape(-1)


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
                self._check_reads(group, layer, batch)

    def _check_reads(self, group: Ranks, layer: int, batch: list[int]) -> None:
        wanted = slots_of(batch)
        expected = as_bits(group.whole.get_key_buffer(layer)[wanted])
        for found in group.everywhere(lambda pool: pool.get_key_buffer(layer)):
            self.assertTrue(torch.equal(as_bits(found[wanted]), expected))
        for found in group.everywhere(lambda pool: pool.get_value_buffer(layer)):
            self.assertTrue(torch.equal(as_bits(found[wanted]), expected[..., :LATENT]))
        if isinstance(group.whole, CpuDSATokenToKVPool):
            index = group.whole.get_index_k_with_scale_buffer(layer)[batch]
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

    def test_without_a_batch_everything_is_gathered(self) -> None:
        group = Ranks(PoolKind.MLA, 2)
        wanted = slots_of([2, 3, 6, 9])
        group.write(1, wanted)
        expected = as_bits(group.whole.get_key_buffer(1)[wanted])
        for found in group.everywhere(lambda pool: pool.get_key_buffer(1)):
            self.assertTrue(torch.equal(as_bits(found[wanted]), expected))

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


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """A bfloat16 tensor as integers: NaNs compare, zeros keep their sign."""
    return tensor.contiguous().view(torch.int16)


def index_pages(pool: LayoutMLATokenToKVPool, layer: int) -> torch.Tensor:
    """Index pages of a DSA pool, to be indexed by logical pages."""
    assert isinstance(pool, CpuDSATokenToKVPool)
    return pool.get_index_k_with_scale_buffer(layer)


def access_of(pool: LayoutMLATokenToKVPool) -> SharedPages:
    """The pool's access, which must be the sharing one."""
    assert isinstance(pool.access, SharedPages)
    return pool.access
