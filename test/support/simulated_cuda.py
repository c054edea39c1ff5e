"""A CUDA device that does what its streams were given when the test says so, in any order that CUDA allows.

Streams, events, copy engines and the page kernel only note their work; `SimulatedCuda.step` then does a little of the
first work of a stream that it draws, moving bytes between tensors in host memory. So where a wait is missing, work runs
too early or too late and bytes are wrong; a wait that is never satisfied leaves nothing to do.
"""

from __future__ import annotations

import ctypes
import random
from collections import deque
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace
from typing import TYPE_CHECKING, ClassVar, Self
from unittest.mock import patch

import numpy as np
import torch
from sglang.srt.managers import cache_controller
from typing_extensions import override

from sglang.srt.mem_cache import l2_transfer
from sglang.srt.mem_cache.hicache.copies.cuda import copy_engine, driver, kernel_queue, page_copier, staging

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sglang.srt.mem_cache.hicache.copies.cuda.page_kernel import KernelShape

PROGRAMS = 3
"""Programs that the simulated kernel has; each counts for a third of those that were asked for."""


class SimulatedCuda:
    """Stands in for the device between enter and exit; `seed` draws the order of work.

    With `one_queue` everything is done in the order of submission, as where streams share a queue of the hardware.
    `refuse_copy` counts down to the copy that CUDA refuses, `refuse_wait` to the wait for a count; `refuse_launch`,
    `refuse_upload` and `refuse_release` are for one call. `shapes` are those of the kernels that were made, by whether
    they load.
    """

    active: ClassVar[SimulatedCuda]

    def __init__(self, seed: int, *, one_queue: bool = False) -> None:
        self.rng = random.Random(seed)
        self.submitted = count()
        self.steps = 0
        self.waits = 0
        self._one_queue = one_queue
        self.streams: list[Stream] = []
        self.shapes: dict[bool, KernelShape] = {}
        self.cudaGetErrorString = lambda code: b"refused"
        self.refuse_copy: int | None = None
        self.refuse_wait: int | None = None
        self.refuse_launch = False
        self.refuse_upload = False
        self.refuse_release = False
        self._patches = ExitStack()

    def __enter__(self) -> Self:
        SimulatedCuda.active = self
        self.current = Stream()
        for target, name, new in (
            (torch.cuda, "Stream", Stream),
            (torch.cuda, "Event", Event),
            (torch.cuda, "stream", self._use),
            (torch.cuda, "current_stream", lambda device=None: self.current),
            (cache_controller, "device_module", SimpleNamespace(Event=Event)),
            (l2_transfer, "device_module", SimpleNamespace(Event=Event, Stream=Stream, stream=self._use)),
            (l2_transfer, "make_timing_event_pair", lambda: (Event(), Event(), True)),
            (page_copier, "make_timing_event_pair", lambda: (Event(), Event(), True)),
            (staging, "Slot", SimulatedSlot),
            (kernel_queue, "PageKernel", SimulatedKernel),
            (driver, "_library", lambda: self),
            (copy_engine, "_library", lambda: self),
        ):
            self._patches.enter_context(patch.object(target, name, new))
        return self

    def __exit__(self, *error: object) -> None:
        self._patches.close()

    @contextmanager
    def _use(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def step(self) -> bool:
        """Do a part of the first work of some stream that can go on. False if none can."""
        able = [stream for stream in self.streams if stream.work]
        if self._one_queue and able:
            able = [min(able, key=lambda stream: stream.work[0].number)]
        able = [stream for stream in able if stream.work[0].ready()]
        if able:
            self.steps += 1
            self.rng.choice(able).step()
        return bool(able)

    def drain(self) -> None:
        """Do everything. Raises `AssertionError` if something waits for ever."""
        while self.step():
            pass
        assert not any(stream.work for stream in self.streams), "a stream waits for ever"

    # CUDA's libraries, as far as they are called.

    def cudaRuntimeGetVersion(self, version: object) -> int:
        """Leaves 0, so copies come one by one."""
        return 0

    cudaDriverGetVersion = cudaRuntimeGetVersion

    def cudaMemcpyAsync(self, target: int, source: int, size: int, kind: int, handle: int) -> int:
        """A copy on a stream, or the refusal that was asked for."""
        if self.refuse_copy is not None:
            self.refuse_copy -= 1
            if self.refuse_copy < 0:
                self.refuse_copy = None
                return 1
        self.streams[handle - 1].submit(lambda: ctypes.memmove(target, source, size))
        return 0

    def cuMemcpyHtoDAsync_v2(self, target: int, source: int, size: int, handle: int) -> int:
        """A copy on a stream, or the refusal that was asked for."""
        if self.refuse_upload:
            self.refuse_upload = False
            return 1
        self.streams[handle - 1].submit(lambda: ctypes.memmove(target, source, size))
        return 0

    def cuStreamWaitValue32_v2(self, handle: int, address: int, value: int, flags: int) -> int:
        """CU_STREAM_WAIT_VALUE_GEQ: the difference, as a signed number, is not negative."""
        assert flags == 0
        if self.refuse_wait is not None:
            self.refuse_wait -= 1
            if self.refuse_wait < 0:
                self.refuse_wait = None
                return 801
        counter = ctypes.c_uint32.from_address(address)
        self.streams[handle - 1].submit(ready=lambda: (counter.value - value) % (1 << 32) < 1 << 31)
        return 0


@dataclass(slots=True)
class _Work:
    number: int
    ready: Callable[[], bool]
    parts: Iterator[None]


class Stream:
    """Work in the order in which it was submitted."""

    device = torch.device("cpu")

    def __init__(self, device: torch.device | None = None) -> None:
        streams = SimulatedCuda.active.streams
        streams.append(self)
        self.cuda_stream = len(streams)
        self.work: deque[_Work] = deque()

    def submit(
        self,
        do: Callable[[], object] = lambda: None,
        *,
        ready: Callable[[], bool] = lambda: True,
        parts: Iterator[None] | None = None,
    ) -> None:
        """Note something that is done at once, or in parts."""
        number = next(SimulatedCuda.active.submitted)
        self.work.append(_Work(number, ready, _whole(do) if parts is None else parts))

    def step(self) -> None:
        """A part of the first work."""
        if next(self.work[0].parts, self) is self:
            self.work.popleft()

    def wait_event(self, event: Event) -> None:
        """As in torch."""
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        """As in torch."""
        event = Event()
        event.record(stream)
        event.wait(self)


class Event:
    """As in torch: who waits or asks means the last `record` so far; one that was never recorded has passed."""

    def __init__(self) -> None:
        self._passed = [True]
        self.passed_at: int | None = None
        """When it was passed last, as a number that grows with everything that the device does."""

    def record(self, stream: Stream | None = None) -> None:
        """As in torch."""
        self._passed = passed = [False]

        def passes() -> None:
            passed[0] = True
            self.passed_at = SimulatedCuda.active.steps

        (stream or SimulatedCuda.active.current).submit(passes)

    def wait(self, stream: Stream | None = None) -> None:
        """As in torch."""
        passed = self._passed
        (stream or SimulatedCuda.active.current).submit(ready=lambda: passed[0])

    def query(self) -> bool:
        """As in torch."""
        return self._passed[0]

    def synchronize(self) -> None:
        """As in torch: the device goes on until the event has passed. `SimulatedCuda.waits` counts what had not."""
        cuda = SimulatedCuda.active
        cuda.waits += not self._passed[0]
        while not self._passed[0]:
            assert cuda.step(), "an event never passes"


class SimulatedSlot(staging.Slot):
    """A slot whose both sides are in host memory."""

    def __init__(self, words: int, device: torch.device) -> None:
        self.table = np.zeros(words, dtype=np.int64)
        self.on_device = torch.zeros(words, dtype=torch.int64)
        self._released = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it so

    @override
    def release(self, stream: torch.cuda.Stream) -> None:
        """As on a device, or the refusal that was asked for."""
        cuda = SimulatedCuda.active
        if cuda.refuse_release:
            cuda.refuse_release = False
            raise RuntimeError("refused")
        super().release(stream)


class SimulatedKernel:
    """The chunks of the table, by programs that go on in any order."""

    def __init__(self, table: torch.Tensor, counters: torch.Tensor, *, to_device: bool, shape: KernelShape) -> None:
        SimulatedCuda.active.shapes[to_device] = shape
        self._layers = table.tolist()
        assert 8 * int(table[..., -1].max()) <= shape.chunk_bytes, "the rest of a chunk would not be copied"
        self._counters = counters
        self._to_device = to_device
        self._count = shape.programs // PROGRAMS

    def launch(self, pairs: torch.Tensor, *, pages: int, stream: Stream) -> None:
        """As on a device, or the refusal that was asked for."""
        cuda = SimulatedCuda.active
        if cuda.refuse_launch:
            cuda.refuse_launch = False
            raise RuntimeError("refused")
        stream.submit(parts=_interleaved([self._program(pairs, pages, first) for first in range(PROGRAMS)]))

    def _program(self, pairs: torch.Tensor, pages: int, first: int) -> Iterator[None]:
        for layer, chunks in enumerate(self._layers):
            for turn in range(first, pages * len(chunks), PROGRAMS):
                page, chunk = divmod(turn, len(chunks))
                host_page, device_page = pairs[2 * page : 2 * page + 2].tolist()
                host_base, host_stride, device_base, device_stride, words = chunks[chunk]
                host, device = host_base + host_page * host_stride, device_base + device_page * device_stride
                ctypes.memmove(*((device, host) if self._to_device else (host, device)), 8 * words)
                yield
            ctypes.c_uint32.from_address(self._counters.data_ptr() + 4 * layer).value += self._count
            yield


def _whole(do: Callable[[], object]) -> Iterator[None]:
    do()
    yield from ()


def _interleaved(programs: list[Iterator[None]]) -> Iterator[None]:
    while programs:
        program = SimulatedCuda.active.rng.choice(programs)
        if next(program, program) is program:
            programs.remove(program)
        yield
