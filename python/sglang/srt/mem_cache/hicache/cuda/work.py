"""Divides a copy plan between copy engines and a kernel.

A copy engine moves long stretches at the full speed of the link and takes no SM, but each copy has a fixed cost; a
kernel moves single pages almost as fast, and takes a few SMs. So each run goes where its length belongs, with all its
kinds of buffer::

    run of n pages  ──  n * bytes of the largest kind's page >= long_copy_bytes  ──▶  one copy a kind and layer
                    └─  else                                                     ──▶  n page pairs for the kernel

Submissions are on the scheduler's thread, so everything that plans have in common is laid out once (`WorkShape`), and a
plan costs a few array operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from sglang.srt.mem_cache.layouts.plans import CopyPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from .page_maps import AddressArray, PageMap

RunMask: TypeAlias = "npt.NDArray[np.bool_]"
"""One truth value a run of a plan, shape ``[runs]``."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Copies by address and bytes, int64; the arrays are of one shape."""

    host: AddressArray
    device: AddressArray
    sizes: AddressArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
    """What is to be done for a plan.

    `copies` are those of the copy engines, arrays ``[layers, copies]``, or None; a copy of a kind that a layer does
    not have has size 0, and `holes` says that there are such. `short` is the part of the plan that the kernel copies
    page by page, the same in every layer, or None.
    """

    copies: Batch | None
    holes: bool
    short: CopyPlan | None

    def batch(self, layers: slice) -> Batch | None:
        """The copies of `layers`; None if there are none."""
        if self.copies is None:
            return None
        host, device = self.copies.host[layers].reshape(-1), self.copies.device[layers].reshape(-1)
        sizes = self.copies.sizes[layers].reshape(-1)
        if self.holes:
            real = sizes > 0
            host, device, sizes = host[real], device[real], sizes[real]
        return Batch(host=host, device=device, sizes=sizes) if len(sizes) else None


class WorkShape:
    """How plans over the pools behind `maps` are divided.

    `long_copy_bytes` 0 leaves everything to the copy engines, None to the kernel.
    """

    def __init__(self, maps: Sequence[PageMap], *, long_copy_bytes: int | None) -> None:
        self._merges = all(page_map.merges for page_map in maps)
        self._host_bases = _by_layer([page_map.host_bases for page_map in maps])
        self._device_bases = _by_layer([page_map.device_bases for page_map in maps])
        self._host_strides = _by_kind([page_map.host_stride for page_map in maps])
        self._device_strides = _by_kind([page_map.device_stride for page_map in maps])
        page_bytes = _by_kind([page_map.page_bytes for page_map in maps])
        self._page_bytes = np.where(self._host_bases != 0, page_bytes, 0)  # [layers, kinds, 1]
        self._holes = not self._page_bytes.all()
        self._long_pages = _long_pages(int(page_bytes.max()), long_copy_bytes, merges=self._merges)

    def divide(self, plan: CopyPlan) -> Work:
        """What is to be done for `plan`."""
        lengths = plan.lengths
        if not len(lengths):
            return Work(copies=None, holes=False, short=None)
        if self._long_pages is None or int(lengths.max()) < self._long_pages:
            return Work(copies=None, holes=False, short=plan)
        if int(lengths.min()) >= self._long_pages:
            return Work(copies=self._copies(plan), holes=self._holes, short=None)
        long = lengths >= self._long_pages
        return Work(copies=self._copies(_part(plan, long)), holes=self._holes, short=_part(plan, ~long))

    def _copies(self, plan: CopyPlan) -> Batch:
        """A copy for each kind and run, or for each kind and page where neighbours do not join; kinds side by side."""
        if self._merges:
            host, device, lengths = plan.host_starts, plan.device_starts, plan.lengths
        else:
            host, device = plan.host_pages(), plan.device_pages()
            lengths = np.ones_like(host)
        layers = len(self._host_bases)
        return Batch(
            host=(self._host_bases + self._host_strides * host).reshape(layers, -1),
            device=(self._device_bases + self._device_strides * device).reshape(layers, -1),
            sizes=(self._page_bytes * lengths).reshape(layers, -1),
        )


def write_pairs(plan: CopyPlan, table: AddressArray) -> int:
    """Write the page pairs ``host, device`` of `plan` into the front of `table`, flat; returns their number."""
    pages = plan.pages
    pairs = table[: 2 * pages].reshape(pages, 2)
    whole = pages == len(plan.lengths)  # only single pages
    pairs[:, 0] = plan.host_starts if whole else plan.host_pages()
    pairs[:, 1] = plan.device_starts if whole else plan.device_pages()
    return pages


def _long_pages(page_bytes: int, long_copy_bytes: int | None, *, merges: bool) -> int | None:
    """The shortest run for the copy engines; None if there is none."""
    if long_copy_bytes is None:
        return None
    if merges:
        return max(1, -(-long_copy_bytes // page_bytes))
    return 1 if page_bytes >= long_copy_bytes else None


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
