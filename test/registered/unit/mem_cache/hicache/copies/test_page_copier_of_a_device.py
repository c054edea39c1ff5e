"""A device's own page copier takes the place of SGLang's token-wise copies, in both directions and for every pool.

The copier here moves the pages of real pools in host memory, as the one for CUDA does on a GPU.
"""

from __future__ import annotations

import ctypes
import unittest
from unittest import mock

import numpy as np
from sglang.srt.managers.cache_controller import LayerLoadingEvent
from sglang.srt.mem_cache.l2_transfer import L2TransferEngine, TransferCompletion, make_timing_event_pair
from sglang.test.ci.ci_register import register_cpu_ci

from sglang.srt.mem_cache.hicache.copies.cuda.page_maps import page_maps
from sglang.srt.mem_cache.hicache.copies.transfer import HostTransfer
from sglang.srt.mem_cache.layouts import LayoutConfigError
from sglang.srt.mem_cache.layouts.plans import CopyPlan
from support.caches import GEOMETRIES, CacheSpec, CacheTestCase, Rank, SlowEngine, chain
from support.groups import Group

register_cpu_ci(est_time=15, suite="base-a-test-cpu")


class _HostCopier:
    """Moves the pages of a plan by address, at once."""

    def __init__(self, transfer: HostTransfer, page_size: int, layers: int) -> None:
        maps = page_maps(transfer.entries, page_size=page_size)
        assert maps is not None
        self._maps = maps
        self._layers = layers
        self.pages = {"back_up": 0, "load": 0}

    def back_up(self, copies: CopyPlan, engine: L2TransferEngine) -> TransferCompletion:
        self.pages["back_up"] += copies.pages
        self._move(copies, slice(0, self._layers), to_device=False)
        return self._completion()

    def load(self, copies: CopyPlan, engine: L2TransferEngine, producer: LayerLoadingEvent) -> TransferCompletion:
        self.pages["load"] += copies.pages
        for layer in range(self._layers):
            self._move(copies, slice(layer, layer + 1), to_device=True)
            producer.complete(layer)
        return self._completion()

    def _move(self, copies: CopyPlan, layers: slice, *, to_device: bool) -> None:
        pages = list(zip(copies.host_pages().tolist(), copies.device_pages().tolist(), strict=True))
        for kind in self._maps:
            for host_base, device_base in zip(kind.host_bases[layers], kind.device_bases[layers], strict=True):
                for host_page, device_page in pages:
                    host = int(host_base) + host_page * kind.host_stride
                    device = int(device_base) + device_page * kind.device_stride
                    ctypes.memmove(*((device, host) if to_device else (host, device)), kind.page_bytes)

    def _completion(self) -> TransferCompletion:
        started, finished, timed = make_timing_event_pair()
        started.record()
        finished.record()
        return TransferCompletion(started, finished, timed)


class TestPageCopierOfADevice(CacheTestCase):
    def test_every_byte_comes_back_and_sglangs_engine_copies_nothing(self) -> None:
        for pool in GEOMETRIES:
            for layout in ("identity", "cp_shared"):
                with self.subTest(pool=pool.value, layout=layout):
                    self._check(CacheSpec(pool=pool, layout=layout, ranks=2))

    def _check(self, spec: CacheSpec) -> None:
        group = Group(spec)
        copiers = [self._install(rank) for rank in group.ranks]
        group.serve(chain(spec, 1, 2, 3, 4))
        group.serve(chain(spec, 1, 2, 9))
        group.evict_all()
        for pages in ((1, 2, 3, 4), (1, 2, 9)):
            request = group.serve(chain(spec, *pages))  # compares the bytes of what it loads
            self.assertEqual(request.prefix_pages, len(pages))
        moved = [copier.pages for copier in copiers]
        for direction in ("back_up", "load"):
            self.assertEqual(sum(pages[direction] for pages in moved), 5 * (1 if spec.lanes > 1 else spec.ranks))
        for rank in group.ranks:
            self.assertEqual((rank.engine.writes, rank.engine.loads), ([], []))
        group.check()

    def _install(self, rank: Rank) -> _HostCopier:
        def transfer(copier: _HostCopier | None) -> HostTransfer:
            return HostTransfer(
                host_pool=rank.cache.token_to_kv_pool_host,
                device_pool=rank.device_pool,
                io_backend="direct",
                copier=copier or False,
            )

        copier = _HostCopier(transfer(None), rank.spec.page_size, rank.device_pool.layer_num)
        rank.controller.transfer = transfer(copier)
        rank.controller.transfer.engine = rank.engine = SlowEngine()
        return copier

    def test_a_staged_write_back_gets_host_rows_on_the_host_and_everything_else_gets_rows_on_the_device(self) -> None:
        plan = CopyPlan.from_pages(page_size=4, host_pages=np.array([3, 1]), device_pages=np.array([1, 2]))
        for mem_layout, staged, where in (
            ("page_first", True, "cpu"),
            ("page_first", False, "meta"),
            ("layer_first", True, "meta"),
        ):
            (rank,) = Group(CacheSpec(layout="identity", ranks=1)).ranks
            host_pool, device_pool = rank.cache.token_to_kv_pool_host, rank.device_pool
            host_pool.layout, host_pool.can_use_write_back_jit = mem_layout, staged
            device_pool.device = "meta"
            with self.subTest(mem_layout=mem_layout, staged=staged):
                transfer = HostTransfer(host_pool=host_pool, device_pool=device_pool, io_backend="kernel")
                engine = mock.create_autospec(L2TransferEngine)
                transfer.engine = engine
                transfer.back_up(plan)
                transfer.load(plan, LayerLoadingEvent(device_pool.layer_num))
                ((backup,),), _ = engine.submit_device_to_host.call_args
                ((load,),), _ = engine.submit_host_to_device.call_args
                self.assertEqual([str(one.host_indices.device) for one in (backup, load)], [where, "meta"])
                self.assertEqual([str(one.device_indices.device) for one in (backup, load)], ["meta", "meta"])

    def test_an_unknown_io_backend_and_one_that_cannot_address_the_host_layout_are_refused(self) -> None:
        (rank,) = Group(CacheSpec(layout="identity", ranks=1)).ranks
        host_pool = rank.cache.token_to_kv_pool_host
        with self.assertRaisesRegex(
            LayoutConfigError, "--hicache-io-backend must be one of kernel, direct, got 'kernel_ascend'"
        ):
            HostTransfer(host_pool=host_pool, device_pool=rank.device_pool, io_backend="kernel_ascend")
        host_pool.layout = "page_first"
        with self.assertRaisesRegex(
            LayoutConfigError,
            "--hicache-io-backend direct needs --hicache-mem-layout layer_first or page_first_direct, got 'page_first'",
        ):
            HostTransfer(host_pool=host_pool, device_pool=rank.device_pool, io_backend="direct")


if __name__ == "__main__":
    unittest.main()
