"""The GPU's copy engines, called through CUDA's runtime library: many copies in one call.

torch has no such call. The library is the one that torch has loaded. Three forms are known::

    CUDA >= 13      cudaMemcpyBatchAsync(dsts, srcs, sizes, count, attrs, attrsIdxs, numAttrs, stream)
    CUDA 12.8, .9   the same with a `size_t *failIdx` before the stream
    older           cudaMemcpyAsync for each copy

The driver may be older than the library of the same major release, which then refuses the batched call.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .page_maps import AddressArray

_BATCH_SINCE = 12080
_BATCH_WITHOUT_FAIL_INDEX_SINCE = 13000
_SOURCE_ORDER_STREAM = 1
_KIND_DEFAULT = 4
_WORD_BYTES = 8


class _MemLocation(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _CopyAttributes(ctypes.Structure):
    """``struct cudaMemcpyAttributes``."""

    _fields_ = (
        ("src_access_order", ctypes.c_int),
        ("src_loc_hint", _MemLocation),
        ("dst_loc_hint", _MemLocation),
        ("flags", ctypes.c_uint),
    )


class CopyTables:
    """Copies of ``sizes[i]`` bytes from ``sources[i]`` to ``destinations[i]``, in parts that end at `ends`.

    The arrays are int64, contiguous and of one length. Their addresses are looked up once for all parts.
    """

    def __init__(
        self, *, sources: AddressArray, destinations: AddressArray, sizes: AddressArray, ends: Sequence[int]
    ) -> None:
        self.arrays = (destinations, sources, sizes)
        self.addresses = [array.ctypes.data for array in self.arrays]
        self.bounds = [0, *ends]


class CopyEngines:
    """Submits batches of copies between pinned host memory and the device.

    `one_by_one` uses the form of old releases. Raises `OSError` if CUDA's runtime library cannot be loaded.
    """

    def __init__(self, *, one_by_one: bool = False) -> None:
        self._library = _library()
        version, driver_version = ctypes.c_int(), ctypes.c_int()
        self._check(self._library.cudaRuntimeGetVersion(ctypes.byref(version)))
        self._check(self._library.cudaDriverGetVersion(ctypes.byref(driver_version)))
        self.batched = not one_by_one and min(version.value, driver_version.value) >= _BATCH_SINCE
        self._attributes = _CopyAttributes(src_access_order=_SOURCE_ORDER_STREAM)
        self._first_of_attributes = ctypes.c_size_t(0)
        self._failed = ctypes.c_size_t(0)
        last = [ctypes.byref(self._attributes), ctypes.byref(self._first_of_attributes), 1]
        if version.value < _BATCH_WITHOUT_FAIL_INDEX_SINCE:
            last.append(ctypes.byref(self._failed))
        self._last_arguments = last
        if self.batched:
            self._batch = self._library.cudaMemcpyBatchAsync
            pointer, size = ctypes.c_void_p, ctypes.c_size_t
            self._batch.argtypes = [*[pointer] * 3, size, *[pointer] * 2, size, *[pointer] * (len(last) - 2)]

    def submit(self, copies: CopyTables, part: int, *, stream: torch.cuda.Stream) -> None:
        """Submit one part of `copies` on `stream`, in no given order; the arrays are read before the call returns.

        Raises `RuntimeError` if CUDA refuses; some of the copies may have been submitted then.
        """
        first, end = copies.bounds[part], copies.bounds[part + 1]
        if first == end:
            return
        handle = stream.cuda_stream
        if self.batched:
            tables = [address + _WORD_BYTES * first for address in copies.addresses]
            self._check(self._batch(*tables, end - first, *self._last_arguments, handle))
            return
        for destination, source, size in zip(*(array[first:end].tolist() for array in copies.arrays), strict=True):
            self._check(self._library.cudaMemcpyAsync(destination, source, size, _KIND_DEFAULT, handle))

    def _check(self, code: int) -> None:
        if code:
            self._library.cudaGetErrorString.restype = ctypes.c_char_p
            text = self._library.cudaGetErrorString(ctypes.c_int(code)).decode()
            raise RuntimeError(f"a copy could not be submitted: CUDA error {code}, {text}")


@cache
def _library() -> ctypes.CDLL:
    name = f"libcudart.so.{(torch.version.cuda or '').partition('.')[0]}"
    try:
        library = ctypes.CDLL(name)
    except OSError:
        # Not loaded yet and on no search path: NVIDIA's Python packages lie beside torch.
        beside_torch = sorted(Path(torch.__file__).parents[1].glob(f"nvidia/*/lib/{name}"))
        if not beside_torch:
            raise
        library = ctypes.CDLL(str(beside_torch[0]))
    library.cudaMemcpyAsync.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_void_p,
    ]
    return library
