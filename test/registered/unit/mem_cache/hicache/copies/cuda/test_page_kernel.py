"""What the page kernel becomes for a GPU, and which shapes it can have."""

from __future__ import annotations

import ctypes
import re
import unittest
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch
import triton  # type: ignore[import-untyped]  # Triton ships no types
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase
from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]  # ditto
from triton.backends.nvidia.compiler import CUDABackend  # type: ignore[import-untyped]  # ditto
from triton.runtime.jit import create_function_from_signature  # type: ignore[import-untyped]  # ditto
from typing_extensions import override

from sglang.srt.mem_cache.hicache.copies.cuda import driver, page_kernel
from sglang.srt.mem_cache.hicache.copies.cuda.kernel_queue import chunk_table
from sglang.srt.mem_cache.hicache.copies.cuda.page_kernel import KernelShape
from sglang.srt.mem_cache.hicache.copies.cuda.page_maps import PageMap
from support.triton_interpreter import interpreted_kernel

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

TARGET = GPUTarget("cuda", 90, 32)
"""An H200."""
WORDS = 70
"""Of a page: several of the smallest chunks, and a rest."""


def assembly(*, to_device: bool) -> list[str]:
    """PTX for an H200, without what is no instruction on global memory and no barrier."""
    source = triton.compiler.ASTSource(
        fn=page_kernel._copy_pages,  # noqa: SLF001  # what `PageKernel` compiles when it is on a device
        signature={
            **dict.fromkeys(("table", "pairs"), "*i64"),
            "counters": "*i32",
            **dict.fromkeys(("pages", "layers", "chunks"), "i32"),
            **dict.fromkeys(("TO_DEVICE", "CHUNK_WORDS"), "constexpr"),
        },
        constexprs={(6,): to_device, (7,): KernelShape().chunk_bytes // 8},
        attrs={(argument,): [["tt.divisibility", 16]] for argument in range(3)},
    )
    compiled = triton.compile(source, target=TARGET, options={"num_warps": KernelShape().warps})
    return re.findall(r"(?:ld|st|atom|red)\.global\S+|bar\.sync", compiled.asm["ptx"])


FUNCTION = 0xF00D
STREAM: Any = SimpleNamespace(cuda_stream=0x5EED)
NO_SCRATCH = {"global_scratch_size": 0, "profile_scratch_size": 0}


def compiled(**metadata: int) -> Any:  # noqa: ANN401  # Triton ships no types
    """What Triton makes of a kernel, as far as it is looked at."""
    return SimpleNamespace(
        function=FUNCTION, metadata=SimpleNamespace(**{"shared": 48, "num_warps": 2, **NO_SCRATCH, **metadata})
    )


class HostDriver:
    """C functions with the signatures of CUDA's header, for a kernel whose parameters have these sizes."""

    def __init__(self, sizes: list[int], *, code: int = 0) -> None:
        self.launches: list[tuple[tuple[int, ...], list[int]]] = []
        self.uploads: list[tuple[int, ...]] = []
        self.waits: list[tuple[int, ...]] = []
        self._sizes = sizes
        self._code = code
        pointer, number = ctypes.c_void_p, ctypes.c_uint
        launch = ctypes.CFUNCTYPE(ctypes.c_int, pointer, *[number] * 7, pointer, pointer, pointer)
        self.cuLaunchKernel = launch(self._launch)
        upload = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, pointer, ctypes.c_size_t, pointer)
        self.cuMemcpyHtoDAsync_v2 = upload(lambda *arguments: self._note(self.uploads, arguments))
        wait = ctypes.CFUNCTYPE(ctypes.c_int, pointer, ctypes.c_uint64, ctypes.c_uint32, number)
        self.cuStreamWaitValue32_v2 = wait(lambda *arguments: self._note(self.waits, arguments))
        if sizes:
            info = ctypes.CFUNCTYPE(ctypes.c_int, pointer, ctypes.c_size_t, pointer, pointer)
            self.cuFuncGetParamInfo = info(self._info)

    def _note(self, calls: list[tuple[int, ...]], arguments: tuple[int, ...]) -> int:
        calls.append(arguments)
        return self._code

    def _info(self, function: int, index: int, offset: int, size: int) -> int:
        assert function == FUNCTION
        if index >= len(self._sizes):
            return 1
        ctypes.c_size_t.from_address(size).value = self._sizes[index]
        return 0

    def _launch(self, *arguments: Any) -> int:  # noqa: ANN401  # null is None, others are int
        *how, values, extra = arguments
        assert extra is None
        addresses = (ctypes.c_void_p * len(self._sizes)).from_address(values)
        found = [
            int.from_bytes(ctypes.string_at(address, size), "little")
            for address, size in zip(addresses, self._sizes, strict=True)
        ]
        self.launches.append((tuple(how), found))
        return self._code


class TestPageKernel(CustomTestCase):
    @override
    def setUp(self) -> None:
        self.table, self.pairs = torch.zeros((3, 6, 5), dtype=torch.int64), torch.zeros(20, dtype=torch.int64)
        self.counters = torch.zeros(3, dtype=torch.int32)
        shape = KernelShape(programs=3, warps=2, chunk_bytes=256)
        self.kernel = page_kernel.PageKernel(self.table, self.counters, to_device=True, shape=shape)

    def test_a_layer_is_counted_for_all_to_see_after_every_thread_has_stored_16_bytes_at_a_time(self) -> None:
        for to_device in (True, False):
            with self.subTest(to_device=to_device):
                found = assembly(to_device=to_device)
                # A barrier is the last that happens before the count; the text has the blocks of loops in any order.
                self.assertIn(("bar.sync", "atom.global.sys.release.add.u32"), list(pairwise(found)))
                self.assertEqual([line for line in found if line.startswith("st.")], ["st.global.v2.b64"] * 4)
                self.assertEqual([line for line in found if ".cg" in line], ["ld.global.cg.v2.b64"] * 4)

    def test_one_compiled_kernel_is_right_for_any_number_of_pages(self) -> None:
        kernel = page_kernel._copy_pages  # noqa: SLF001  # as above
        backend = CUDABackend(TARGET)
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        tensors = (
            torch.zeros(2, dtype=torch.int64),
            torch.zeros(2, dtype=torch.int64),
            torch.zeros(1, dtype=torch.int32),
        )
        compiled_for = {
            str(bind(*tensors, pages, 1, 1, TO_DEVICE=True, CHUNK_WORDS=16)[1]) for pages in (0, 1, 2, 16, 1000)
        }
        self.assertEqual(len(compiled_for), 1)

    def test_a_compiled_kernel_gets_its_arguments_by_their_places(self) -> None:
        kernel, names = self.kernel, page_kernel._copy_pages.arg_names  # noqa: SLF001  # as above
        for scratch in (0, 1, 2):
            library = HostDriver([8, 8, 8, 4, 4, 4] + [8] * scratch)
            with self.subTest(scratch=scratch), patch.object(driver, "_library", lambda library=library: library):
                direct = kernel._direct_launch(compiled())  # noqa: SLF001  # as `launch` does when Triton has compiled
                assert direct is not None
                with patch.object(kernel, "_direct", direct):
                    for pages in (7, 70_000):
                        kernel.launch(self.pairs, pages=pages, stream=STREAM)
                        how, values = library.launches.pop()
                        self.assertEqual(how, (FUNCTION, 3, 1, 1, 64, 1, 1, 48, STREAM.cuda_stream))
                        self.assertEqual(values[6:], [0] * scratch)
                        self.assertEqual(
                            dict(zip(names, values[:6], strict=False)),
                            {
                                "table": self.table.data_ptr(),
                                "pairs": self.pairs.data_ptr(),
                                "counters": self.counters.data_ptr(),
                                "pages": pages,
                                "layers": 3,
                                "chunks": 6,
                            },
                        )

    def test_a_kernel_with_other_parameters_is_launched_by_triton(self) -> None:
        for sizes, metadata in (
            ([8, 8, 8, 4, 4], {}),  # one was made a constant
            ([8, 8, 8, 8, 4, 4], {}),
            ([8, 8, 8, 4, 4, 4, 4], {}),  # no pointer
            ([8, 8, 8, 4, 4, 4, 8], {"global_scratch_size": 128}),
            ([8, 8, 8, 4, 4, 4, 8, 8], {"profile_scratch_size": 128}),
            ([8, 8, 8, 4, 4, 4, 8, 8, 8], {}),  # a third pointer, of which nothing is known
            ([], {}),  # an old driver
        ):
            library = HostDriver(sizes)
            with self.subTest(sizes=sizes, metadata=metadata), patch.object(driver, "_library", lambda it=library: it):
                self.assertIsNone(self.kernel._direct_launch(compiled(**metadata)))  # noqa: SLF001  # as above

    def test_the_first_launch_compiles_and_the_next_ones_do_without_triton(self) -> None:
        for sizes, by_triton in (([8, 8, 8, 4, 4, 4], 1), ([8, 8, 8, 4, 4], 3)):
            library, kernel = HostDriver(sizes), MagicMock()
            kernel[3,].return_value = compiled()
            fresh = page_kernel.PageKernel(
                self.table, self.counters, to_device=True, shape=KernelShape(programs=3, warps=2, chunk_bytes=256)
            )
            with (
                self.subTest(sizes=sizes),
                patch.object(driver, "_library", lambda library=library: library),
                patch.object(page_kernel, "_copy_pages", kernel),
            ):
                for pages in (0, 5, 6):
                    fresh.launch(self.pairs, pages=pages, stream=STREAM)
            calls = kernel[3,].call_args_list
            self.assertEqual([call.args[3] for call in calls], [0, 5, 6][:by_triton])
            self.assertEqual([values[3] for _, values in library.launches], [0, 5, 6][by_triton:])
            tensors = (self.table, self.pairs, self.counters)
            self.assertTrue(all(given is own for given, own in zip(calls[0].args, tensors, strict=False)))
            self.assertEqual(calls[0].args[3:], (0, 3, 6))
            self.assertEqual(calls[0].kwargs, {"TO_DEVICE": True, "CHUNK_WORDS": 32, "num_warps": 2})

    def test_the_drivers_calls_have_the_arguments_of_its_header(self) -> None:
        library = HostDriver([8])
        with patch.object(ctypes, "CDLL", return_value=library):
            found = driver._library.__wrapped__()  # noqa: SLF001  # not the one that is kept
        with patch.object(driver, "_library", lambda: found):
            driver.upload(1 << 40, 1 << 41, 1 << 33, stream=STREAM)
            driver.wait_for_count(1 << 42, (1 << 32) - 1, stream=STREAM)
            self.assertEqual(driver.parameter_sizes(FUNCTION), [8])
        self.assertEqual(library.uploads, [(1 << 40, 1 << 41, 1 << 33, STREAM.cuda_stream)])
        self.assertEqual(library.waits, [(STREAM.cuda_stream, 1 << 42, (1 << 32) - 1, 0)])

    def test_a_launch_that_cuda_refuses_is_an_error(self) -> None:
        library = HostDriver([8, 8, 8, 4, 4, 4], code=719)
        with patch.object(driver, "_library", lambda: library):
            direct = self.kernel._direct_launch(compiled())  # noqa: SLF001  # as above
            with (
                patch.object(self.kernel, "_direct", direct),
                self.assertRaisesRegex(RuntimeError, "a kernel cannot be launched: CUDA driver error 719"),
            ):
                self.kernel.launch(self.pairs, pages=1, stream=STREAM)

    def test_chunks_of_128_bytes_and_more_leave_no_byte_out_and_others_are_refused(self) -> None:
        with interpreted_kernel() as kernel:
            for chunk_bytes in (128, 256, 1024):
                with self.subTest(chunk_bytes=chunk_bytes):
                    source, target = torch.arange(1, WORDS + 1), torch.zeros(WORDS, dtype=torch.int64)
                    whole = PageMap.of_views([source[None]], [target[None]])
                    assert whole is not None
                    table = torch.from_numpy(chunk_table([whole], chunk_bytes))
                    self.assertEqual(table.shape[1], -(-8 * WORDS // chunk_bytes))
                    shape = kernel.KernelShape(programs=2, warps=1, chunk_bytes=chunk_bytes)
                    copier = kernel.PageKernel(table, torch.zeros(1, dtype=torch.int32), to_device=True, shape=shape)
                    copier.launch(torch.tensor([0, 0]), pages=1)
                    self.assertEqual(target.tolist(), source.tolist())
        for chunk_bytes in (64, 192, 0):
            with self.assertRaisesRegex(ValueError, f"a power of two from 128 on, got {chunk_bytes}"):
                KernelShape(chunk_bytes=chunk_bytes)


if __name__ == "__main__":
    unittest.main()
