"""SGLang's three ``direct`` copy operators for host memory, page by page.

SGLang takes these operators from its CUDA kernels and calls them with one index a token::

    transfer_kv_direct                   [layer][row]            ->  [layer][row]
    transfer_kv_all_layer_direct_lf_pf   [layer][row]            ->  [page][layer][row in page]
    transfer_kv_per_layer_direct_pf_lf   [page][layer][in page]  ->  one [row] buffer

HiCache moves whole pages only. So an index tensor is read as one number a page, neighbouring pages
are joined into runs, and each run is one memory copy of raw bytes::

    src 128..191 | 192..255 | 0..63     page_size = 64
    dst  64..127 | 128..191 | 512..575
    runs (source page, target page, pages): (2, 1, 2) (0, 8, 1)

The dtype does not matter, float8 included. No buffer of the size of the data is made.

All operators: buffers and index tensors lie in host memory (another device raises `TypeError`); index
tensors are 1-D integers of equal length, whole pages, in any order; an empty pair copies nothing.
`IndexError` for a page outside a buffer and `ValueError` for lengths or widths that do not fit are
raised before the buffer in question is written; earlier buffers of the same call keep their copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

_Bytes: TypeAlias = "npt.NDArray[np.uint8]"


def transfer_kv_direct(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy rows between buffers of the same order, ``[rows, ...]`` a layer on both sides."""
    runs = _PageRuns.of(src_indices, dst_indices, page_size)
    for source, target in zip(src_layers, dst_layers, strict=True):
        runs.copy(_pages_of(source, page_size), _pages_of(target, page_size))


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy all layers, ``[rows, ...]`` each, into page-first buffers ``[pages, layers, page_size, ...]``.

    `src_ptrs` holds the layers of the first target, then those of the second (K and V of MHA). Raises `ValueError`,
    with nothing copied, if the layers do not share out over the targets.
    """
    layers, rest = divmod(len(src_ptrs), len(dst_ptrs))
    if rest:
        raise ValueError(f"{len(src_ptrs)} source layers do not share out over {len(dst_ptrs)} targets")
    runs = _PageRuns.of(src_indices, dst_indices, page_size)
    for number, target in enumerate(dst_ptrs):
        blocks = _layer_blocks_of(target)
        for layer, source in enumerate(src_ptrs[number * layers : (number + 1) * layers]):
            runs.copy(_pages_of(source, page_size), blocks[:, layer])


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Copy layer `layer_id` of page-first buffers ``[pages, layers, page_size, ...]`` into ``[rows, ...]`` buffers."""
    runs = _PageRuns.of(src_indices, dst_indices, page_size)
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        runs.copy(_layer_blocks_of(source)[:, layer_id], _pages_of(target, page_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class _PageRuns:
    """``(source page, target page, pages)`` of each copy; the ends are one past the highest page used."""

    runs: Sequence[tuple[int, int, int]]
    source_end: int
    target_end: int

    @classmethod
    def of(cls, src_indices: torch.Tensor, dst_indices: torch.Tensor, page_size: int) -> _PageRuns:
        sources = _page_numbers(src_indices, page_size)
        targets = _page_numbers(dst_indices, page_size)
        if len(sources) != len(targets):
            raise ValueError(f"{src_indices.numel()} source indices for {dst_indices.numel()} target indices")
        if not sources:
            return cls(runs=(), source_end=0, target_end=0)
        if min(sources) < 0 or min(targets) < 0:
            raise IndexError(f"negative page: source {min(sources)}, target {min(targets)}")
        return cls(runs=_join(sources, targets), source_end=max(sources) + 1, target_end=max(targets) + 1)

    def copy(self, source: _Bytes, target: _Bytes) -> None:
        """Copy pages of `source` into `target`; both ``[pages, page bytes]``, rows of a page contiguous."""
        if not self.runs:
            return
        if self.source_end > len(source) or self.target_end > len(target):
            raise IndexError(
                f"page {self.source_end - 1} of {len(source)} source pages or {self.target_end - 1} of "
                f"{len(target)} target pages is out of range"
            )
        if source.shape[1] != target.shape[1]:
            raise ValueError(f"a source page has {source.shape[1]} bytes, a target page {target.shape[1]}")
        for source_page, target_page, pages in self.runs:
            target[target_page : target_page + pages] = source[source_page : source_page + pages]


def _join(sources: list[int], targets: list[int]) -> list[tuple[int, int, int]]:
    """Join pages that follow each other on both sides."""
    runs: list[tuple[int, int, int]] = []
    first_source, first_target, pages = sources[0], targets[0], 0
    for source, target in zip(sources, targets, strict=True):
        if source != first_source + pages or target != first_target + pages:
            runs.append((first_source, first_target, pages))
            first_source, first_target, pages = source, target, 0
        pages += 1
    runs.append((first_source, first_target, pages))
    return runs


def _page_numbers(indices: torch.Tensor, page_size: int) -> list[int]:
    slots = indices.numpy()
    if len(slots) % page_size:
        raise ValueError(f"{len(slots)} indices are no whole number of pages of {page_size}")
    firsts = slots[::page_size]
    assert _starts_and_ends_pages(slots, firsts, page_size), f"indices are not whole pages of {page_size}: {slots}"
    numbers: list[int] = (firsts // page_size).tolist()
    return numbers


def _starts_and_ends_pages(slots: npt.NDArray[np.int64], firsts: npt.NDArray[np.int64], page_size: int) -> bool:
    """Two looks a page instead of page_size: caught are shifted and torn pages, not a shuffle inside one."""
    lasts = slots[page_size - 1 :: page_size]
    return not np.any(firsts % page_size) and bool(np.all(lasts - firsts == page_size - 1))


def _pages_of(buffer: torch.Tensor, page_size: int) -> _Bytes:
    """A view ``[pages, page bytes]`` of a contiguous ``[rows, ...]`` buffer, without rows after the last whole page."""
    pages = len(buffer) // page_size
    if pages == 0:
        return np.empty((0, 0), dtype=np.uint8)
    view: _Bytes = buffer[: pages * page_size].view(torch.uint8).view(pages, -1).numpy()
    return view


def _layer_blocks_of(buffer: torch.Tensor) -> _Bytes:
    """A view ``[pages, layers, page bytes]`` of a contiguous ``[pages, layers, page_size, ...]`` buffer."""
    pages, layers = buffer.shape[:2]
    view: _Bytes = buffer.view(torch.uint8).view(pages, layers, -1).numpy()
    return view
