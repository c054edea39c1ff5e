"""Which buffers the page copier can describe by addresses: those whose pages are contiguous and alike; no other is."""

from __future__ import annotations

import unittest
from typing import TYPE_CHECKING

import torch
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase
from typing_extensions import override

from sglang.srt.mem_cache.hicache.copies.cuda.page_copier import page_copier
from sglang.srt.mem_cache.hicache.copies.cuda.page_maps import PageMap, page_maps
from sglang.srt.mem_cache.hicache.copies.transfer import HostTransfer
from sglang.srt.mem_cache.hicache.cpu.support import install_cpu_support
from sglang.srt.mem_cache.hicache.device.pools import build_device_pool
from sglang.srt.mem_cache.hicache.host.pools import build_host_pool
from sglang.srt.mem_cache.hicache.runtime import standalone_runtime
from sglang.srt.mem_cache.layouts import PoolKind
from support.caches import GEOMETRIES, LAYERS

if TYPE_CHECKING:
    from sglang.srt.mem_cache.pool_host import PoolEntry

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

PAGES = 6


def _make_pages(*, page_bytes: int = 64, stride: int | None = None, offset: int = 0) -> torch.Tensor:
    """A view ``[pages, bytes]`` of aligned memory that begins `offset` bytes into it."""
    stride = stride or page_bytes
    memory = torch.zeros(PAGES * stride + 256, dtype=torch.uint8)
    aligned = -memory.data_ptr() % 64
    return memory[aligned + offset :].as_strided((PAGES, page_bytes), (stride, 1))


class TestViews(CustomTestCase):
    def test_pages_are_described_by_base_stride_and_bytes(self) -> None:
        host, device = [_make_pages(stride=192) for _ in range(2)], [_make_pages() for _ in range(2)]
        found = PageMap.of_views(host, device)
        assert found is not None
        self.assertEqual((found.page_bytes, found.host_stride, found.device_stride, found.merges), (64, 192, 64, False))
        self.assertEqual(found.host_bases.tolist(), [view.data_ptr() for view in host])
        self.assertEqual(found.device_bases.tolist(), [view.data_ptr() for view in device])

    def test_a_layer_without_the_buffer_has_no_address(self) -> None:
        found = PageMap.of_views([None, _make_pages()], [None, _make_pages()])
        assert found is not None
        self.assertEqual((found.host_bases[0], found.device_bases[0], found.merges), (0, 0, True))

    def test_views_that_differ_are_scattered_or_lie_askew_are_not_described(self) -> None:
        usual = _make_pages()
        scattered = torch.zeros(PAGES, 64, 2, dtype=torch.uint8)[:, :, 0]
        for name, host, device in (
            ("nothing at all", [None], [None]),
            ("layers of different pages", [usual, _make_pages(page_bytes=32)], [usual, _make_pages(page_bytes=32)]),
            ("sides of different pages", [_make_pages(page_bytes=32)], [usual]),
            ("a page that is not contiguous", [scattered], [scattered]),
            ("a host that begins between two vectors", [_make_pages(offset=8)], [usual]),
            ("a device that begins between two vectors", [usual], [_make_pages(offset=8)]),
            ("pages of no whole vectors", [_make_pages(page_bytes=24)], [_make_pages(page_bytes=24)]),
            ("a stride of no whole vectors", [_make_pages(stride=72)], [usual]),
        ):
            with self.subTest(name):
                self.assertIsNone(PageMap.of_views(host, device))


class TestPools(CustomTestCase):
    @classmethod
    @override
    def setUpClass(cls) -> None:
        super().setUpClass()
        install_cpu_support()
        cls.enterClassContext(standalone_runtime(page_size=4))

    def test_a_host_layout_that_splits_pages_is_left_to_sglangs_engine(self) -> None:
        for mem_layout, described in (("layer_first", True), ("page_first_direct", True), ("page_first", False)):
            with self.subTest(mem_layout=mem_layout):
                self.assertEqual(page_maps(self._entries(PoolKind.MLA, mem_layout), page_size=4) is not None, described)

    def test_pools_that_move_together_are_described_together_or_not_at_all(self) -> None:
        whole, split = self._entries(PoolKind.MHA, "layer_first"), self._entries(PoolKind.MLA, "page_first")
        maps = page_maps(whole, page_size=4)
        assert maps is not None
        self.assertEqual([len(kind.host_bases) for kind in maps], [LAYERS] * 2, "keys and values")
        self.assertIsNone(page_maps([*whole, *split], page_size=4))

    def test_there_is_no_page_copier_for_a_device_other_than_cuda(self) -> None:
        entries = self._entries(PoolKind.MLA, "layer_first")
        self.assertIsNone(page_copier(entries, page_size=4, device="cpu", io_backend="kernel"))

    def _entries(self, kind: PoolKind, mem_layout: str) -> list[PoolEntry]:
        device_pool = build_device_pool(kind, tokens=PAGES * 4, page_size=4, layers=LAYERS, geometry=GEOMETRIES[kind])
        host_pool = build_host_pool(device_pool, ratio=2.0, page_size=4, mem_layout=mem_layout)
        self.addCleanup(host_pool.destroy)
        backend = "kernel" if mem_layout == "page_first" else "direct"
        return HostTransfer(host_pool=host_pool, device_pool=device_pool, io_backend=backend).entries


if __name__ == "__main__":
    unittest.main()
