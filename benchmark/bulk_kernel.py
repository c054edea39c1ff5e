"""The trial kernel of `bulk_copy.cu`: compiled with nvcc where it is run, launched through CUDA's driver library."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache.cuda.page_kernel import KernelShape

_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8


@dataclass(slots=True)
class _Arguments:
    values: list[Any]

    def pointers(self) -> Any:  # noqa: ANN401  # a ctypes array type made here
        return (ctypes.c_void_p * len(self.values))(*(ctypes.addressof(value) for value in self.values))


class BulkKernel:
    """Launches with the signature of `page_kernel.launch`; `chunk_bytes` times `stages` must fit shared memory."""

    def __init__(self, *, stages: int, chunk_bytes: int) -> None:
        torch.zeros(1, device="cuda")  # makes a context
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._chunk_bytes = chunk_bytes
        self._shared_bytes = stages * chunk_bytes
        image = _compile(stages)
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        self._check(self._driver.cuModuleLoadData(ctypes.byref(self._module), image))
        self._check(self._driver.cuModuleGetFunction(ctypes.byref(self._function), self._module, b"bulk_copy_pages"))
        self._check(self._driver.cuFuncSetAttribute(self._function, _MAX_DYNAMIC_SHARED_SIZE_BYTES, self._shared_bytes))

    def launch(
        self, maps: torch.Tensor, pairs: torch.Tensor, *, rows: slice, kinds: int, to_device: bool, shape: KernelShape
    ) -> None:
        """See `page_kernel.launch`; of `shape` only `programs` counts."""
        arguments = _Arguments(
            [
                ctypes.c_void_p(maps.data_ptr()),
                ctypes.c_void_p(pairs.data_ptr()),
                *(ctypes.c_int(value) for value in (rows.start, rows.stop, kinds, int(to_device), self._chunk_bytes)),
            ]
        )
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self._check(
            self._driver.cuLaunchKernel(
                self._function, shape.programs, 1, 1, 32, 1, 1, self._shared_bytes, stream, arguments.pointers(), None
            )
        )

    def _check(self, code: int) -> None:
        if code:
            raise RuntimeError(f"the trial kernel failed: CUDA driver error {code}")


@cache
def _compile(stages: int) -> bytes:
    home = os.environ.get("CUDA_HOME", "")
    nvcc = f"{home}/bin/nvcc" if Path(f"{home}/bin/nvcc").exists() else "nvcc"
    source = Path(__file__).with_name("bulk_copy.cu")
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "bulk_copy.cubin"
        flags = ["-O3", "-std=c++17", "-arch=sm_90", f"-DSTAGES={stages}", "-cubin"]
        subprocess.run([nvcc, *flags, str(source), "-o", str(cubin)], check=True)
        return cubin.read_bytes()
