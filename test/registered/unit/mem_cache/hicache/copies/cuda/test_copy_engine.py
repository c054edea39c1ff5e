from __future__ import annotations

import ctypes
import unittest
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

from sglang.srt.mem_cache.hicache.copies.cuda import copy_engine
from sglang.srt.mem_cache.hicache.copies.cuda.copy_engine import CopyEngines, CopyTables

if TYPE_CHECKING:
    from collections.abc import Callable

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

POINTER, SIZE = ctypes.c_void_p, ctypes.c_size_t
STREAM: Any = SimpleNamespace(cuda_stream=0x5EED)


class HostRuntime:
    """C functions with the signatures of CUDA's header that copy in host memory and note how they were called."""

    def __init__(self, version: int, *, driver_version: int | None = None, code: int = 0) -> None:
        self.calls: list[str] = []
        self._code = code
        # cudaMemcpyBatchAsync(dsts, srcs, sizes, count, attrs, attrsIdxs, numAttrs, [failIdx,] stream)
        batch = [POINTER, POINTER, POINTER, SIZE, POINTER, POINTER, SIZE, POINTER]
        if version < 13000:
            batch.insert(7, POINTER)
        self.cudaMemcpyBatchAsync = ctypes.CFUNCTYPE(ctypes.c_int, *batch)(self._batch)
        one = [POINTER, POINTER, SIZE, ctypes.c_int, POINTER]
        self.cudaMemcpyAsync = ctypes.CFUNCTYPE(ctypes.c_int, *one)(self._one)
        self.cudaRuntimeGetVersion = self._version(version)
        self.cudaDriverGetVersion = self._version(version if driver_version is None else driver_version)
        self.cudaGetErrorString = lambda code: f"error {code.value}".encode()

    def _version(self, version: int) -> Callable[..., int]:
        def write(target: int) -> int:
            ctypes.c_int.from_address(target).value = version
            return 0

        return ctypes.CFUNCTYPE(ctypes.c_int, POINTER)(write)

    def _batch(self, *arguments: int) -> int:
        destinations, sources, sizes, count, attributes, firsts, kinds = arguments[:7]
        assert arguments[-1] == STREAM.cuda_stream
        words = ctypes.string_at(attributes, 24)
        assert np.frombuffer(words, dtype=np.int32).tolist() == [1, 0, 0, 0, 0, 0]
        assert (SIZE.from_address(firsts).value, kinds) == (0, 1)
        self.calls.append("batch")
        tables = [(SIZE * count).from_address(table) for table in (destinations, sources, sizes)]
        for destination, source, size in zip(*tables, strict=True):
            ctypes.memmove(destination, source, size)
        return self._code

    def _one(self, destination: int, source: int, size: int, kind: int, stream: int) -> int:
        assert (kind, stream) == (4, STREAM.cuda_stream)
        self.calls.append("one")
        ctypes.memmove(destination, source, size)
        return self._code


class TestCopyEngines(CustomTestCase):
    def copy(self, runtime: HostRuntime, **settings: bool) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Three pieces of a buffer, copied elsewhere in parts of 2, 0 and 1: what came out, and what should have."""
        source = np.random.default_rng(1).integers(1, 255, size=96, dtype=np.uint8)
        target, wanted = np.zeros(96, dtype=np.uint8), np.zeros(96, dtype=np.uint8)
        pieces = [(0, 64, 16), (48, 0, 32), (90, 40, 6)]
        for at, to, size in pieces:
            wanted[to : to + size] = source[at : at + size]
        starts, ends, sizes = np.array(pieces, dtype=np.int64).T.copy()
        with patch.object(copy_engine, "_library", lambda: runtime):
            engines = CopyEngines(**settings)
        tables = CopyTables(
            sources=starts + source.ctypes.data, destinations=ends + target.ctypes.data, sizes=sizes, ends=[2, 2, 3]
        )
        for part in range(3):
            engines.submit(tables, part, stream=STREAM)
        return target, wanted

    def test_cuda_13_takes_the_copies_of_a_part_in_one_call(self) -> None:
        runtime = HostRuntime(13000)
        np.testing.assert_array_equal(*self.copy(runtime))
        self.assertEqual(runtime.calls, ["batch"] * 2)

    def test_cuda_12_8_is_given_a_place_for_the_index_that_failed(self) -> None:
        runtime = HostRuntime(12080)
        np.testing.assert_array_equal(*self.copy(runtime))
        self.assertEqual(runtime.calls, ["batch"] * 2)

    def test_older_releases_and_drivers_copy_one_by_one(self) -> None:
        for runtime, settings in (
            (HostRuntime(12040), {}),
            (HostRuntime(12090, driver_version=12040), {}),
            (HostRuntime(13000), {"one_by_one": True}),
        ):
            np.testing.assert_array_equal(*self.copy(runtime, **settings))
            self.assertEqual(runtime.calls, ["one"] * 3)

    def test_a_refusal_of_cuda_is_raised_with_its_text(self) -> None:
        with self.assertRaisesRegex(RuntimeError, "CUDA error 1, error 1"):
            self.copy(HostRuntime(13000, code=1))


if __name__ == "__main__":
    unittest.main()
