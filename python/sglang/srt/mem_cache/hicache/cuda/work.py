"""Divides a copy plan between copy engines and a kernel.

A copy engine moves long stretches at the full speed of the link and takes no SM, but each copy has a fixed cost; a
kernel moves single pages almost as fast, and takes a few SMs. So each run goes where its length belongs::

    run of n pages of a kind  ──  n * page_bytes >= long_copy_bytes  ──▶  one copy       (`Batch`)
                              └─  else                               ──▶  n page pairs   (`Work.pairs`)
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
class Batch:
    """Copies by address and bytes; the arrays are of one shape."""

    host: AddressArray
    device: AddressArray
    sizes: AddressArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
    """What is to be done for a plan.

    `host`, `device` and `sizes` describe the copies of the copy engines, shape ``[layers, copies]``; a copy of a kind
    that a layer does not have has size 0, and `holes` says that there are such. `pairs` is what the kernel reads,
    int64: for each kind the index of its first pair and its number of pairs, then the pairs ``(host page, device
    page)`` of all kinds; the same in every layer, and None if no kind has any.
    """

    host: AddressArray
    device: AddressArray
    sizes: AddressArray
    holes: bool
    pairs: AddressArray | None

    def batch(self, layers: slice) -> Batch | None:
        """The copies of `layers`; None if there are none."""
        host, device = self.host[layers].reshape(-1), self.device[layers].reshape(-1)
        sizes = self.sizes[layers].reshape(-1)
        if self.holes:
            real = sizes > 0
            host, device, sizes = host[real], device[real], sizes[real]
        return Batch(host=host, device=device, sizes=sizes) if len(sizes) else None


def divide(plan: CopyPlan, maps: list[PageMap], *, long_copy_bytes: int | None) -> Work:
    """Divide `plan`; with `long_copy_bytes` None everything is the kernel's, with 0 the copy engines'."""
    none: AddressArray = np.empty((len(maps[0].host_bases), 0), dtype=np.int64)
    parts = [Batch(host=none, device=none, sizes=none)]
    pairs: list[AddressArray] = []
    for page_map in maps:
        long = _long_runs(plan, page_map, long_copy_bytes)
        if long.any():
            parts.append(_copies(plan, page_map, long))
        pairs.append(_pairs(plan, ~long))
    sizes = np.concatenate([part.sizes for part in parts], axis=1)
    return Work(
        host=np.concatenate([part.host for part in parts], axis=1),
        device=np.concatenate([part.device for part in parts], axis=1),
        sizes=sizes,
        holes=bool((sizes == 0).any()),
        pairs=_table(pairs),
    )


def _long_runs(plan: CopyPlan, page_map: PageMap, long_copy_bytes: int | None) -> RunMask:
    if long_copy_bytes is None:
        return np.zeros(len(plan.lengths), dtype=np.bool_)
    pages = plan.lengths if page_map.merges else np.ones_like(plan.lengths)
    return np.asarray(pages * page_map.page_bytes >= long_copy_bytes, dtype=np.bool_)


def _copies(plan: CopyPlan, page_map: PageMap, chosen: RunMask) -> Batch:
    """The copies of one kind, ``[layers, copies]``: a run each, or a page each where pages do not join."""
    host, device, lengths = plan.host_starts[chosen], plan.device_starts[chosen], plan.lengths[chosen]
    if not page_map.merges:
        host, device = _expand(host, lengths), _expand(device, lengths)
        lengths = np.ones_like(host)
    present = page_map.host_bases[:, None] != 0
    return Batch(
        host=page_map.host_bases[:, None] + host * page_map.host_stride,
        device=page_map.device_bases[:, None] + device * page_map.device_stride,
        sizes=present * (lengths * page_map.page_bytes),
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


def _expand(starts: PageArray, lengths: PageArray) -> PageArray:
    ends = np.cumsum(lengths)
    within = np.arange(int(lengths.sum()), dtype=np.int64) - np.repeat(ends - lengths, lengths)
    return np.repeat(starts, lengths) + within
