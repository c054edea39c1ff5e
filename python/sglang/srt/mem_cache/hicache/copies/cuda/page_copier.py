"""Moves whole pages between pinned host memory and a CUDA device, without making the calling thread wait.

    plan ──divide──▶ long runs    copy engines     one call a layer, on the stream of the direction
                 └─▶ short runs   page kernel      one launch for all layers, on a stream of its own

Both at once keep the link full. In a load, the direction's stream waits for the kernel's count after each layer's
copies, so an event recorded there covers the layer; in the end it waits for the kernel's stream. What the kernel reads
comes through a pinned slot, which is not used again before the kernel has ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch
from sglang.srt.mem_cache.l2_transfer import TransferCompletion, make_timing_event_pair

from .copy_engine import CopyEngines, CopyTables
from .kernel_queue import KernelQueue
from .page_kernel import KernelShape
from .page_maps import page_maps
from .work import WorkShape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang.srt.managers.cache_controller import LayerLoadingEvent
    from sglang.srt.mem_cache.l2_transfer import L2TransferEngine
    from sglang.srt.mem_cache.pool_host import PoolEntry

    from sglang.srt.mem_cache.layouts.plans import CopyPlan

    from .page_maps import PageMap

ONLY_COPY_ENGINES: Final = 0
LONG_COPY_BYTES: Final = 512 << 10
FEW_COPIES: Final = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyTuning:
    """Which copies are long enough for a copy engine, and how the kernel is launched for the others.

    `long_copy_bytes` 0 leaves everything to the copy engines, None to the kernel. Up to `few_copies` copies that are
    neither long nor small (`work.SMALL_COPY_BYTES`) go to the copy engines all the same: submitting them takes no
    longer than a launch and its waits.
    """

    long_copy_bytes: int | None = LONG_COPY_BYTES
    few_copies: int = FEW_COPIES
    to_device: KernelShape = field(default_factory=KernelShape)
    to_host: KernelShape = field(default_factory=KernelShape)


class CudaPageCopier:
    """Copies pages of the pools behind `maps`, all on `device`. One instance a cache; not for several threads.

    Its methods raise `RuntimeError` if CUDA refuses. Part of the copies may be under way then: nobody may use the pages
    of either side before the device is idle, and layers whose copies are missing have no new event.
    """

    def __init__(self, maps: Sequence[PageMap], *, device: torch.device, tuning: CopyTuning) -> None:
        self._layers = len(maps[0].host_bases)
        self._work = WorkShape(maps, long_copy_bytes=tuning.long_copy_bytes, few_copies=tuning.few_copies)
        self._engines = CopyEngines()
        self._kernels: dict[bool, KernelQueue] = {}  # copy engines alone need no compiler and no memory
        if tuning.long_copy_bytes != ONLY_COPY_ENGINES:
            for to_device, shape in ((True, tuning.to_device), (False, tuning.to_host)):
                self._kernels[to_device] = KernelQueue(maps, device=device, to_device=to_device, shape=shape)

    def back_up(self, copies: CopyPlan, engine: L2TransferEngine) -> TransferCompletion:
        """Submit device to host, after what the current stream has been given so far."""
        submitted = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        submitted.record()
        return self._submit(copies, _cuda_stream(engine.device_to_host_stream), after=submitted)

    def load(self, copies: CopyPlan, engine: L2TransferEngine, producer: LayerLoadingEvent) -> TransferCompletion:
        """Submit host to device, after `producer.start_event`; `producer` records an event after each layer."""
        stream = _cuda_stream(engine.host_to_device_stream)
        return self._submit(copies, stream, after=producer.start_event, layer_events=producer.load_events)

    def _submit(
        self,
        plan: CopyPlan,
        stream: torch.cuda.Stream,
        *,
        after: torch.Event,
        layer_events: Sequence[torch.Event] | None = None,
    ) -> TransferCompletion:
        """Submit `plan` on `stream`. A load has `layer_events`, of which one is recorded after each layer."""
        to_device = layer_events is not None
        work = self._work.divide(plan)
        with torch.cuda.stream(stream):  # for its device; events are told the stream, which torch takes 5 us to look up
            after.wait(stream)  # first, since torch sees to it that the device has a context; the driver does not
            pairs = None if work.short is None else self._kernels[to_device].send(work.short)
            started, finished, timed = make_timing_event_pair()
            if pairs is None:
                tables = self._tables(work.long, to_device=to_device)
                started.record(stream)
            elif work.long is None:
                tables = None
                pairs.queue.launch(pairs, behind=stream, started=started)
            else:
                started.record(stream)
                pairs.queue.launch(pairs, behind=stream, started=None)
                tables = self._tables(work.long, to_device=to_device)  # while the kernel is at work
            for layer in range(self._layers):
                if tables is not None:
                    self._engines.submit(tables, layer, stream=stream)
                if layer_events is not None:
                    if pairs is not None:
                        pairs.queue.wait_for_layer(layer, stream)
                    layer_events[layer].record(stream)
            if pairs is not None:
                stream.wait_stream(pairs.queue.stream)
            finished.record(stream)
        return TransferCompletion(started, finished, timed)

    def _tables(self, plan: CopyPlan | None, *, to_device: bool) -> CopyTables | None:
        if plan is None:
            return None
        copies = self._work.copies(plan)
        sources, destinations = (copies.host, copies.device) if to_device else (copies.device, copies.host)
        return CopyTables(sources=sources, destinations=destinations, sizes=copies.sizes, ends=copies.ends)


def page_copier(
    entries: Sequence[PoolEntry], *, page_size: int, device: str, io_backend: str, tuning: CopyTuning | None = None
) -> CudaPageCopier | None:
    """The copier for these pools, or None where SGLang's engine has to do: another device, pages that are scattered.

    Backend ``direct`` uses copy engines alone, ``kernel`` the kernel as well, for short runs; `tuning` overrides both.
    """
    if not device.startswith("cuda") or torch.version.cuda is None:
        return None
    maps = page_maps(entries, page_size=page_size)
    if maps is None:
        return None
    if tuning is None:
        tuning = CopyTuning() if io_backend == "kernel" else CopyTuning(long_copy_bytes=ONLY_COPY_ENGINES)
    return CudaPageCopier(maps, device=torch.device(device), tuning=tuning)


def _cuda_stream(stream: torch.Stream) -> torch.cuda.Stream:
    if not isinstance(stream, torch.cuda.Stream):
        raise TypeError(f"transfers of a CUDA pool need CUDA streams, got {type(stream).__name__}")
    return stream
