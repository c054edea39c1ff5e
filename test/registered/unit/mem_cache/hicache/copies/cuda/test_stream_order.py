"""Loads and backups in flight together, on a device that does what its streams allow in any order.

Pages are written by work that is under way when a transfer is submitted, and are used again as soon as an event allows:
what is read or written a moment too early or too late has wrong bytes.
"""

from __future__ import annotations

import unittest
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.managers.cache_controller import LayerLoadingEvent
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

from sglang.srt.mem_cache.hicache.copies.cuda.kernel_queue import KernelQueue
from sglang.srt.mem_cache.hicache.copies.cuda.page_copier import CopyTuning, CudaPageCopier
from sglang.srt.mem_cache.hicache.copies.cuda.page_kernel import KernelShape
from sglang.srt.mem_cache.hicache.copies.cuda.page_maps import PageMap
from sglang.srt.mem_cache.layouts.plans import CopyPlan
from support.simulated_cuda import Event, SimulatedCuda, Stream

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sglang.srt.mem_cache.l2_transfer import TransferCompletion

    from sglang.srt.mem_cache.layouts.pages import PageArray

register_cpu_ci(est_time=25, suite="base-a-test-cpu")

LAYERS = 3
PAGES = 48
KINDS = (32, 16)
SEEDS = 40
HOST, DEVICE = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Pages on each side, what they hold when it has ended, and its events; `used` when the layers have been read."""

    pages: tuple[PageArray, PageArray]
    wanted: list[np.ndarray[Any, Any]]
    completion: TransferCompletion
    begun: Event
    used: Event


class Traffic:
    """Transfers over two kinds of buffer, of which one is absent in a layer. No page is in two transfers at once."""

    def __init__(
        self,
        cuda: SimulatedCuda,
        *,
        programs: int = 3,
        long_copy_bytes: int = 2 * KINDS[0],
        shapes: Mapping[bool, KernelShape] | None = None,
    ) -> None:
        self.cuda = cuda
        self.rng = np.random.default_rng(cuda.rng.randrange(1 << 32))
        self.sides = [[np.zeros((LAYERS, PAGES, size), dtype=np.uint8) for size in KINDS] for _ in (HOST, DEVICE)]
        self.free = [set(range(PAGES)) for _ in (HOST, DEVICE)]
        self.flying: list[Transfer] = []
        self.settled: list[Transfer] = []
        self.wrong: list[str] = []
        self.consumer = Stream()
        self.forward = Stream()
        self.engine: Any = type("Engine", (), {"host_to_device_stream": Stream(), "device_to_host_stream": Stream()})
        shapes = shapes or dict.fromkeys((True, False), KernelShape(programs=programs))
        self.maps = [self._map(kind) for kind in range(len(KINDS))]
        self.copier = CudaPageCopier(
            self.maps,
            device=torch.device("cpu"),
            tuning=CopyTuning(
                long_copy_bytes=long_copy_bytes, few_copies=0, to_device=shapes[True], to_host=shapes[False]
            ),
        )

    def _map(self, kind: int) -> PageMap:
        host, device = (
            [torch.from_numpy(layer) if (kind, at) != (1, 1) else None for at, layer in enumerate(side[kind])]
            for side in self.sides
        )
        found = PageMap.of_views(host, device)
        assert found is not None
        return found

    def submit(self, *, to_device: bool) -> None:
        """A transfer of pages that nobody uses; work that is under way still writes the device's."""
        pages = self._take(int(self.rng.integers(0, 9)))
        plan = CopyPlan.from_pages(page_size=4, host_pages=pages[HOST], device_pages=pages[DEVICE])
        wanted = self._random(len(pages[HOST]))
        late = self._random(len(pages[HOST])) if to_device else wanted
        fenced = to_device and bool(self.rng.integers(0, 2))  # as the controller does for a forward pass under way
        forward = self.forward if fenced else self.cuda.current
        forward.submit(parts=iter([None] * int(self.rng.integers(0, 40))))
        forward.submit(lambda: self._write(DEVICE, pages, late))
        begun = Event()
        begun.record(forward)
        if not to_device:
            completion = self.copier.back_up(plan, self.engine)
        else:
            self._write(HOST, pages, wanted)
            producer: Any = LayerLoadingEvent(LAYERS)
            producer.start_event.record()
            if fenced:
                self.engine.host_to_device_stream.wait_stream(forward)
            completion = self.copier.load(plan, self.engine, producer)
            for layer, event in enumerate(producer.load_events):
                self.consumer.wait_event(event)
                self.consumer.submit(partial(self._check, "at its event", DEVICE, pages, wanted, layer))
        used = Event()
        used.record(self.consumer)
        self.flying.append(Transfer(pages=pages, wanted=wanted, completion=completion, begun=begun, used=used))

    def load_page(self, page: int, *, behind: Stream) -> None:
        """A load of one page, full of sevens, after what `behind` has been given."""
        pages = np.array([page], dtype=np.int64)
        self.sides[HOST][0][:, page] = 7
        producer: Any = LayerLoadingEvent(LAYERS)
        producer.start_event.record(behind)
        self.copier.load(CopyPlan.from_pages(page_size=4, host_pages=pages, device_pages=pages), self.engine, producer)

    def settle(self) -> None:
        """Wait for the oldest transfer, and use the pages that it read for something else."""
        transfer = self.flying.pop(0)
        while not transfer.completion.finish_event.query():
            assert self.cuda.step(), "a transfer never ends"
        events = (transfer.begun, transfer.completion.start_event, transfer.completion.finish_event)
        times = [event.passed_at or 0 for event in events]
        if not 0 < times[0] < times[1] < times[2]:
            self.wrong.append(f"a transfer whose data was there at {times[0]} ran from {times[1]} to {times[2]}")
        for side in (HOST, DEVICE):
            self._check("when it has ended", side, transfer.pages, transfer.wanted)
        self.settled.append(transfer)
        while len(self.settled) > 1 or (self.settled and not self.flying):
            self._reuse(self.settled.pop(0))

    def _reuse(self, transfer: Transfer) -> None:
        while not transfer.used.query():
            assert self.cuda.step(), "a layer is never ready"
        for side in (HOST, DEVICE):
            self._check("later", side, transfer.pages, transfer.wanted)
            self._write(side, transfer.pages, self._random(len(transfer.pages[HOST])))
            self.free[side].update(transfer.pages[side].tolist())

    def _take(self, count: int) -> tuple[PageArray, PageArray]:
        """Free pages of both sides, in runs and singly."""
        while min(map(len, self.free)) < count:
            self.settle()
        found = []
        for free in self.free:
            first = int(self.rng.integers(0, len(free) - count + 1))
            chosen = np.array(sorted(free)[first : first + count], dtype=np.int64)
            cut = int(self.rng.integers(0, count + 1))
            found.append(np.concatenate([chosen[cut:], chosen[:cut]]))
            free.difference_update(chosen.tolist())
        return found[0], found[1]

    def _random(self, count: int) -> list[np.ndarray[Any, Any]]:
        return [self.rng.integers(0, 256, (LAYERS, count, size), dtype=np.uint8) for size in KINDS]

    def _write(self, side: int, pages: tuple[PageArray, PageArray], content: list[np.ndarray[Any, Any]]) -> None:
        for buffer, words in zip(self.sides[side], content, strict=True):
            buffer[:, pages[side]] = words

    def _check(
        self,
        when: str,
        side: int,
        pages: tuple[PageArray, PageArray],
        wanted: list[np.ndarray[Any, Any]],
        only: int | None = None,
    ) -> None:
        for kind, words in enumerate(wanted):
            for layer in range(LAYERS) if only is None else [only]:
                present = (kind, layer) != (1, 1)
                if present and not np.array_equal(self.sides[side][kind][layer, pages[side]], words[layer]):
                    self.wrong.append(f"{('host', 'device')[side]} bytes of kind {kind}, layer {layer}, {when}")


class TestStreamOrder(CustomTestCase):
    def run_traffic(self, traffic: Traffic, transfers: int) -> None:
        """Transfers both ways, with some work done between submissions, and everything at the end."""
        for _ in range(transfers):
            traffic.submit(to_device=bool(traffic.rng.integers(0, 2)))
            for _ in range(int(traffic.rng.choice([0, 0, 5, 60]))):
                traffic.cuda.step()
        while traffic.flying:
            traffic.settle()
        traffic.cuda.drain()
        self.assertEqual(traffic.wrong, [])

    def test_no_byte_is_read_or_written_before_or_after_its_time(self) -> None:
        for seed in range(SEEDS):
            with self.subTest(seed=seed), SimulatedCuda(seed) as cuda:
                self.run_traffic(Traffic(cuda), 24)

    def test_nothing_waits_for_what_is_submitted_later(self) -> None:
        for seed in range(SEEDS // 4):
            with self.subTest(seed=seed), SimulatedCuda(seed, one_queue=True) as cuda:
                self.run_traffic(Traffic(cuda), 24)

    def test_copy_engines_alone_need_no_kernel(self) -> None:
        with SimulatedCuda(0) as cuda:
            traffic = Traffic(cuda, long_copy_bytes=0)
            self.assertEqual(cuda.shapes, {})
            self.run_traffic(traffic, 24)

    def test_a_transfer_has_started_before_its_first_byte_is_moved(self) -> None:
        for seed in range(SEEDS):
            for long_copy_bytes in (1, 2 * KINDS[0], 1 << 20):  # copy engines, both, the kernel
                with self.subTest(seed=seed, long_copy_bytes=long_copy_bytes), SimulatedCuda(seed) as cuda:
                    traffic = Traffic(cuda, long_copy_bytes=long_copy_bytes)
                    for to_device in (False, True):
                        traffic.submit(to_device=to_device)
                        self.check_start(traffic, DEVICE if to_device else HOST)
                        cuda.drain()

    def check_start(self, traffic: Traffic, side: int) -> None:
        """Once the data of the last transfer is there, nothing moves on that side until its start is recorded."""
        transfer = traffic.flying[-1]
        pages = transfer.pages[side]
        while not transfer.begun.query():
            traffic.cuda.step()
        before = [buffer[:, pages].copy() for buffer in traffic.sides[side]]
        while not transfer.completion.start_event.query():
            traffic.cuda.step()
        for buffer, bytes_before in zip(traffic.sides[side], before, strict=True):
            self.assertTrue(np.array_equal(buffer[:, pages], bytes_before))
        self.assertTrue(transfer.completion.timing_enabled)

    def test_each_direction_has_the_kernel_that_was_asked_for(self) -> None:
        shapes = {True: KernelShape(programs=3), False: KernelShape(programs=6)}
        with SimulatedCuda(0) as cuda:
            traffic = Traffic(cuda, shapes=shapes)
            self.assertEqual(cuda.shapes, shapes)
            self.run_traffic(traffic, 24)

    def test_a_driver_that_cannot_wait_for_a_count_is_found_when_the_copier_is_made(self) -> None:
        with SimulatedCuda(0) as cuda:
            cuda.refuse_wait = 0
            with self.assertRaisesRegex(RuntimeError, "cannot wait for a count: CUDA driver error 801"):
                Traffic(cuda)

    def test_pages_beyond_the_room_of_a_slot_get_a_larger_one(self) -> None:
        with SimulatedCuda(0) as cuda:
            traffic = Traffic(cuda)
            queue = KernelQueue(traffic.maps, device=torch.device("cpu"), to_device=True, shape=KernelShape(programs=3))
            for pages in (1, 16_384, 16_385, 40_000, 3):
                host = np.arange(pages, dtype=np.int64)[::-1].copy()
                pairs = queue.send(CopyPlan.from_pages(page_size=4, host_pages=host, device_pages=host))
                cuda.drain()
                found = pairs.slot.on_device[: 2 * pages].numpy().reshape(pages, 2)
                self.assertEqual(pairs.pages, pages)
                self.assertTrue(np.array_equal(found, np.stack([host, host], axis=1)))

    def test_chunks_are_no_longer_than_the_kernel_moves_at_a_time(self) -> None:
        with SimulatedCuda(0):
            page_map = PageMap.of_views([torch.zeros(2, 1024)], [torch.zeros(2, 1024)])
            assert page_map is not None
            shape = KernelShape(programs=3, chunk_bytes=256)
            KernelQueue([page_map], device=torch.device("cpu"), to_device=True, shape=shape)  # the simulation looks

    def test_a_slot_that_could_not_be_released_is_not_used_again(self) -> None:
        with SimulatedCuda(0) as cuda:
            traffic = Traffic(cuda, long_copy_bytes=1 << 20)
            cuda.drain()
            earlier, gate = Stream(), Stream()
            opened: list[bool] = []
            gate.submit(ready=lambda: bool(opened))
            cuda.refuse_release = True
            with self.assertRaisesRegex(RuntimeError, "refused"):
                traffic.load_page(0, behind=earlier)
            for page in range(1, 5):
                traffic.load_page(page, behind=earlier)
            traffic.load_page(9, behind=gate)
            while cuda.step():
                pass
            self.assertTrue((traffic.sides[DEVICE][0][:, :5] == 7).all())
            self.assertFalse((traffic.sides[DEVICE][0][:, 9] == 7).any(), "loaded before its start")
            opened.append(True)
            cuda.drain()

    def test_counts_go_on_past_2_to_the_32(self) -> None:
        for seed in range(SEEDS // 4):
            with self.subTest(seed=seed), SimulatedCuda(seed) as cuda:
                self.run_traffic(Traffic(cuda, programs=3 << 28), 24)

    def test_after_a_load_that_cuda_refused_the_next_one_is_waited_for_and_ends(self) -> None:
        for seed in range(SEEDS):
            for refused in ("copy", "wait", "launch", "upload", "release"):
                with self.subTest(seed=seed, refused=refused), SimulatedCuda(seed) as cuda:
                    traffic = Traffic(cuda)
                    cuda.refuse_copy = 2 if refused == "copy" else None
                    cuda.refuse_wait = 1 if refused == "wait" else None
                    cuda.refuse_launch = refused == "launch"
                    cuda.refuse_upload = refused == "upload"
                    cuda.refuse_release = refused == "release"
                    with self.assertRaisesRegex(RuntimeError, "refused|CUDA driver error"):
                        for _ in range(50):
                            traffic.submit(to_device=True)
                    cuda.drain()
                    self.run_traffic(traffic, 6)


if __name__ == "__main__":
    unittest.main()
