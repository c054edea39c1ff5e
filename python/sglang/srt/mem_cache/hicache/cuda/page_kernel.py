"""Copies pages between pinned host memory and the device in one launch, with as few programs as are asked for.

The programs share out *chunks* of pages of all kinds and layers of a launch, one after the other; the chunks of a
kind begin where those of the kind before ended, so that no program waits for another::

    program        0      1      2      0      1      2      0
    chunk        p0.c0  p0.c1  p1.c0  p1.c1  p2.c0  p2.c1  q0.c0 ...
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import triton  # type: ignore[import-untyped]  # Triton ships no types
import triton.language as tl  # type: ignore[import-untyped]  # ditto

if TYPE_CHECKING:
    import torch

MAP_COLUMNS = 5
"""int64 columns of the kernel's map table: host base and stride, device base and stride (bytes), words of a page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelShape:
    """`programs` thread blocks of `warps` warps; each moves `chunk_bytes` (a power of two) at a time.

    ``programs * chunk_bytes`` are under way at once: the link's bandwidth times its latency, and some more.
    """

    programs: int = 16
    warps: int = 16
    chunk_bytes: int = 32768


@triton.jit(do_not_specialize=["pages", "first_map", "maps_end"])  # type: ignore[untyped-decorator]  # Triton ships no types
def _copy_pages(  # type: ignore[no-untyped-def]  # noqa: ANN202  # compiled from its text: annotations would change it
    maps,  # noqa: ANN001
    pairs,  # noqa: ANN001
    pages,  # noqa: ANN001
    first_map,  # noqa: ANN001
    maps_end,  # noqa: ANN001
    TO_DEVICE: tl.constexpr,
    CHUNK_WORDS: tl.constexpr,
):
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    lanes = tl.arange(0, CHUNK_WORDS)
    taken = program * 0  # chunks of the maps before, modulo programs
    for row in range(first_map, maps_end):
        entry = maps + row * 5
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


_compiled: dict[tuple[int | None, bool, KernelShape], Any] = {}


def launch(
    maps: torch.Tensor, pairs: torch.Tensor, *, pages: int, rows: slice, to_device: bool, shape: KernelShape
) -> None:
    """Copy `pages` pages on the current stream, for the rows of the map table.

    `maps` is int64 ``[rows, 5]``; `pairs` is int64, flat: host page and device page by turns. Both are on the device,
    at addresses that 16 divides.
    """
    arguments = (maps, pairs, pages, rows.start, rows.stop)
    chunk_words = shape.chunk_bytes // 8
    key = (maps.device.index, to_device, shape)
    compiled = _compiled.get(key)
    if compiled is not None:  # Triton's own way to it looks at every argument, which takes three times as long
        compiled[(shape.programs, 1, 1)](*arguments, to_device, chunk_words)
        return
    kernel: Any = _copy_pages
    _compiled[key] = kernel[(shape.programs,)](
        *arguments, TO_DEVICE=to_device, CHUNK_WORDS=chunk_words, num_warps=shape.warps
    )
