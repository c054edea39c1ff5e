"""A request ends while a forward pass that still writes its last row is under way, and its pages are backed up at once.

Overlap scheduling launches the next pass before it looks at the results of the last one, so a request that has ended
was in it: the row of its last token is written late. Here the real cache runs on a device that does what its streams
allow, in any order; each rank has a `forward` stream, which the scheduler would name.
"""

from __future__ import annotations

import unittest
from functools import partial
from typing import TYPE_CHECKING

import torch
from sglang.test.ci.ci_register import register_cpu_ci

from sglang.srt.mem_cache.hicache.copies.cuda.page_copier import CopyTuning, CudaPageCopier
from sglang.srt.mem_cache.hicache.copies.cuda.page_kernel import KernelShape
from sglang.srt.mem_cache.hicache.copies.cuda.page_maps import page_maps
from sglang.srt.mem_cache.hicache.copies.transfer import HostTransfer
from sglang.srt.mem_cache.hicache.tree.calls import Insertion
from sglang.srt.mem_cache.layouts import PoolKind
from support.caches import CacheSpec, CacheTestCase, Rank, chain
from support.groups import Group, chain_lanes, pages_of
from support.simulated_cuda import SimulatedCuda, Stream

if TYPE_CHECKING:
    from array import array

    from sglang.srt.mem_cache.hicache.copies.transfer import PageCopier
    from sglang.srt.mem_cache.layouts.pages import PageArray

register_cpu_ci(est_time=25, suite="base-a-test-cpu")

SEEDS = 6
LATE_STEPS = 60
ENGINES, KERNEL, SGLANG = "copy engines", "page kernel", "SGLang's engine"
LONG_COPY_BYTES = {ENGINES: 0, KERNEL: None}
SPECS = (
    CacheSpec(ranks=2),
    CacheSpec(ranks=2, pool=PoolKind.DSA, mem_layout="page_first_direct"),
    CacheSpec(layout="identity", ranks=1, pool=PoolKind.MHA),
)


class Device:
    """The ranks of `spec` on a simulated device, where `path` moves their pages."""

    def __init__(self, cuda: SimulatedCuda, spec: CacheSpec, path: str) -> None:
        self.cuda = cuda
        self.group = Group(spec)
        self.forwards = [Stream() for _ in self.group.ranks]
        for rank, forward in zip(self.group.ranks, self.forwards, strict=True):
            rank.controller.load_fence_stream = forward  # type: ignore[assignment]  # a simulated one
            rank.controller.transfer = self._transfer(rank, path)

    def _transfer(self, rank: Rank, path: str) -> HostTransfer:
        host_pool = rank.cache.token_to_kv_pool_host
        transfer = HostTransfer(host_pool=host_pool, device_pool=rank.device_pool, io_backend="direct", copier=False)
        if path == SGLANG:
            for entry in transfer.entries:
                for name in ("backup_from_device_all_layer", "load_to_device_per_layer"):
                    setattr(entry.host_pool, name, partial(self._on_current_stream, getattr(entry.host_pool, name)))
            return transfer
        maps = page_maps(transfer.entries, page_size=rank.spec.page_size)
        assert maps is not None
        shape = KernelShape(programs=3)
        tuning = CopyTuning(long_copy_bytes=LONG_COPY_BYTES[path], few_copies=0, to_device=shape, to_host=shape)
        copier: PageCopier = CudaPageCopier(maps, device=torch.device("cpu"), tuning=tuning)
        return HostTransfer(host_pool=host_pool, device_pool=rank.device_pool, io_backend="direct", copier=copier)

    def _on_current_stream(self, copy: object, *arguments: object, **named: object) -> None:
        assert callable(copy)
        self.cuda.current.submit(partial(copy, *arguments, **named))

    def finish_request(self, tokens: array[int]) -> None:
        """A request of `tokens` has ended; the forward pass under way has not written its pages yet."""
        for rank, forward in zip(self.group.ranks, self.forwards, strict=True):
            pages = rank.cache.alloc_slots(chain_lanes(rank, tokens, None, 0, len(tokens) // rank.spec.page_size))
            assert pages is not None
            self.launch(forward, rank, tokens, pages)
            rank.cache.put(Insertion(key=rank.key(tokens), value=rank.cache.slots.slots(pages)))

    def launch(self, forward: Stream, rank: Rank, tokens: array[int], pages: PageArray) -> None:
        """A forward pass that takes long and ends with writing `tokens` to `pages`."""
        forward.submit(parts=iter([None] * LATE_STEPS))
        forward.submit(partial(rank.write, tokens, pages))

    def wrong_pages(self, tokens: array[int]) -> list[int]:
        """Load a chain that only the host has; pages with wrong bytes on each rank."""
        loaded = []
        for rank in self.group.ranks:
            match = rank.cache.match(rank.key(tokens))
            assert (len(match.slots), match.host_tokens) == (0, len(tokens)), "not on the host alone"
            slots, _ = rank.cache.bring_back(match.host_node)
            rank.cache.ready_to_load_host_cache()
            loaded.append(pages_of(slots, rank.spec.page_size))
        self.cuda.drain()
        self.group.settle()
        return [rank.mismatches(tokens, pages) for rank, pages in zip(self.group.ranks, loaded, strict=True)]


class TestLateForward(CacheTestCase):
    def test_the_row_that_a_forward_pass_under_way_writes_is_in_the_backup_and_nothing_waits_for_it(self) -> None:
        for spec in SPECS:
            for path in (ENGINES, KERNEL, SGLANG):
                for seed in range(SEEDS):
                    with self.subTest(spec=spec, path=path, seed=seed), SimulatedCuda(seed) as cuda:
                        device = Device(cuda, spec, path)
                        cuda.drain()
                        self.check_backup(device)

    def check_backup(self, device: Device) -> None:
        """Two requests end in one step; later their pages come back from the host."""
        before = device.cuda.steps
        chains = [chain(device.group.spec, *pages) for pages in ((1, 2, 3), (7, 8))]
        for tokens in chains:
            device.finish_request(tokens)
        device.group.submit()
        self.assertEqual((device.cuda.steps, device.cuda.waits), (before, 0), "the device was waited for")
        device.cuda.drain()
        device.group.settle()
        device.group.evict_all()
        for tokens in chains:
            self.assertEqual(set(device.wrong_pages(tokens)), {0})

    def test_a_leaf_that_is_written_back_while_a_forward_pass_writes_it_is_whole(self) -> None:
        for path in (ENGINES, SGLANG):
            for seed in range(SEEDS):
                with self.subTest(path=path, seed=seed), SimulatedCuda(seed) as cuda:
                    spec = CacheSpec(ranks=2, policy="write_back")
                    device = Device(cuda, spec, path)
                    cuda.drain()
                    device.finish_request(chain(spec, 1, 2, 3))
                    device.group.evict_all()
                    cuda.drain()
                    self.assertEqual(set(device.wrong_pages(chain(spec, 1, 2, 3))), {0})


if __name__ == "__main__":
    unittest.main()
