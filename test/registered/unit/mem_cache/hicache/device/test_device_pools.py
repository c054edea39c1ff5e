from __future__ import annotations

import unittest

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MHATokenToKVPool, MLATokenToKVPool
from sglang.test.ci.ci_register import register_cpu_ci

from sglang.srt.mem_cache.hicache.device.kinds import pool_kind
from sglang.srt.mem_cache.hicache.device.pools import (
    DsaGeometry,
    MhaGeometry,
    MlaGeometry,
    build_device_pool,
    bytes_of,
    index_buffers,
    kv_buffers,
)
from sglang.srt.mem_cache.layouts import LayoutConfigError, PoolKind
from support.caches import CacheTestCase

register_cpu_ci(est_time=20, suite="base-a-test-cpu")


class TestDevicePools(CacheTestCase):
    def test_each_kind_is_sglangs_plain_class_of_that_kind(self) -> None:
        expected = {PoolKind.MHA: MHATokenToKVPool, PoolKind.MLA: MLATokenToKVPool, PoolKind.DSA: DSATokenToKVPool}
        for kind, pool_class in expected.items():
            pool = build_device_pool(kind, tokens=128, page_size=64, layers=2)
            assert type(pool) is pool_class
            assert pool_kind(pool) is kind
            assert (pool.size, pool.page_size, pool.layer_num) == (128, 64, 2)

    def test_bytes_are_those_of_all_layers_and_the_padding_page(self) -> None:
        mha = MhaGeometry(heads=2, head_dim=8, dtype=torch.float32)
        mla = MlaGeometry(kv_lora_rank=32, qk_rope_head_dim=8, dtype=torch.bfloat16)
        assert bytes_of(build_device_pool(mha.kind, tokens=32, page_size=16, layers=3, geometry=mha)) == 18_432
        assert bytes_of(build_device_pool(mla.kind, tokens=32, page_size=16, layers=3, geometry=mla)) == 11_520
        # 192 rows of 2 layers: bf16 rows take 1152 bytes, packed float8 rows 656, index keys 132.
        for dtype, row_bytes in ((torch.bfloat16, 1152), (torch.float8_e4m3fn, 656)):
            pool = build_device_pool(
                PoolKind.DSA, tokens=128, page_size=64, layers=2, geometry=DsaGeometry(dtype=dtype)
            )
            assert bytes_of(pool) == 192 * 2 * (row_bytes + 132)

    def test_buffers_are_listed_layer_by_layer(self) -> None:
        mha = build_device_pool(PoolKind.MHA, tokens=32, page_size=16, layers=3, geometry=MhaGeometry(heads=1))
        dsa = build_device_pool(PoolKind.DSA, tokens=64, page_size=64, layers=3)
        assert [len(buffer) for buffer in kv_buffers(mha)] == [48] * 6
        assert index_buffers(mha) == []
        assert [len(buffer) for buffer in kv_buffers(dsa)] == [128] * 3
        assert [len(buffer) for buffer in index_buffers(dsa)] == [2] * 3

    def test_impossible_pools_are_refused_with_the_value_seen(self) -> None:
        for message, kind, tokens, page_size, layers in (
            ("tokens must be a positive multiple of page_size 16, got 40", PoolKind.MLA, 40, 16, 1),
            ("tokens must be a positive multiple of page_size 16, got 0", PoolKind.MLA, 0, 16, 1),
            ("tokens must be a positive multiple of page_size 0, got 16", PoolKind.MLA, 16, 0, 1),
            ("layers must be >= 1, got 0", PoolKind.MLA, 16, 16, 0),
            ("page_size of a DSA pool must be 64, got 16", PoolKind.DSA, 64, 16, 1),
            ("pool must be one of mha, mla, dsa, got hisparse", PoolKind.HISPARSE, 64, 64, 1),
        ):
            with pytest.raises(LayoutConfigError, match=message):
                build_device_pool(kind, tokens=tokens, page_size=page_size, layers=layers)
        with pytest.raises(LayoutConfigError, match="geometry of a mha pool must be of its kind, got mla"):
            build_device_pool(PoolKind.MHA, tokens=64, page_size=64, layers=1, geometry=MlaGeometry())
        with pytest.raises(LayoutConfigError, match="index_head_dim must be 128, got 64"):
            build_device_pool(PoolKind.DSA, tokens=64, page_size=64, layers=1, geometry=DsaGeometry(index_head_dim=64))


if __name__ == "__main__":
    unittest.main()
