"""Where the pages of each buffer lie, on the host and on the device.

A *kind* is a buffer that every layer has: the KV rows of MLA, keys and values of MHA, the index keys of DSA. Kinds
differ in bytes a page; the layers of one kind differ only in their base addresses::

    address of page p = base(layer) + p * stride            page_bytes of it are contiguous

    host layout          host stride of a page
    layer_first          page_bytes             neighbouring pages are one stretch of memory
    page_first_direct    layers * page_bytes    all layers of a page lie together

Any pool whose pages are contiguous a layer is described so, whatever its rows mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost

from sglang.srt.mem_cache.hicache.device.pools import index_buffers
from sglang.srt.mem_cache.hicache.seam.sglang import host_layers

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    import torch
    from sglang.srt.mem_cache.pool_host import PoolEntry

AddressArray: TypeAlias = "npt.NDArray[np.int64]"
"""Addresses or byte counts, int64: user space ends far below 2^63."""

_VECTOR_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PageMap:
    """One kind of buffer. `host_bases` and `device_bases` are addresses of page 0, shape ``[layers]``.

    A layer without this buffer has base 0 on both sides.
    """

    page_bytes: int
    host_stride: int
    device_stride: int
    host_bases: AddressArray
    device_bases: AddressArray

    @property
    def merges(self) -> bool:
        """Whether pages that are neighbours on both sides are one stretch of memory on both."""
        return self.host_stride == self.page_bytes == self.device_stride

    @classmethod
    def of_views(cls, host: Sequence[torch.Tensor | None], device: Sequence[torch.Tensor | None]) -> PageMap | None:
        """The map of views ``[pages, ...]``, one a layer on each side; None if it cannot be one.

        It cannot if a page is not contiguous, if layers differ in more than their address, if both sides differ in
        the bytes of a page, or if anything is not aligned to 16 bytes.
        """
        shapes = {
            (_page_bytes(h), _page_bytes(d), h.stride(0) * h.element_size(), d.stride(0) * d.element_size())
            for h, d in zip(host, device, strict=True)
            if h is not None and d is not None
        }
        if len(shapes) != 1:
            return None
        host_bytes, device_bytes, host_stride, device_stride = shapes.pop()
        bases = [_addresses(host), _addresses(device)]
        aligned = all(not (base % _VECTOR_BYTES).any() for base in bases)
        strides_fit = not (host_stride % _VECTOR_BYTES or device_stride % _VECTOR_BYTES)
        if host_bytes is None or host_bytes != device_bytes or host_bytes % _VECTOR_BYTES:
            return None
        if not (aligned and strides_fit):
            return None
        return cls(
            page_bytes=host_bytes,
            host_stride=host_stride,
            device_stride=device_stride,
            host_bases=bases[0],
            device_bases=bases[1],
        )


def page_maps(entries: Sequence[PoolEntry], *, page_size: int) -> list[PageMap] | None:
    """The kinds of all pools of a transfer; None if a pool does not keep pages together in each layer."""
    maps: list[PageMap] = []
    for entry in entries:
        pairs = _views(entry, page_size)
        if pairs is None:
            return None
        for host, device in pairs:
            page_map = PageMap.of_views(host, device)
            if page_map is None:
                return None
            maps.append(page_map)
    return maps


_Views: TypeAlias = "list[torch.Tensor | None]"


def _views(entry: PoolEntry, page_size: int) -> list[tuple[_Views, _Views]] | None:
    """Host and device views ``[pages, ...]`` of each kind of the pool, a layer each."""
    host_pool, device_pool = entry.host_pool, entry.device_pool
    layers = device_pool.layer_num
    if host_pool.layout not in ("layer_first", "page_first_direct"):
        return None
    places = host_layers(host_pool, device_pool)
    if isinstance(host_pool, DSAIndexerPoolHost):
        host = _host_layers(host_pool.index_k_with_scale_buffer, places, host_pool.layout, 1)
        device = [buffer if buffer.numel() else None for buffer in index_buffers(device_pool)]
        if len(device) != layers:
            return None
        return [([h if d is not None else None for h, d in zip(host, device, strict=True)], [*device])]
    buffers = host_pool.kv_buffer
    if isinstance(device_pool, MHATokenToKVPool):
        sides = [(buffers[0], device_pool.k_buffer), (buffers[1], device_pool.v_buffer)]
    elif isinstance(device_pool, MLATokenToKVPool) and not isinstance(buffers, tuple):
        sides = [(buffers, device_pool.kv_buffer)]
    else:
        return None
    return [
        (
            _host_layers(buffer, places, host_pool.layout, page_size),
            [None if place is None else _by_page(layer, page_size) for layer, place in zip(rows, places, strict=True)],
        )
        for buffer, rows in sides
    ]


def _host_layers(buffer: torch.Tensor, places: Sequence[int | None], layout: str, page_size: int) -> _Views:
    """The pages of each layer: a buffer ``[layers, rows, ...]`` or ``[pages, layers, ...]`` has them at `places`."""
    if layout == "layer_first":
        return [None if place is None else _by_page(buffer[place], page_size) for place in places]
    return [None if place is None else buffer[:, place] for place in places]


def _by_page(rows: torch.Tensor, page_size: int) -> torch.Tensor:
    pages = rows.shape[0] // page_size
    return rows[: pages * page_size].view(pages, page_size, *rows.shape[1:])


def _page_bytes(view: torch.Tensor) -> int | None:
    page = view[0]
    return page.numel() * page.element_size() if page.is_contiguous() else None


def _addresses(views: Sequence[torch.Tensor | None]) -> AddressArray:
    return np.array([0 if view is None else view.data_ptr() for view in views], dtype=np.int64)
