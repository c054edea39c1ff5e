"""Divides a copy plan between copy engines and a kernel.

A copy engine moves long stretches at the full speed of the link and takes no SM, but each copy has a fixed cost; a
kernel moves single pages almost as fast, and takes a few SMs. So each run goes where its length belongs::

    run of n pages of a kind  ──  n * page_bytes >= long_copy_bytes  ──▶  one copy       (`Copies`)
                              └─  else                               ──▶  n page pairs   (`Pairs`)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from sglang.srt.mem_cache.layouts.pages import PageArray
    from sglang.srt.mem_cache.layouts.plans import CopyPlan

    from .page_maps import AddressArray, PageMap

RunMask: TypeAlias = "npt.NDArray[np.bool_]"
"""One truth value a run of a plan, shape ``[runs]``."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Copies:
    """Copies of one kind in any layer: byte offsets from the layer's bases and sizes, each shape ``[copies]``."""

    page_map: PageMap
    host_offsets: AddressArray
    device_offsets: AddressArray
    sizes: AddressArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Copies by address, each array of shape ``[copies]``."""

    host: AddressArray
    device: AddressArray
    sizes: AddressArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
    """What is left to do for a plan, the same in every layer.

    `pairs` is what the kernel reads, int64: for each kind the index of its first pair and its number of pairs, then
    the pairs ``(host page, device page)`` of all kinds. None if no kind has any.
    """

    copies: tuple[Copies, ...]
    pairs: AddressArray | None

    def batch(self, layers: slice) -> Batch | None:
        """The copies of `layers` for the copy engines; None if there are none."""
        parts = [_in_layers(copies, layers) for copies in self.copies]
        parts = [part for part in parts if len(part.sizes)]
        if not parts:
            return None
        return Batch(
            host=np.concatenate([part.host for part in parts]),
            device=np.concatenate([part.device for part in parts]),
            sizes=np.concatenate([part.sizes for part in parts]),
        )


def divide(plan: CopyPlan, maps: list[PageMap], *, long_copy_bytes: int | None) -> Work:
    """Divide `plan`; with `long_copy_bytes` None everything is the kernel's, with 0 the copy engines'."""
    copies: list[Copies] = []
    pairs: list[AddressArray] = []
    for page_map in maps:
        long = _long_runs(plan, page_map, long_copy_bytes)
        if long.any():
            copies.append(_copies(plan, page_map, long))
        pairs.append(_pairs(plan, ~long))
    return Work(copies=tuple(copies), pairs=_table(pairs))


def _long_runs(plan: CopyPlan, page_map: PageMap, long_copy_bytes: int | None) -> RunMask:
    if long_copy_bytes is None:
        return np.zeros(len(plan.lengths), dtype=np.bool_)
    pages = plan.lengths if page_map.merges else np.ones_like(plan.lengths)
    return np.asarray(pages * page_map.page_bytes >= long_copy_bytes, dtype=np.bool_)


def _copies(plan: CopyPlan, page_map: PageMap, chosen: RunMask) -> Copies:
    host, device, lengths = plan.host_starts[chosen], plan.device_starts[chosen], plan.lengths[chosen]
    if not page_map.merges:
        host, device = _expand(host, lengths), _expand(device, lengths)
        lengths = np.ones_like(host)
    return Copies(
        page_map=page_map,
        host_offsets=host * page_map.host_stride,
        device_offsets=device * page_map.device_stride,
        sizes=lengths * page_map.page_bytes,
    )


def _pairs(plan: CopyPlan, chosen: RunMask) -> AddressArray:
    lengths = plan.lengths[chosen]
    host, device = _expand(plan.host_starts[chosen], lengths), _expand(plan.device_starts[chosen], lengths)
    return np.stack([host, device], axis=1)


def _table(pairs: list[AddressArray]) -> AddressArray | None:
    counts = np.array([len(own) for own in pairs], dtype=np.int64)
    if not counts.any():
        return None
    firsts = np.cumsum(counts) - counts
    header = np.stack([firsts, counts], axis=1)
    return np.concatenate([header, *pairs]).reshape(-1)


def _in_layers(copies: Copies, layers: slice) -> Batch:
    host_bases = copies.page_map.host_bases[layers]
    device_bases = copies.page_map.device_bases[layers]
    present = host_bases != 0
    host_bases, device_bases = host_bases[present], device_bases[present]
    return Batch(
        host=(host_bases[:, None] + copies.host_offsets).reshape(-1),
        device=(device_bases[:, None] + copies.device_offsets).reshape(-1),
        sizes=np.tile(copies.sizes, len(host_bases)),
    )


def _expand(starts: PageArray, lengths: PageArray) -> PageArray:
    ends = np.cumsum(lengths)
    within = np.arange(int(lengths.sum()), dtype=np.int64) - np.repeat(ends - lengths, lengths)
    return np.repeat(starts, lengths) + within
