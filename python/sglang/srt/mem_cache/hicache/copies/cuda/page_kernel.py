"""Copies pages between pinned host memory and the device in one launch, with as few programs as are asked for.

The programs share out the *chunks* of all pages, layer by layer. The chunks of all kinds of a page follow each other,
so that small ones and large ones are under way together; the turns of a layer begin where those of the layer before
ended, so that no program waits for another::

    layer          0   0   0     0   0   0     1   1   1     1
    page           0   0   0     1   1   1     0   0   0     1
    chunk          k0  k1  i0    k0  k1  i0    k0  k1  i0    k0      two of the kind k, one of the kind i
    program        0   1   2     3   0   1     2   3   0     1

A program that has done its part of a layer says so in a counter of that layer. So one launch serves a load whose layers
are waited for one by one, and the link is never idle between layers.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
import triton  # type: ignore[import-untyped]  # Triton ships no types
import triton.language as tl  # type: ignore[import-untyped]  # ditto

from sglang.srt.mem_cache.hicache.copies.cuda.driver import Launch, parameter_sizes

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache.copies.cuda.driver import Parameter

_POINTER_BYTES: Final = 8
_WARP_THREADS: Final = 32
CHUNK_COLUMNS: Final = 5
"""int64 columns of the kernel's chunk table: host base and stride, device base and stride (bytes), words of a chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelShape:
    """`programs` thread blocks of `warps` warps; each moves up to `chunk_bytes` (a power of two from 128 on) at a time.

    ``programs * chunk_bytes`` are under way at once: the link's bandwidth times its latency, and some more.

    Raises `ValueError` for other chunks: those below 128 bytes would lose bytes, as chunks begin 128 bytes apart.
    """

    programs: int = 16
    warps: int = 16
    chunk_bytes: int = 32768

    def __post_init__(self) -> None:
        if self.chunk_bytes < 128 or self.chunk_bytes & (self.chunk_bytes - 1):
            raise ValueError(f"chunk_bytes must be a power of two from 128 on, got {self.chunk_bytes}")


@triton.jit(do_not_specialize=["pages", "layers", "chunks"])  # type: ignore[untyped-decorator]  # Triton ships no types
def _copy_pages(  # type: ignore[no-untyped-def]  # noqa: ANN202  # compiled from its text: annotations would change it
    table,  # noqa: ANN001
    pairs,  # noqa: ANN001
    counters,  # noqa: ANN001
    pages,  # noqa: ANN001
    layers,  # noqa: ANN001
    chunks,  # noqa: ANN001
    TO_DEVICE: tl.constexpr,
    CHUNK_WORDS: tl.constexpr,
):
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    lanes = tl.arange(0, CHUNK_WORDS)
    turns = pages * chunks
    taken = program * 0  # turns of the layers before, modulo programs
    for layer in range(layers):
        for turn in range((program + programs - taken) % programs, turns, programs):
            pair = pairs + 2 * (turn // chunks)
            entry = table + (layer * chunks + turn % chunks) * 5
            host = tl.load(entry) + tl.load(pair) * tl.load(entry + 1)
            device = tl.load(entry + 2) + tl.load(pair + 1) * tl.load(entry + 3)
            source = (host if TO_DEVICE else device).to(tl.pointer_type(tl.int64))
            destination = (device if TO_DEVICE else host).to(tl.pointer_type(tl.int64))
            inside = lanes < tl.multiple_of(tl.load(entry + 4), 2)
            moved = tl.load(tl.multiple_of(source, 16) + lanes, mask=inside, cache_modifier=".cg")
            tl.store(tl.multiple_of(destination, 16) + lanes, moved, mask=inside)
        taken = (taken + turns) % programs
        tl.debug_barrier()  # every thread's stores come before the count
        tl.atomic_add(counters + layer, 1, sem="release", scope="sys")


class PageKernel:
    """The kernel for the pools behind `table`, in one direction.

    `table` is int64 ``[layers, chunks, 5]``, of chunks of at most ``shape.chunk_bytes``; `counters` is int32
    ``[layers]``. Both are on the device, at addresses that 16 divides.
    """

    def __init__(self, table: torch.Tensor, counters: torch.Tensor, *, to_device: bool, shape: KernelShape) -> None:
        self._tables = (table, counters)
        self._sizes = table.shape[:2]
        self._constants = {"TO_DEVICE": to_device, "CHUNK_WORDS": shape.chunk_bytes // 8}
        self._shape = shape
        self._compiled: Any = None
        self._pairs, self._pages = ctypes.c_int64(), ctypes.c_int32()
        self._direct: Launch | None = None

    def launch(self, pairs: torch.Tensor, *, pages: int, stream: torch.cuda.Stream | None = None) -> None:
        """Copy `pages` pages of all layers and kinds on `stream`, on the device that is current.

        `pairs` is int64 on the device, flat, at an address that 16 divides: host page and device page by turns.
        ``shape.programs`` is added to each counter in all, when the pages of its layer are written. `pages` times the
        chunks of one has to be below 2^31. The first call compiles, which takes seconds. Without `stream` Triton takes
        the current one.
        """
        if self._direct is not None and stream is not None:
            self._pairs.value, self._pages.value = pairs.data_ptr(), pages
            self._direct(stream)
            return
        kernel: Any = _copy_pages
        table, counters = self._tables
        with torch.cuda.stream(stream):
            compiled = kernel[(self._shape.programs,)](
                table, pairs, counters, pages, *self._sizes, **self._constants, num_warps=self._shape.warps
            )
        if self._compiled is None and compiled is not None:  # the interpreter compiles nothing
            self._compiled = compiled  # kept, as the function is its
            self._direct = self._direct_launch(compiled)

    def _direct_launch(self, compiled: Any) -> Launch | None:  # noqa: ANN401  # Triton ships no types
        """A launch without Triton, which looks at every argument first; None where the kernel is not as expected.

        After our parameters Triton may add pointers to scratch memory. They are null if it says that none is needed.
        """
        table, counters = self._tables
        own: list[Parameter] = [
            ctypes.c_int64(table.data_ptr()),
            self._pairs,
            ctypes.c_int64(counters.data_ptr()),
            self._pages,
            *map(ctypes.c_int32, self._sizes),
        ]
        sizes = parameter_sizes(compiled.function)
        scratch = sizes[len(own) :]
        metadata = compiled.metadata
        if sizes[: len(own)] != [ctypes.sizeof(parameter) for parameter in own] or set(scratch) - {_POINTER_BYTES}:
            return None
        needed = [getattr(metadata, name, None) for name in ("global_scratch_size", "profile_scratch_size")]
        if any(needed) or needed.count(0) < len(scratch):
            return None
        return Launch(
            compiled.function,
            blocks=self._shape.programs,
            threads=metadata.num_warps * _WARP_THREADS,
            shared_bytes=metadata.shared,
            parameters=[*own, *(ctypes.c_int64() for _ in scratch)],
        )
