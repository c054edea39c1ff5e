"""CUDA's driver library, called for what torch has no call for, or a slow one.

Errors are `RuntimeError`, with CUDA's number; nothing has been submitted then.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

_GREATER_OR_EQUAL: Final = 0


def upload(target: int, source: int, size: int, *, stream: torch.cuda.Stream) -> None:
    """Copy `size` bytes from pinned host memory to the device, on `stream`; both are addresses."""
    _check(_library().cuMemcpyHtoDAsync_v2(target, source, size, stream.cuda_stream), "a table cannot be uploaded")


def wait_for_count(counter: int, count: int, *, stream: torch.cuda.Stream) -> None:
    """Make `stream` wait until the uint32 at device address `counter` has come to `count`, modulo 2^32."""
    code = _library().cuStreamWaitValue32_v2(stream.cuda_stream, counter, count, _GREATER_OR_EQUAL)
    _check(code, "a stream cannot wait for a count")


def _check(code: int, what: str) -> None:
    if code:
        raise RuntimeError(f"{what}: CUDA driver error {code}")


@cache
def _library() -> ctypes.CDLL:
    """Raises `OSError` if it cannot be loaded."""
    library = ctypes.CDLL("libcuda.so.1")
    address, stream = ctypes.c_uint64, ctypes.c_void_p
    library.cuMemcpyHtoDAsync_v2.argtypes = [address, ctypes.c_void_p, ctypes.c_size_t, stream]
    library.cuStreamWaitValue32_v2.argtypes = [stream, address, ctypes.c_uint32, ctypes.c_uint]
    return library
