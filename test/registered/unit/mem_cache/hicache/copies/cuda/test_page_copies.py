"""What the page copier would move, moved in host memory, against SGLang's own engine on the same real pools."""

from __future__ import annotations

import ctypes
import unittest
from typing import TYPE_CHECKING

import numpy as np
import torch
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase
from typing_extensions import override

from sglang.srt.mem_cache.hicache.copies.cuda.kernel_queue import chunk_table
from sglang.srt.mem_cache.hicache.copies.cuda.page_maps import PageMap, page_maps
from sglang.srt.mem_cache.hicache.copies.cuda.work import WorkShape, write_pairs
from sglang.srt.mem_cache.hicache.copies.transfer import HostTransfer
from sglang.srt.mem_cache.hicache.cpu.support import install_cpu_support
from sglang.srt.mem_cache.hicache.device.pools import build_device_pool, index_buffers, kv_buffers
from sglang.srt.mem_cache.hicache.host.pools import AnyHostPool, build_host_pool
from sglang.srt.mem_cache.hicache.runtime import standalone_runtime
from sglang.srt.mem_cache.layouts import PoolKind
from sglang.srt.mem_cache.layouts.plans import CopyPlan
from support.caches import GEOMETRIES, LAYERS
from support.triton_interpreter import interpreted_kernel

if TYPE_CHECKING:
    from types import ModuleType

    from sglang.srt.mem_cache.memory_pool import KVCache

register_cpu_ci(est_time=40, suite="base-a-test-cpu")

PAGES = 12


class TestPageCopies(CustomTestCase):
    kernel: ModuleType

    @classmethod
    @override
    def setUpClass(cls) -> None:
        super().setUpClass()
        install_cpu_support()
        cls.enterClassContext(standalone_runtime(page_size=64))
        cls.kernel = cls.enterClassContext(interpreted_kernel())

    def test_backup_and_load_move_the_bytes_that_sglangs_engine_moves(self) -> None:
        for kind, mem_layout in (
            (kind, mem_layout) for kind in GEOMETRIES for mem_layout in ("layer_first", "page_first_direct")
        ):
            for long_copy_bytes in (0, 2000, None):
                with self.subTest(kind=kind.value, mem_layout=mem_layout, long_copy_bytes=long_copy_bytes):
                    self.check(kind, mem_layout, long_copy_bytes)

    def check(self, kind: PoolKind, mem_layout: str, long_copy_bytes: int | None) -> None:
        """One pool kind: back up with ours and load with SGLang's, and the other way round."""
        page_size = 64 if kind is PoolKind.DSA else 4
        device_pool, host_pool, transfer = make_pools(kind, mem_layout, page_size)
        maps = page_maps(transfer.entries, page_size=page_size)
        assert maps is not None
        plan = random_plan(page_size)
        rows = torch.from_numpy(plan.device_pages())
        for ours_backs_up in (True, False):
            before = randomise(device_pool, page_size)
            if ours_backs_up:
                self.move(plan, maps, long_copy_bytes, to_device=False)
            else:
                transfer.back_up(plan)
            between = randomise(device_pool, page_size)
            if ours_backs_up:
                load_all_layers(transfer, plan)
            else:
                self.move(plan, maps, long_copy_bytes, to_device=True)
            for old, other, new in zip(before, between, views(device_pool, page_size), strict=True):
                other[rows] = old[rows]
                torch.testing.assert_close(new, other, rtol=0, atol=0)
        host_pool.destroy()

    def move(self, plan: CopyPlan, maps: list[PageMap], long_copy_bytes: int | None, *, to_device: bool) -> None:
        """What the copy engines and the kernel do, and what the kernel counts."""
        shape = WorkShape(maps, long_copy_bytes=long_copy_bytes, few_copies=0)
        work = shape.divide(plan)
        if work.short is not None:
            pairs = np.full(64, -1, dtype=np.int64)
            pages = write_pairs(work.short, pairs)
            counters = torch.full((LAYERS + 1,), -2, dtype=torch.int32)
            table = torch.from_numpy(chunk_table(maps, 4096))
            programs = self.kernel.KernelShape(programs=3, warps=4, chunk_bytes=4096)
            kernel = self.kernel.PageKernel(table, counters[:LAYERS], to_device=to_device, shape=programs)
            kernel.launch(torch.from_numpy(pairs), pages=pages)
            self.assertEqual(counters.tolist(), [1] * LAYERS + [-2])
        if work.long is not None:
            copies = shape.copies(work.long)
            sides = (copies.device, copies.host) if to_device else (copies.host, copies.device)
            for target, source, size in zip(*(array.tolist() for array in (*sides, copies.sizes)), strict=True):
                ctypes.memmove(target, source, size)


def make_pools(kind: PoolKind, mem_layout: str, page_size: int) -> tuple[KVCache, AnyHostPool, HostTransfer]:
    """Real pools, and SGLang's engine over them."""
    device_pool = build_device_pool(
        kind, tokens=PAGES * page_size, page_size=page_size, layers=LAYERS, geometry=GEOMETRIES[kind]
    )
    host_pool = build_host_pool(device_pool, ratio=1.5, page_size=page_size, mem_layout=mem_layout)
    return device_pool, host_pool, HostTransfer(host_pool=host_pool, device_pool=device_pool, io_backend="direct")


def random_plan(page_size: int) -> CopyPlan:
    """Single pages and longer runs."""
    return CopyPlan.from_pages(
        page_size=page_size,
        host_pages=np.array([7, 8, 9, 2, 0, 11, 12], dtype=np.int64),
        device_pages=np.array([3, 4, 5, 1, 12, 7, 8], dtype=np.int64),
    )


def views(device_pool: KVCache, page_size: int) -> list[torch.Tensor]:
    """Every buffer as uint8 ``[pages, bytes]``."""
    kv = [buffer.view(torch.uint8).reshape(len(buffer) // page_size, -1) for buffer in kv_buffers(device_pool)]
    return [*kv, *index_buffers(device_pool)]


def randomise(device_pool: KVCache, page_size: int) -> list[torch.Tensor]:
    """Fill every buffer with random bytes and return a copy."""
    for view in views(device_pool, page_size):
        view.random_(0, 256)
    return [view.clone() for view in views(device_pool, page_size)]


def load_all_layers(transfer: HostTransfer, plan: CopyPlan) -> None:
    """A load as the controller submits it."""
    from sglang.srt.managers.cache_controller import LayerLoadingEvent

    producer = LayerLoadingEvent(LAYERS)
    producer.start_event.record()
    transfer.load(plan, producer)


if __name__ == "__main__":
    unittest.main()
