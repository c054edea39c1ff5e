"""The page kernel in one direction: its stream, its tables, and its layers, which other streams can wait for.

There is one launch for all layers. The kernel counts layers on the device, and a stream waits for a count, without any
thread and without the kernel's end::

    the kernel's stream     [ layer 0  |  layer 1  |  layer 2 ...      one launch of n programs
                                      +n          +n                   each adds 1 when it is through with a layer
    another stream           wait ▶ event, wait ▶ event, ...           one event a layer

Counts only grow, modulo 2^32, and the driver compares them so (`cuStreamWaitValue32`, ``CU_STREAM_WAIT_VALUE_GEQ``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from sglang.srt.mem_cache.layouts.rounding import ceil_div

from . import driver
from .page_kernel import CHUNK_COLUMNS, PageKernel
from .staging import PinnedRing
from .work import write_pairs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang.srt.mem_cache.layouts.plans import CopyPlan

    from .page_kernel import KernelShape
    from .page_maps import AddressArray, PageMap
    from .staging import Slot

_COUNTER_BYTES: Final = 4
_CHUNK_ALIGNMENT: Final = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """The page pairs of one launch, on their way to the device in a slot."""

    queue: KernelQueue
    slot: Slot
    pages: int


class KernelQueue:
    """Launches the page kernel for the pools behind `maps`, one copy after the other, on `stream`.

    Raises `OSError` if CUDA's driver library cannot be loaded, `AttributeError` if it lacks a call (of CUDA 12 and
    later), `RuntimeError` if it cannot wait for a count.
    """

    def __init__(self, maps: Sequence[PageMap], *, device: torch.device, to_device: bool, shape: KernelShape) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._programs = shape.programs
        counters = torch.zeros(len(maps[0].host_bases), dtype=torch.int32, device=device)
        table = torch.from_numpy(chunk_table(maps, shape.chunk_bytes)).to(device)
        self._kernel = PageKernel(table, counters, to_device=to_device, shape=shape)
        self._first_counter = counters.data_ptr()
        self._counted = 0
        self.stream.wait_stream(torch.cuda.current_stream(device))
        self._ring = PinnedRing(self.stream)
        with torch.cuda.stream(self.stream):
            self._launch(self._ring.free_slot(1), pages=0)  # compiles, so that no request has to wait for it
            self.wait_for_layer(0, self.stream)  # a driver that refuses to wait does so now

    def send(self, plan: CopyPlan) -> Pairs:
        """Send the page pairs of `plan` to the device, which has to be current, in a slot that a launch releases."""
        slot = self._ring.free_slot(2 * plan.pages)
        pages = write_pairs(plan, slot.table)
        slot.upload(2 * pages, self.stream)
        return Pairs(queue=self, slot=slot, pages=pages)

    def launch(self, pairs: Pairs, *, behind: torch.cuda.Stream, started: torch.Event | None) -> None:
        """Submit the copy of `pairs`, to begin after what `behind` has been given so far. The device has to be current.

        `started` is recorded as the last thing before the launch: an idle device comes to it at once, and has to wait
        for the calling thread until there is a kernel.
        """
        self.stream.wait_stream(behind)
        if started is not None:
            started.record(self.stream)
        self._launch(pairs.slot, pages=pairs.pages)

    def _launch(self, slot: Slot, *, pages: int) -> None:
        self._kernel.launch(slot.on_device, pages=pages, stream=self.stream)
        self._counted = (self._counted + self._programs) % (1 << 32)  # each layer; at once, whatever fails next
        slot.release(self.stream)

    def wait_for_layer(self, layer: int, stream: torch.cuda.Stream) -> None:
        """Make `stream` wait until the last launch is through with `layer`. Raises `RuntimeError` if CUDA refuses."""
        driver.wait_for_count(self._first_counter + _COUNTER_BYTES * layer, self._counted, stream=stream)


def chunk_table(maps: Sequence[PageMap], chunk_bytes: int) -> AddressArray:
    """Chunks as the kernel reads them, ``[layers, chunks, CHUNK_COLUMNS]``: those of a page of all kinds, in order.

    The chunks of a kind are at most `chunk_bytes` (128 or more) and begin at multiples of 128 bytes; all but the last
    are of one size. In a layer without the kind they are empty.
    """
    chunks: list[AddressArray] = []
    for page_map in maps:
        count = ceil_div(page_map.page_bytes, chunk_bytes)
        step = ceil_div(page_map.page_bytes, count * _CHUNK_ALIGNMENT) * _CHUNK_ALIGNMENT
        for first in range(0, page_map.page_bytes, step):
            words = min(step, page_map.page_bytes - first) // 8
            chunk = np.empty((len(page_map.host_bases), CHUNK_COLUMNS), dtype=np.int64)
            chunk[:, 0] = page_map.host_bases + first
            chunk[:, 1] = page_map.host_stride
            chunk[:, 2] = page_map.device_bases + first
            chunk[:, 3] = page_map.device_stride
            chunk[:, 4] = np.where(page_map.host_bases != 0, words, 0)
            chunks.append(chunk)
    return np.stack(chunks, axis=1)
