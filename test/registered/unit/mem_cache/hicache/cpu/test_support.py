from __future__ import annotations

import unittest
from unittest.mock import patch

import torch
from sglang.srt.mem_cache.pool_host import base, common, dsa, mha, mla
from sglang.srt.platforms import current_platform
from sglang.srt.utils import get_device
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase
from typing_extensions import override

from sglang.srt.mem_cache.hicache.cpu import copy_ops, support
from sglang.srt.mem_cache.hicache.cpu.platform import HostCpuPlatform

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

MODULES = (mha, mla, dsa)
OPERATORS = ("transfer_kv_direct", "transfer_kv_all_layer_direct_lf_pf", "transfer_kv_per_layer_direct_pf_lf")
RESERVE_BYTES_OF_SGLANG = 10 << 30


class TestCpuSupport(CustomTestCase):
    """Each test starts from SGLang as it is imported and leaves it as it was found."""

    @override
    def setUp(self) -> None:
        super().setUp()
        found = _state()
        self.addCleanup(_put_back, found, list(support._changes))  # noqa: SLF001  # the record of this process
        _put_back({"reserve": RESERVE_BYTES_OF_SGLANG}, [])

    def test_installing_fills_the_allocation_table_the_operators_and_lowers_the_reserve(self) -> None:
        assert support.install_cpu_support()
        assert "cpu" in common.ALLOC_MEMORY_FUNCS
        assert base.HICACHE_HOST_MEMORY_RESERVE_BYTES == 1 << 30
        for module in MODULES:
            for name in OPERATORS:
                assert getattr(module, name) is getattr(copy_ops, name), (module, name)

    def test_host_memory_can_be_had_although_pinning_is_asked_for(self) -> None:
        support.install_cpu_support()
        buffer = common.ALLOC_MEMORY_FUNCS["cpu"](
            (3, 5), dtype=torch.uint8, device="cpu", pin_memory=True, allocator=common.HostTensorAllocator()
        )
        assert buffer.shape == (3, 5)
        assert not buffer.is_pinned()

    def test_installing_twice_changes_nothing_more(self) -> None:
        assert support.install_cpu_support()
        first, report = _state(), support.installed_cpu_support()
        assert support.install_cpu_support()
        assert _state() == first
        assert support.installed_cpu_support() == report
        assert len(report) == 1 + len(MODULES) * len(OPERATORS) + 1

    def test_what_is_already_there_is_kept(self) -> None:
        def theirs() -> None: ...

        mha.transfer_kv_direct = theirs  # type: ignore[attr-defined]  # present on CUDA only
        common.ALLOC_MEMORY_FUNCS["cpu"] = kept = common.ALLOC_MEMORY_FUNCS["npu"]
        base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 1 << 20
        assert support.install_cpu_support()
        assert mha.transfer_kv_direct is theirs  # type: ignore[attr-defined]  # as above
        assert common.ALLOC_MEMORY_FUNCS["cpu"] is kept
        assert base.HICACHE_HOST_MEMORY_RESERVE_BYTES == 1 << 20

    def test_a_launch_without_a_device_flag_gets_the_cpu_by_name(self) -> None:
        self.assertIsInstance(current_platform, HostCpuPlatform)
        self.assertEqual(get_device(), "cpu")

    def test_with_any_accelerator_nothing_is_touched(self) -> None:
        before = _state()
        for probe in ("is_cuda", "is_hip", "is_npu", "is_xpu", "is_musa", "is_hpu", "is_mps"):
            with patch.object(support, probe, return_value=True):
                assert not support.install_cpu_support(), probe
            assert _state() == before, probe
        assert support.installed_cpu_support() == ()

    def test_an_accelerator_that_only_torch_knows_counts_too(self) -> None:
        before = _state()
        with patch("torch.accelerator.is_available", return_value=True):
            assert not support.install_cpu_support()
        assert _state() == before


def _state() -> dict[str, object]:
    state: dict[str, object] = {"reserve": base.HICACHE_HOST_MEMORY_RESERVE_BYTES}
    if "cpu" in common.ALLOC_MEMORY_FUNCS:
        state["cpu"] = common.ALLOC_MEMORY_FUNCS["cpu"]
    for module in MODULES:
        state |= {f"{module.__name__}.{name}": getattr(module, name) for name in OPERATORS if hasattr(module, name)}
    return state


def _put_back(state: dict[str, object], changes: list[str]) -> None:
    vars(base)["HICACHE_HOST_MEMORY_RESERVE_BYTES"] = state["reserve"]
    common.ALLOC_MEMORY_FUNCS.pop("cpu", None)
    if "cpu" in state:
        vars(common)["ALLOC_MEMORY_FUNCS"]["cpu"] = state["cpu"]
    for module in MODULES:
        for name in OPERATORS:
            vars(module).pop(name, None)
            if (key := f"{module.__name__}.{name}") in state:
                setattr(module, name, state[key])
    support._changes[:] = changes  # noqa: SLF001  # the record of this process


if __name__ == "__main__":
    unittest.main()
