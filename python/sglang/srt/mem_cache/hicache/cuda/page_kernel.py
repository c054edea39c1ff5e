"""Copies pages between pinned host memory and the device in one launch, with as few programs as are asked for.

The programs share out *chunks* of pages of all kinds and layers, layer by layer, one after the other; the chunks of a
kind begin where those of the kind before ended, so that no program waits for another::

    program        0      1      2      0      1      2      0
    chunk        p0.c0  p0.c1  p1.c0  p1.c1  p2.c0  p2.c1  q0.c0 ...

A program that has done its part of a layer says so in a counter of that layer. So one launch serves a load whose layers
are waited for one by one, and the link is never idle between layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
import triton  # type: ignore[import-untyped]  # Triton ships no types
import triton.language as tl  # type: ignore[import-untyped]  # ditto

if TYPE_CHECKING:
    from collections.abc import Callable

MAP_COLUMNS: Final = 5
"""int64 columns of the kernel's map table: host base and stride, device base and stride (bytes), words of a page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelShape:
    """`programs` thread blocks of `warps` warps; each moves `chunk_bytes` (a power of two, 128 or more) at a time.

    ``programs * chunk_bytes`` are under way at once: the link's bandwidth times its latency, and some more.

    Raises `ValueError` for other chunks: those below 128 bytes would lose bytes, as chunks begin 128 bytes apart.
    """

    programs: int = 16
    warps: int = 16
    chunk_bytes: int = 32768

    def __post_init__(self) -> None:
        if self.chunk_bytes < 128 or self.chunk_bytes & (self.chunk_bytes - 1):
            raise ValueError(f"chunk_bytes must be a power of two from 128 on, got {self.chunk_bytes}")


@triton.jit(do_not_specialize=["pages", "layers", "kinds"])  # type: ignore[untyped-decorator]  # Triton ships no types
def _copy_pages(  # type: ignore[no-untyped-def]  # noqa: ANN202  # compiled from its text: annotations would change it
    maps,  # noqa: ANN001
    pairs,  # noqa: ANN001
    counters,  # noqa: ANN001
    pages,  # noqa: ANN001
    layers,  # noqa: ANN001
    kinds,  # noqa: ANN001
    TO_DEVICE: tl.constexpr,
    CHUNK_WORDS: tl.constexpr,
):
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    lanes = tl.arange(0, CHUNK_WORDS)
    taken = program * 0  # chunks of the maps before, modulo programs
    for layer in range(layers):
        for kind in range(kinds):
            entry = maps + (layer * kinds + kind) * 5
            host_base = tl.load(entry)
            host_stride = tl.load(entry + 1)
            device_base = tl.load(entry + 2)
            device_stride = tl.load(entry + 3)
            words = tl.load(entry + 4)
            chunks = tl.maximum((words + CHUNK_WORDS - 1) // CHUNK_WORDS, 1).to(tl.int32)
            step = ((words + chunks - 1) // chunks + 15) // 16 * 16  # chunks of one size, each at a 128-byte boundary
            total = (pages * chunks).to(tl.int32)
            for item in range((program + programs - taken) % programs, total, programs):
                pair = pairs + 2 * (item // chunks)
                host = host_base + tl.load(pair) * host_stride
                device = device_base + tl.load(pair + 1) * device_stride
                source = host if TO_DEVICE else device
                destination = device if TO_DEVICE else host
                start = (item % chunks) * step
                source_words = tl.multiple_of((source + start * 8).to(tl.pointer_type(tl.int64)), 16)
                destination_words = tl.multiple_of((destination + start * 8).to(tl.pointer_type(tl.int64)), 16)
                inside = lanes < tl.multiple_of(tl.minimum(step, words - start), 2)
                moved = tl.load(source_words + lanes, mask=inside, cache_modifier=".cg")
                tl.store(destination_words + lanes, moved, mask=inside)
            taken = (taken + total) % programs
        tl.debug_barrier()  # every thread's stores come before the count
        tl.atomic_add(counters + layer, 1, sem="release", scope="sys")


class PageKernel:
    """The kernel for the pools behind `maps`, in one direction.

    `maps` is int64 ``[layers * kinds, 5]``, a layer's kinds side by side; `counters` is int32 ``[layers]``. Both are on
    the device, at addresses that 16 divides.
    """

    def __init__(self, maps: torch.Tensor, counters: torch.Tensor, *, to_device: bool, shape: KernelShape) -> None:
        self._tables = (maps, counters)
        self._layers = len(counters)
        self._kinds = len(maps) // self._layers
        self._constants = {"TO_DEVICE": to_device, "CHUNK_WORDS": shape.chunk_bytes // 8}
        self._shape = shape
        self._launch: Callable[..., None] | None = None

    def launch(self, pairs: torch.Tensor, *, pages: int, stream: torch.cuda.Stream | None = None) -> None:
        """Copy `pages` pages of all layers and kinds on `stream`; the first call compiles, which takes seconds.

        `pairs` is int64 on the device, flat, at an address that 16 divides: host page and device page by turns.
        ``shape.programs`` is added to each counter in all, when the pages of its layer are written.
        """
        maps, counters = self._tables
        sizes = (pages, self._layers, self._kinds)
        if self._launch is not None and stream is not None:
            # Triton's own way to it looks at every argument and for the current stream, which takes many times as long
            addresses = (maps.data_ptr(), pairs.data_ptr(), counters.data_ptr())
            self._launch(*addresses, *sizes, *self._constants.values(), stream=stream.cuda_stream)
            return
        kernel: Any = _copy_pages
        with torch.cuda.stream(stream):
            compiled = kernel[(self._shape.programs,)](
                maps, pairs, counters, *sizes, **self._constants, num_warps=self._shape.warps
            )
        if compiled is not None:  # the interpreter compiles nothing
            self._launch = compiled[(self._shape.programs, 1, 1)]
