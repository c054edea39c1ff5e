from __future__ import annotations

import itertools
import threading
import unittest
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.l2_transfer import L2Transfer, L2TransferEngine, TransferCompletion
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, KVCache
from sglang.srt.mem_cache.pool_host import HostKVCache, HostPoolGroup
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.test.ci.ci_register import register_cpu_ci
from typing_extensions import override

from sglang.srt.mem_cache.hicache.cpu.support import install_cpu_support
from sglang.srt.mem_cache.hicache.device.pools import (
    DsaGeometry,
    Geometry,
    MhaGeometry,
    MlaGeometry,
    build_device_pool,
    index_buffers,
    kv_buffers,
)
from sglang.srt.mem_cache.hicache.host.pools import AnyHostPool, build_host_pool, host_bytes_of
from sglang.srt.mem_cache.hicache.seam.sglang import submit_load
from sglang.srt.mem_cache.layouts import LayoutConfigError
from support.caches import CacheTestCase, pooled_keys_page_size

register_cpu_ci(est_time=40, suite="base-a-test-cpu")

PAGE = 64
PAGES = 16
LAYERS = 3
HOST_LAYOUTS = ("layer_first", "page_first_direct")
GEOMETRIES: tuple[Geometry, ...] = (
    MhaGeometry(heads=2, head_dim=24, dtype=torch.bfloat16),
    MhaGeometry(heads=1, head_dim=20, dtype=torch.float8_e5m2),
    MlaGeometry(kv_lora_rank=32, qk_rope_head_dim=8, dtype=torch.float32),
    DsaGeometry(),
    DsaGeometry(dtype=torch.float8_e4m3fn),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A device pool with random bytes and its host pool, whose pages hold other random bytes."""

    device: KVCache
    host: AnyHostPool

    def pages_on_device(self) -> torch.Tensor:
        """Every byte of every page, ``[pages, bytes]`` uint8: KV of all layers, then the index of all layers."""
        kv = [buffer.view(torch.uint8).reshape(PAGES + 1, -1) for buffer in kv_buffers(self.device)]
        index = [buffer[: PAGES + 1].view(torch.uint8) for buffer in index_buffers(self.device)]
        return torch.cat([*kv, *index], dim=1)

    def pages_on_host(self) -> torch.Tensor:
        """The same of the host pools, as SGLang's storage tier would read them."""
        pools = self.host_pools()
        return torch.stack(
            [
                torch.cat([pool.get_data_page(page * PAGE).view(torch.uint8) for pool in pools])
                for page in range(pools[0].page_num)
            ]
        )

    def transfers(self, host_rows: torch.Tensor, device_rows: torch.Tensor) -> list[L2Transfer]:
        if not isinstance(self.host, HostPoolGroup):
            return [L2Transfer(self.host, self.device, host_rows, device_rows)]
        return [
            L2Transfer(entry.host_pool, entry.device_pool, host_rows, device_rows, entry.layer_mapper)
            for entry in self.host.entries
        ]

    def host_pools(self) -> list[HostKVCache]:
        return [entry.host_pool for entry in self.host.entries] if isinstance(self.host, HostPoolGroup) else [self.host]


class TestTransfersBetweenRealPools(CacheTestCase):
    @classmethod
    @override
    def setUpClass(cls) -> None:
        super().setUpClass()
        assert install_cpu_support()
        cls.engine = L2TransferEngine("direct")

    engine: L2TransferEngine

    def test_pages_come_back_to_other_places_byte_for_byte_and_nothing_else_changes(self) -> None:
        for number, (geometry, layout) in enumerate(itertools.product(GEOMETRIES, HOST_LAYOUTS)):
            with self.subTest(geometry=geometry, layout=layout):
                self._back_up_scribble_and_load(geometry, layout, seed=number)

    def _back_up_scribble_and_load(self, geometry: Geometry, layout: str, seed: int) -> None:
        torch.manual_seed(seed)
        bench = _make_bench(geometry, layout)
        source, target = (torch.randperm(PAGES)[:7] + 1 for _ in range(2))
        host_rows = _shuffled_host_rows(bench.host, pages=7)
        host_pages = host_rows[::PAGE] // PAGE
        saved, host_before = bench.pages_on_device(), bench.pages_on_host()
        assert len(set(map(bytes, saved[1:].numpy()))) == PAGES, "pages must differ for the test to tell them apart"

        self._check_complete(self.engine.submit_device_to_host(bench.transfers(host_rows, _rows(source))))
        assert torch.equal(bench.pages_on_device(), saved)
        host_after = bench.pages_on_host()
        kept = _others(host_pages, len(host_after))
        assert torch.equal(host_after[kept], host_before[kept])
        assert not torch.equal(host_after, host_before)

        _scribble(bench.device)
        expected = bench.pages_on_device()
        expected[target] = saved[source]
        layers: list[int] = []
        completion = submit_load(
            self.engine, bench.transfers(host_rows, _rows(target)), layers=LAYERS, on_layer_done=layers.append
        )
        self._check_complete(completion)
        assert layers == list(range(LAYERS))
        assert torch.equal(bench.pages_on_device(), expected)
        assert torch.equal(bench.pages_on_host(), host_after)

    def test_a_rank_that_owns_nothing_still_gets_its_events(self) -> None:
        bench = _make_bench(DsaGeometry(), "layer_first")
        before, no_rows = bench.pages_on_device(), torch.empty(0, dtype=torch.int64)
        for transfers in ([], bench.transfers(no_rows, no_rows)):
            layers: list[int] = []
            self._check_complete(self.engine.submit_device_to_host(transfers))
            self._check_complete(submit_load(self.engine, transfers, layers=LAYERS, on_layer_done=layers.append))
            assert layers == list(range(LAYERS))
        assert torch.equal(bench.pages_on_device(), before)

    def _check_complete(self, completion: TransferCompletion) -> None:
        completion.finish_event.synchronize()
        assert completion.finish_event.query()


class TestController(CacheTestCase):
    def test_sglangs_own_controller_backs_up_and_loads_on_a_cpu(self) -> None:
        assert install_cpu_support()
        for geometry, layout in itertools.product((GEOMETRIES[0], GEOMETRIES[2]), HOST_LAYOUTS):
            with self.subTest(geometry=geometry, layout=layout):
                bench = _make_bench(geometry, layout)
                allocator = PagedTokenToKVPoolAllocator(
                    PAGES * PAGE, PAGE, bench.device.dtype, "cpu", bench.device, need_sort=False
                )
                controller = HiCacheController(
                    allocator,
                    bench.host,
                    PAGE,
                    None,
                    threading.Event(),
                    write_policy="write_through",
                    io_backend="direct",
                )
                slots = allocator.alloc(5 * PAGE)
                assert slots is not None
                saved = bench.pages_on_device()[slots[::PAGE] // PAGE]
                host_rows = controller.write(slots, node_id=11)
                assert host_rows is not None
                assert [ack.node_ids for ack in controller.ack_write_queue] == [[11]]
                allocator.free(slots)
                _scribble(bench.device)
                loaded = controller.load(host_rows, node_id=11)
                assert loaded is not None
                assert controller.start_loading() >= 0
                assert [ack.node_ids for ack in controller.ack_load_queue] == [[11]]
                assert torch.equal(bench.pages_on_device()[loaded[::PAGE] // PAGE], saved)


class TestHostPools(CacheTestCase):
    @classmethod
    @override
    def setUpClass(cls) -> None:
        super().setUpClass()
        assert install_cpu_support()

    def test_a_dsa_pool_gets_an_index_pool_that_follows_the_kv_pools_rows(self) -> None:
        bench = _make_bench(DsaGeometry(), "layer_first")
        assert isinstance(bench.host, HostPoolGroup)
        assert [entry.name for entry in bench.host.entries] == [PoolName.KV, PoolName.INDEXER]
        assert bench.host.anchor_entry.name is PoolName.KV
        free = bench.host.available_size()
        rows = bench.host.alloc(2 * PAGE)
        assert rows is not None
        assert bench.host.available_size() == free - 2 * PAGE
        assert bench.host.get_pool(PoolName.INDEXER).available_size() == free
        for entry in bench.host.entries:
            assert [entry.layer_mapper(layer) for layer in (-1, 0, LAYERS - 1, LAYERS)] == [None, 0, LAYERS - 1, None]

    def test_size_follows_the_ratio_or_the_given_gigabytes(self) -> None:
        for geometry in (GEOMETRIES[0], GEOMETRIES[2], DsaGeometry()):
            device = _make_device_pool(geometry)
            by_ratio = build_host_pool(device, ratio=1.5, page_size=PAGE, mem_layout="layer_first")
            assert by_ratio.size == (PAGES * 3 // 2 + 1) * PAGE
            assert host_bytes_of(by_ratio) >= by_ratio.size * by_ratio.size_per_token
            page_bytes = by_ratio.size_per_token * PAGE
            by_size = build_host_pool(device, size_gb=9.5 * page_bytes / 1e9, page_size=PAGE, mem_layout="layer_first")
            assert by_size.size == 10 * PAGE

    def test_host_bytes_count_kv_and_index_of_every_layer(self) -> None:
        bench = _make_bench(DsaGeometry(), "page_first_direct")
        # SGLang adds one page to the KV pool and two to the index pool.
        kv_pages, index_pages = 2 * PAGES + 1, 2 * PAGES + 2
        assert host_bytes_of(bench.host) == (kv_pages * 576 * 2 + index_pages * (128 + 4)) * PAGE * LAYERS

    def test_impossible_requests_name_the_flag_and_the_value(self) -> None:
        device = _make_device_pool(GEOMETRIES[0])
        with pytest.raises(LayoutConfigError, match="page_size must be the device pool's 64, got 16"):
            build_host_pool(device, page_size=16, mem_layout="layer_first")
        with pytest.raises(LayoutConfigError, match=r"^--hicache-ratio 0: must be above 0 and at most 1000$"):
            build_host_pool(device, ratio=0, page_size=PAGE, mem_layout="layer_first")
        with pytest.raises(LayoutConfigError, match=r"^--hicache-size -1: must be a number of gigabytes"):
            build_host_pool(device, size_gb=-1, page_size=PAGE, mem_layout="layer_first")
        with pytest.raises(ValueError, match="Unsupported layout: sideways"):
            build_host_pool(device, page_size=PAGE, mem_layout="sideways")

    def test_a_pool_that_is_not_served_is_refused_by_name(self) -> None:
        page_size = pooled_keys_page_size(2)
        device = DSATokenToKVPool(
            size=page_size,
            page_size=page_size,
            dtype=torch.bfloat16,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            index_head_dim=128,
            kv_cache_dim=576,
            layer_num=1,
            device="cpu",
            enable_memory_saver=False,
            index_kpool=2,
        )
        with pytest.raises(LayoutConfigError, match="does not support the KV pool DSATokenToKVPool"):
            build_host_pool(device, page_size=page_size, mem_layout="layer_first")

    def test_too_little_host_memory_is_refused(self) -> None:
        device = _make_device_pool(DsaGeometry())
        with pytest.raises(LayoutConfigError, match=r"^--hicache-size 1e\+06: one rank needs 1,114,583 GB"):
            build_host_pool(device, size_gb=1e6, page_size=PAGE, mem_layout="layer_first")

    def test_the_kv_pool_is_given_up_if_its_index_pool_does_not_fit(self) -> None:
        device, destroy = _make_device_pool(DsaGeometry()), MLATokenToKVPoolHost.destroy
        with (
            patch("sglang.srt.mem_cache.pool_host.dsa.host_memory_budget_bytes", return_value=0),
            patch.object(MLATokenToKVPoolHost, "destroy", autospec=True, side_effect=destroy) as destroyed,
            pytest.raises(ValueError, match="Not enough host memory for DSA indexer"),
        ):
            build_host_pool(device, page_size=PAGE, mem_layout="layer_first")
        ((anchor,), _) = destroyed.call_args
        assert anchor.kv_buffer is None


def _make_device_pool(geometry: Geometry) -> KVCache:
    return build_device_pool(geometry.kind, tokens=PAGES * PAGE, page_size=PAGE, layers=LAYERS, geometry=geometry)


def _make_bench(geometry: Geometry, layout: str) -> Bench:
    device = _make_device_pool(geometry)
    host = build_host_pool(device, ratio=2.0, page_size=PAGE, mem_layout=layout)
    bench = Bench(device=device, host=host)
    _scribble(device)
    for pool, page in itertools.product(bench.host_pools(), range(host.size // PAGE)):
        pool.set_from_flat_data_page(page * PAGE, _random_like(pool.get_data_page(page * PAGE)))
    return bench


def _scribble(device: KVCache) -> None:
    """Fresh random bytes in every buffer: each layer's KV and each layer's index hold something of their own."""
    for buffer in (*kv_buffers(device), *index_buffers(device)):
        buffer.copy_(_random_like(buffer))


def _random_like(tensor: torch.Tensor) -> torch.Tensor:
    shape = (*tensor.shape[:-1], tensor.shape[-1] * tensor.itemsize)
    return torch.randint(0, 256, shape, dtype=torch.uint8).view(tensor.dtype)


def _shuffled_host_rows(host: AnyHostPool, pages: int) -> torch.Tensor:
    """Rows of `pages` host pages in random order, as if others had been allocated and freed between them."""
    rows = host.alloc(2 * PAGES * PAGE)
    assert rows is not None
    return rows.view(-1, PAGE)[torch.randperm(2 * PAGES)[:pages]].reshape(-1)


def _rows(pages: torch.Tensor) -> torch.Tensor:
    return (pages[:, None] * PAGE + torch.arange(PAGE)).reshape(-1)


def _others(pages: torch.Tensor, total: int) -> torch.Tensor:
    return torch.tensor([page for page in range(total) if page not in pages.tolist()])


if __name__ == "__main__":
    unittest.main()
