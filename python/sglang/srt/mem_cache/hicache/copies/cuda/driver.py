"""CUDA's driver library, called for what torch has no call for, or a slow one.

Errors are `RuntimeError`, with CUDA's number; nothing has been submitted then.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

_GREATER_OR_EQUAL: Final = 0
Parameter: TypeAlias = ctypes.c_int64 | ctypes.c_int32


def upload(target: int, source: int, size: int, *, stream: torch.cuda.Stream) -> None:
    """Copy `size` bytes from pinned host memory to the device, on `stream`; both are addresses."""
    _check(_library().cuMemcpyHtoDAsync_v2(target, source, size, stream.cuda_stream), "a table cannot be uploaded")


def wait_for_count(counter: int, count: int, *, stream: torch.cuda.Stream) -> None:
    """Make `stream` wait until the uint32 at device address `counter` has come to `count`, modulo 2^32."""
    code = _library().cuStreamWaitValue32_v2(stream.cuda_stream, counter, count, _GREATER_OR_EQUAL)
    _check(code, "a stream cannot wait for a count")


class Launch:
    """Launches of a loaded kernel in one dimension, on the device that is current.

    `function` is its handle. A launch takes the values that `parameters` have then, in the kernel's order.
    """

    def __init__(
        self, function: int, *, blocks: int, threads: int, shared_bytes: int, parameters: Sequence[Parameter]
    ) -> None:
        self._parameters = parameters  # which `values` points to
        values = (ctypes.c_void_p * len(parameters))(*(ctypes.addressof(parameter) for parameter in parameters))
        self._before_stream = (function, blocks, 1, 1, threads, 1, 1, shared_bytes)
        self._values = values

    def __call__(self, stream: torch.cuda.Stream) -> None:
        """Submit one on `stream`."""
        code = _library().cuLaunchKernel(*self._before_stream, stream.cuda_stream, self._values, None)
        _check(code, "a kernel cannot be launched")


def parameter_sizes(function: int) -> list[int]:
    """Bytes of each parameter of a loaded kernel, in order; empty if the driver cannot tell (before CUDA 12.4)."""
    library = _library()
    sizes: list[int] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    while hasattr(library, "cuFuncGetParamInfo") and not library.cuFuncGetParamInfo(
        function, len(sizes), ctypes.byref(offset), ctypes.byref(size)
    ):
        sizes.append(size.value)
    return sizes


def _check(code: int, what: str) -> None:
    if code:
        raise RuntimeError(f"{what}: CUDA driver error {code}")


@cache
def _library() -> ctypes.CDLL:
    """Raises `OSError` if it cannot be loaded."""
    library = ctypes.CDLL("libcuda.so.1")
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint
    library.cuMemcpyHtoDAsync_v2.argtypes = [pointer, pointer, size, pointer]
    library.cuStreamWaitValue32_v2.argtypes = [pointer, pointer, ctypes.c_uint32, number]
    library.cuLaunchKernel.argtypes = [pointer, *[number] * 7, pointer, pointer, pointer]
    if hasattr(library, "cuFuncGetParamInfo"):
        library.cuFuncGetParamInfo.argtypes = [pointer, size, pointer, pointer]
    return library
