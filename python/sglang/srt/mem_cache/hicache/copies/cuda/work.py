"""Divides a copy plan between copy engines and a kernel.

A copy engine moves long stretches at the full speed of the link and takes no SM, but each copy has a fixed cost; a
kernel moves single pages almost as fast, and takes a few SMs. So each run goes where its length belongs, with all its
kinds of buffer::

    run of n pages  ──  n * bytes of the largest kind's page >= long_copy_bytes  ──▶  one copy a kind and layer
                    └─  else                                                     ──▶  n page pairs for the kernel

A launch has a fixed cost too: where it would save only a few copies, and no small ones, copy engines do everything.

Submissions are on the scheduler's thread, so everything that plans have in common is laid out once (`WorkShape`), and a
plan costs a few array operations.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from sglang.srt.mem_cache.layouts.plans import CopyPlan
from sglang.srt.mem_cache.layouts.rounding import ceil_div

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from sglang.srt.mem_cache.layouts.pages import PageArray

    from .page_maps import AddressArray, PageMap

SMALL_COPY_BYTES: Final = 64 << 10
"""Submitting a copy of less can take ten times as long: 5 us on the calling thread instead of 0.5, on an H200."""
RunMask: TypeAlias = "npt.NDArray[np.bool_]"
"""One truth value a run of a plan, shape ``[runs]``."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Copies:
    """Copies by address and bytes: flat int64 arrays of one length by layer; a layer's end at ``ends[layer]``."""

    host: AddressArray
    device: AddressArray
    sizes: AddressArray
    ends: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
    """What is to be done for a plan, as parts of it; None where there is nothing.

    `long` are the runs of the copy engines. `short` is what the kernel copies page by page, the same in every layer.
    """

    long: CopyPlan | None = None
    short: CopyPlan | None = None


class WorkShape:
    """How plans over the pools behind `maps` are divided.

    `long_copy_bytes` 0 leaves everything to the copy engines, None to the kernel. The kernel is left out of plans in
    which it would save no more than `few_copies` copies, none of them small.
    """

    def __init__(self, maps: Sequence[PageMap], *, long_copy_bytes: int | None, few_copies: int) -> None:
        self._merges = all(page_map.merges for page_map in maps)
        self._host_bases = _by_layer([page_map.host_bases for page_map in maps])
        self._device_bases = _by_layer([page_map.device_bases for page_map in maps])
        self._host_strides = _by_kind([page_map.host_stride for page_map in maps])
        self._device_strides = _by_kind([page_map.device_stride for page_map in maps])
        page_bytes = _by_kind([page_map.page_bytes for page_map in maps])
        self._page_bytes = np.where(self._host_bases != 0, page_bytes, 0)  # [layers, kinds, 1]
        self._copies_per_run = int(np.count_nonzero(self._page_bytes))  # a layer without a kind has none
        self._few_copies = few_copies
        self._smallest_page_bytes = int(page_bytes.min())
        self._long_pages = _long_pages(int(page_bytes.max()), long_copy_bytes, merges=self._merges)

    def divide(self, plan: CopyPlan) -> Work:
        """What is to be done for `plan`."""
        lengths = plan.lengths
        if not len(lengths):
            return Work()
        if self._long_pages is None:
            return Work(short=plan)
        short = lengths < self._long_pages
        if not short.any() or self._few_and_not_small(lengths[short]):
            return Work(long=plan)
        if short.all():
            return Work(short=plan)
        return Work(long=_part(plan, ~short), short=_part(plan, short))

    def _few_and_not_small(self, lengths: PageArray) -> bool:
        """Whether copy engines may have these runs although they are short."""
        copies, shortest = (len(lengths), lengths.min()) if self._merges else (lengths.sum(), 1)
        few = copies * self._copies_per_run <= self._few_copies
        return bool(few and shortest * self._smallest_page_bytes >= SMALL_COPY_BYTES)

    def copies(self, plan: CopyPlan) -> Copies:
        """A copy for each kind and run of `plan`, or for each kind and page where neighbours do not join."""
        if self._merges:
            host, device, lengths = plan.host_starts, plan.device_starts, plan.lengths
        else:
            host, device = plan.host_pages(), plan.device_pages()
            lengths = np.ones_like(host)
        host = self._host_bases + self._host_strides * host  # [layers, kinds, copies]
        device = self._device_bases + self._device_strides * device
        sizes = self._page_bytes * lengths
        if self._copies_per_run < self._page_bytes.size:
            real = sizes > 0
            ends = real.sum(axis=(1, 2)).cumsum().tolist()
            return Copies(host=host[real], device=device[real], sizes=sizes[real], ends=ends)
        layer = host[0].size
        ends = range(layer, host.size + 1, layer)
        return Copies(host=host.reshape(-1), device=device.reshape(-1), sizes=sizes.reshape(-1), ends=ends)


def write_pairs(plan: CopyPlan, table: AddressArray) -> int:
    """Write the page pairs ``host, device`` of `plan` into the front of `table`, flat; returns their number."""
    pages = plan.pages
    pairs = table[: 2 * pages].reshape(pages, 2)
    whole = pages == len(plan.lengths)  # only single pages
    pairs[:, 0] = plan.host_starts if whole else plan.host_pages()
    pairs[:, 1] = plan.device_starts if whole else plan.device_pages()
    return pages


def _long_pages(page_bytes: int, long_copy_bytes: int | None, *, merges: bool) -> int | None:
    """The shortest run for the copy engines; None if the kernel does everything."""
    if long_copy_bytes is None:
        return None
    if merges:
        return max(1, ceil_div(long_copy_bytes, page_bytes))
    return 1 if page_bytes >= long_copy_bytes else sys.maxsize


def _by_layer(bases: list[AddressArray]) -> AddressArray:
    """``[layers, kinds, 1]``."""
    return np.stack(bases, axis=1)[:, :, None]


def _by_kind(values: list[int]) -> AddressArray:
    """``[kinds, 1]``."""
    return np.array(values, dtype=np.int64)[:, None]


def _part(plan: CopyPlan, chosen: RunMask) -> CopyPlan:
    return CopyPlan(
        page_size=plan.page_size,
        host_starts=plan.host_starts[chosen],
        device_starts=plan.device_starts[chosen],
        lengths=plan.lengths[chosen],
    )
