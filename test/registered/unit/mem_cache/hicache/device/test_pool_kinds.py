from __future__ import annotations

import importlib
import re
import unittest
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from sglang.srt.environ import envs
from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import CPUFP8KVCacheMethod
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, KVCache, MHATokenToKVPool, MLATokenToKVPool
from sglang.test.ci.ci_register import register_cpu_ci

import sglang
from sglang.srt.mem_cache.hicache.cpu.pools import CpuDSATokenToKVPool, CpuMLATokenToKVPool
from sglang.srt.mem_cache.hicache.device.kinds import kind_of_pool_class, pool_kind
from sglang.srt.mem_cache.hicache.device.shared_pools import LayoutMLATokenToKVPool
from sglang.srt.mem_cache.hicache.seam.features import SINCE_0_5_23
from sglang.srt.mem_cache.layouts import PoolKind
from support.caches import CacheTestCase, pooled_keys_page_size

if TYPE_CHECKING:
    from collections.abc import Iterator

register_cpu_ci(est_time=25, suite="base-a-test-cpu")

# Every device pool class of the supported SGLang release, by module below sglang.srt. A class that appears or goes must
# be looked at: does it keep one row a slot in the parent's shape, and nothing beside the rows that a page needs?
DEVICE_POOLS: dict[str, dict[str, PoolKind]] = {
    "mem_cache.memory_pool": {
        "MHATokenToKVPool": PoolKind.MHA,
        "MLATokenToKVPool": PoolKind.MLA,
        "DSATokenToKVPool": PoolKind.DSA,
        "NoOpMHATokenToKVPool": PoolKind.OTHER,  # stores nothing
        "MHATokenToKVPoolFP4": PoolKind.OTHER,  # scales beside the rows
        "MHATokenToKVPoolMXFP8": PoolKind.OTHER,  # scales beside the rows
        "MLATokenToKVPoolFP4": PoolKind.OTHER,  # scales beside the rows
        "PageMajorMHATokenToKVPool": PoolKind.OTHER,  # cannot be constructed
        "HybridLinearKVPool": PoolKind.OTHER,  # recurrent state beside the rows
        "MHATokenToKOnlyPool": PoolKind.OTHER,  # a sidecar
        "MiniMaxSparseKVPool": PoolKind.OTHER,  # index keys in a pool of their own
    },
    "mem_cache.base_swa_memory_pool": {"BaseSWAKVPool": PoolKind.OTHER},
    "mem_cache.swa_memory_pool": {"SWAKVPool": PoolKind.OTHER},  # two pools with different slots
    "mem_cache.hisparse_memory_pool": {"HiSparseDSATokenToKVPool": PoolKind.HISPARSE},
    "mem_cache.dsa_cache_layer_split": {"LayerSplitDSATokenToKVPool": PoolKind.DSA},  # see test_layer_split
    "mem_cache.qsa_kv_pool": {"QSATokenToKVPool": PoolKind.OTHER},
    "mem_cache.unified_memory_pool": {  # rows are views in a kernel-facing order
        "UnifiedMHATokenToKVPool": PoolKind.OTHER,
        "UnifiedMLATokenToKVPool": PoolKind.OTHER,
        "UnifiedHybridLinearKVPool": PoolKind.OTHER,
        "UnifiedSWAKVPool": PoolKind.OTHER,
    },
    "mem_cache.deepseek_v4_memory_pool": {
        "DeepSeekV4SingleKVPool": PoolKind.OTHER,
        "DeepSeekV4UniformFP8KVPool": PoolKind.OTHER,
        "DeepSeekV4IndexerPool": PoolKind.OTHER,
        "DeepSeekV4TokenToKVPool": PoolKind.OTHER,
        "HiSparseC4DevicePool": PoolKind.HISPARSE,
    },
}
# These modules import the hardware's own libraries, so their classes are only listed.
HARDWARE_POOLS: dict[str, set[str]] = {
    "hardware_backend.npu.memory_pool_npu": {
        "NPUMHATokenToKVPool",
        "NPUMHATokenToKOnlyPool",
        "NPUMLATokenToKVPool",
        "NPUMiniMaxSparseKVPool",
    },
    "hardware_backend.npu.dsv4.dsv4_memory_pool": {
        "NPUDeepSeekV4SingleKVPool",
        "NPUDeepSeekV4IndexerPool",
        "DSV4NPUTokenToKVPool",
    },
    "hardware_backend.mlx.model_runner_stub": {"_DummyKVCache"},
}

if SINCE_0_5_23:
    DEVICE_POOLS["mem_cache.hisparse_memory_pool"]["HiSparseMHAMainPool"] = PoolKind.OTHER  # the rest is on the host
    DEVICE_POOLS["mem_cache.minimax_m3_nvfp4_pool"] = {  # scales and index keys beside the rows
        "MiniMaxM3Nvfp4IndexKPool": PoolKind.OTHER,
        "MiniMaxM3Nvfp4KVPool": PoolKind.OTHER,
        "MiniMaxM3Nvfp4MainKVPool": PoolKind.OTHER,
    }
    DEVICE_POOLS["mem_cache.page_interleave_pool"] = {  # pages of one rank, gathered by its reader
        "PageInterleaveDSATokenToKVPool": PoolKind.OTHER,
        "PageInterleaveMHATokenToKVPool": PoolKind.OTHER,
        "PageInterleaveMLATokenToKVPool": PoolKind.OTHER,
    }
    DEVICE_POOLS["mem_cache.unified_draft_pool"] = {  # drafts within another pool's slots
        "UnifiedDraftKVPool": PoolKind.OTHER,
        "UnifiedDraftSWAKVPool": PoolKind.OTHER,
    }

CLASS_STATEMENT = re.compile(r"^[ \t]*class (\w+)\(([^)]*)\):", re.MULTILINE)
OUR_PACKAGES = ("mem_cache.layouts", "mem_cache.hicache")


class TestPoolKinds(CacheTestCase):
    def test_a_pool_class_of_ours_counts_as_the_one_it_extends_in_whatever_room_it_lies(self) -> None:
        self.assertIs(kind_of_pool_class(LayoutMLATokenToKVPool), PoolKind.MLA)
        self.assertIs(kind_of_pool_class(CpuMLATokenToKVPool), PoolKind.MLA)
        self.assertIs(kind_of_pool_class(CpuDSATokenToKVPool), PoolKind.DSA)

    def test_every_device_pool_class_of_the_installed_sglang_has_been_looked_at(self) -> None:
        listed = {(module, name) for module, names in DEVICE_POOLS.items() for name in names}
        listed |= {(module, name) for module, names in HARDWARE_POOLS.items() for name in names}
        assert set(_device_pool_classes()) == listed

    def test_a_class_is_served_only_if_it_is_plain_mha_mla_or_dsa(self) -> None:
        for module, names in DEVICE_POOLS.items():
            for name, expected in names.items():
                pool_class = getattr(importlib.import_module(f"sglang.srt.{module}"), name)
                assert issubclass(pool_class, KVCache)
                assert kind_of_pool_class(pool_class) is expected, name

    def test_an_unknown_subclass_is_not_served_and_ours_counts_as_its_parent(self) -> None:
        for parent, kind in (
            (MHATokenToKVPool, PoolKind.MHA),
            (MLATokenToKVPool, PoolKind.MLA),
            (DSATokenToKVPool, PoolKind.DSA),
        ):
            foreign = type("Pool", (parent,), {"__module__": "sglang.srt.hardware_backend.npu.memory_pool_npu"})
            ours = type("Pool", (parent,), {"__module__": "sglang.srt.mem_cache.hicache.device.pools"})
            assert kind_of_pool_class(foreign) is PoolKind.OTHER
            assert kind_of_pool_class(ours) is kind
            assert kind_of_pool_class(type("Pool", (foreign,), {"__module__": ours.__module__})) is PoolKind.OTHER

    def test_plain_pools_are_of_their_kind(self) -> None:
        assert pool_kind(_make_mha_pool()) is PoolKind.MHA
        assert pool_kind(_make_dsa_pool()) is PoolKind.DSA

    def test_a_dsa_pool_that_pools_index_keys_is_refused(self) -> None:
        assert pool_kind(_make_dsa_pool(index_kpool=4)) is PoolKind.OTHER

    def test_an_mha_pool_with_heads_before_slots_is_refused(self) -> None:
        with envs.SGLANG_USE_HND_KVCACHE.override(True):
            assert pool_kind(_make_mha_pool()) is PoolKind.OTHER

    def test_a_quantised_mha_pool_is_refused(self) -> None:
        assert pool_kind(_make_mha_pool(quant_method=CPUFP8KVCacheMethod())) is PoolKind.OTHER


def _device_pool_classes() -> Iterator[tuple[str, str]]:
    """``(module, class)`` of all that derives from `KVCache` in SGLang's sources, imported or not."""
    root = Path(sglang.__path__[0]) / "srt"
    parents: dict[tuple[str, str], set[str]] = {}
    for path in root.rglob("*.py"):
        module = ".".join(path.relative_to(root).with_suffix("").parts)
        if not module.startswith(OUR_PACKAGES):
            for name, bases in CLASS_STATEMENT.findall(path.read_text()):
                parents[module, name] = {base.strip().rpartition(".")[2] for base in bases.split(",")}
    known = {"KVCache"}
    while found := {name for (_, name), bases in parents.items() if bases & known and name not in known}:
        known |= found
    yield from (key for key, bases in parents.items() if bases & known)


def _make_mha_pool(**settings: object) -> MHATokenToKVPool:
    return MHATokenToKVPool(
        size=64,
        page_size=16,
        dtype=torch.bfloat16,
        head_num=2,
        head_dim=16,
        layer_num=1,
        device="cpu",
        enable_memory_saver=False,
        **settings,  # type: ignore[arg-type]  # settings that only these tests use
    )


def _make_dsa_pool(index_kpool: int = 1) -> DSATokenToKVPool:
    return DSATokenToKVPool(
        size=4 * 64,
        page_size=pooled_keys_page_size(index_kpool),
        dtype=torch.bfloat16,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        index_head_dim=128,
        kv_cache_dim=576,
        layer_num=1,
        device="cpu",
        enable_memory_saver=False,
        index_kpool=index_kpool,
    )


if __name__ == "__main__":
    unittest.main()
