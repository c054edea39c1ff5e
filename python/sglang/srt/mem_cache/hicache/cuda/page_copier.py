"""Moves whole pages between pinned host memory and a CUDA device, without making the calling thread wait.

    plan ──divide──▶ long runs    copy engines     one call a layer
                 └─▶ short runs   page kernel      one launch a layer (loads), or one for all (backups)

Both run on the stream of the direction, in order, so an event recorded there after a layer covers it. What the
kernel reads comes through a pinned slot, which is not used again before that stream has passed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
import torch
from sglang.srt.mem_cache.l2_transfer import TransferCompletion, make_timing_event_pair

from . import page_kernel
from .copy_engine import CopyEngines
from .page_kernel import KernelShape
from .page_maps import page_maps
from .staging import PinnedRing
from .work import WorkShape, write_pairs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang.srt.managers.cache_controller import LayerLoadingEvent
    from sglang.srt.mem_cache.l2_transfer import L2TransferEngine
    from sglang.srt.mem_cache.pool_host import PoolEntry

    from sglang.srt.mem_cache.layouts.plans import CopyPlan

    from .page_maps import PageMap
    from .work import Work

ONLY_COPY_ENGINES: Final = 0
ONLY_KERNEL: Final = None
LONG_COPY_BYTES: Final = 512 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyTuning:
    """Which copies are long enough for a copy engine, and how the kernel is launched for the others.

    `long_copy_bytes` 0 leaves everything to the copy engines, None to the kernel.
    """

    long_copy_bytes: int | None = LONG_COPY_BYTES
    to_device: KernelShape = field(default_factory=KernelShape)
    to_host: KernelShape = field(default_factory=KernelShape)


class LaunchPageKernel(Protocol):
    """Launches a kernel that does what `page_kernel.launch` does."""

    def __call__(
        self, maps: torch.Tensor, pairs: torch.Tensor, *, pages: int, rows: slice, to_device: bool, shape: KernelShape
    ) -> None:
        """See `page_kernel.launch`."""
        ...


class CudaPageCopier:
    """Copies pages of the pools behind `maps`, all on `device`. One instance a cache; not for several threads.

    `launch` replaces the page kernel.
    """

    def __init__(
        self,
        maps: Sequence[PageMap],
        *,
        device: torch.device,
        tuning: CopyTuning,
        launch: LaunchPageKernel | None = None,
    ) -> None:
        self._launch_kernel = launch or page_kernel.launch
        self._tuning = tuning
        self._layers = len(maps[0].host_bases)
        self._kinds = len(maps)
        self._work = WorkShape(maps, long_copy_bytes=tuning.long_copy_bytes)
        self._engines = CopyEngines()
        self._tables = PinnedRing(device)
        self._map_table = torch.from_numpy(_map_table(maps)).to(device)

    def divide(self, copies: CopyPlan) -> Work:
        """What there is to submit for `copies`."""
        return self._work.divide(copies)

    def back_up(self, copies: CopyPlan, engine: L2TransferEngine) -> TransferCompletion:
        """Submit device to host, after what the current stream has been given so far."""
        submitted = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        submitted.record()
        work = self._work.divide(copies)
        stream = _cuda_stream(engine.device_to_host_stream)
        started, finished, timed = make_timing_event_pair()
        with torch.cuda.stream(stream):
            stream.wait_event(submitted)
            started.record()
            self.enqueue(work, to_device=False, stream=stream)
            finished.record()
        return TransferCompletion(started, finished, timed)

    def load(self, copies: CopyPlan, engine: L2TransferEngine, producer: LayerLoadingEvent) -> TransferCompletion:
        """Submit host to device, after `producer.start_event`; `producer` records an event after each layer."""
        work = self._work.divide(copies)
        stream = _cuda_stream(engine.host_to_device_stream)
        started, finished, timed = make_timing_event_pair()
        with torch.cuda.stream(stream):
            producer.start_event.wait(stream)
            started.record()
            self.enqueue(work, to_device=True, stream=stream, layer_done=producer.complete)
            finished.record()
        return TransferCompletion(started, finished, timed)

    def enqueue(
        self,
        work: Work,
        *,
        to_device: bool,
        stream: torch.cuda.Stream,
        layer_done: Callable[[int], None] | None = None,
    ) -> None:
        """Submit `work` on `stream`, the current one; `layer_done` is told after each layer.

        Raises `RuntimeError` if CUDA refuses.
        """
        slot = pairs = None
        pages = 0
        if work.short is not None:
            slot = self._tables.free_slot(2 * work.short.pages)
            pages = write_pairs(work.short, slot.table)
            pairs = slot.upload(2 * pages)
            if layer_done is None:
                self._launch(pairs, pages, slice(0, self._layers), to_device=to_device)
        for layer in range(self._layers):
            if pairs is not None and layer_done is not None:
                self._launch(pairs, pages, slice(layer, layer + 1), to_device=to_device)
            if work.copies is not None:
                self._submit(work, slice(layer, layer + 1), to_device=to_device, stream=stream)
            if layer_done is not None:
                layer_done(layer)
        if slot is not None:
            slot.release(stream)

    def _launch(self, pairs: torch.Tensor, pages: int, layers: slice, *, to_device: bool) -> None:
        self._launch_kernel(
            self._map_table,
            pairs,
            pages=pages,
            rows=slice(layers.start * self._kinds, layers.stop * self._kinds),
            to_device=to_device,
            shape=self._tuning.to_device if to_device else self._tuning.to_host,
        )

    def _submit(self, work: Work, layers: slice, *, to_device: bool, stream: torch.cuda.Stream) -> None:
        batch = work.batch(layers)
        if batch is None:
            return
        sources, destinations = (batch.host, batch.device) if to_device else (batch.device, batch.host)
        self._engines.copy(sources=sources, destinations=destinations, sizes=batch.sizes, stream=stream)


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


def _map_table(maps: Sequence[PageMap]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Rows as the kernel reads them: layer by layer, all kinds of each. A layer without a kind has empty pages."""
    table = np.zeros((len(maps[0].host_bases), len(maps), page_kernel.MAP_COLUMNS), dtype=np.int64)
    for kind, page_map in enumerate(maps):
        table[:, kind, 0] = page_map.host_bases
        table[:, kind, 1] = page_map.host_stride
        table[:, kind, 2] = page_map.device_bases
        table[:, kind, 3] = page_map.device_stride
        table[:, kind, 4] = np.where(page_map.host_bases != 0, page_map.page_bytes // 8, 0)
    return table.reshape(-1, page_kernel.MAP_COLUMNS)


def _cuda_stream(stream: torch.Stream) -> torch.cuda.Stream:
    if not isinstance(stream, torch.cuda.Stream):
        raise TypeError(f"transfers of a CUDA pool need CUDA streams, got {type(stream).__name__}")
    return stream
