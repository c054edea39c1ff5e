"""SGLang's layer-split DSA pool: every rank keeps all pages, and some layers of each."""

from __future__ import annotations

import itertools
import unittest
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import torch
from sglang.srt.mem_cache.dsa_cache_layer_split import LayerSplitDSATokenToKVPool
from sglang.srt.mem_cache.pool_host import HostPoolGroup
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.runtime_context import get_parallel
from sglang.test.ci.ci_register import register_cpu_ci

from sglang.srt.mem_cache.hicache.copies.cuda.page_maps import page_maps
from sglang.srt.mem_cache.hicache.host.pools import build_host_pool
from sglang.srt.mem_cache.layouts import LayoutConfigError, PoolKind
from support.caches import CacheSpec, CacheTestCase, chain
from support.groups import Group

if TYPE_CHECKING:
    from sglang.srt.mem_cache.memory_pool import KVCache

register_cpu_ci(est_time=20, suite="base-a-test-cpu")


class TestLayerSplit(CacheTestCase):
    def test_every_rank_gets_its_layers_back(self) -> None:
        """Also where a rank has fewer layers than its host pool."""
        for ranks, layers in ((2, 4), (2, 3), (3, 4)):
            with self.subTest(ranks=ranks, layers=layers):
                group = _group(ranks, layers)
                chains = [chain(group.spec, *pages) for pages in ((1, 2, 3), (1, 2, 4, 5), (6, 7, 8))]
                for tokens in chains:
                    group.serve(tokens)
                group.settle()
                group.evict_all()
                group.each(lambda rank: rank.scribble())
                loads = [group.serve(tokens) for tokens in chains]  # compares the bytes of each rank
                group.settle()
                self.assertEqual([load.host_pages for load in loads], [3, 2, 3])
                group.check()

    def test_the_page_copier_has_an_address_for_the_layers_of_this_rank_alone(self) -> None:
        for mem_layout, rank in itertools.product(("layer_first", "page_first_direct"), (0, 1)):
            with self.subTest(mem_layout=mem_layout, rank=rank):
                host = build_host_pool(_pool(_spec(2), rank, 3), page_size=64, mem_layout=mem_layout)
                assert isinstance(host, HostPoolGroup)
                maps = page_maps(host.entries, page_size=64)
                assert maps is not None
                owned = np.array([[True, True, False], [False, False, True]][rank])
                for page_map, buffer in zip(maps, _host_buffers(host), strict=True):
                    self.assertEqual((page_map.device_bases != 0).tolist(), owned.tolist())
                    layers = buffer if mem_layout == "layer_first" else buffer.transpose(0, 1)
                    expected = [layers[place].data_ptr() for place in range(owned.sum())]
                    self.assertEqual(page_map.host_bases[owned].tolist(), expected)
                    self.assertFalse(page_map.host_bases[~owned].any())

    def test_a_host_layout_that_sglangs_copies_cannot_address_is_refused(self) -> None:
        with self.assertRaisesRegex(LayoutConfigError, "^--hicache-mem-layout page_first_direct .* layer_first$"):
            _group(2, 3, mem_layout="page_first_direct")

    def test_a_strategy_that_needs_equal_pools_refuses_it(self) -> None:
        for layout in ("cp_shared", "host_shared"):
            refused = f"^--kv-layout-strategy {layout} does not support --enable-dsa"
            with self.subTest(layout=layout), self.assertRaisesRegex(LayoutConfigError, refused):
                _group(2, 3, layout=layout)


def _spec(ranks: int, layout: str = "identity", mem_layout: str = "layer_first") -> CacheSpec:
    return CacheSpec(layout=layout, ranks=ranks, pool=PoolKind.DSA, mem_layout=mem_layout)


def _group(ranks: int, layers: int, **spec: str) -> Group:
    settings = _spec(ranks, **spec)
    return Group(settings, device_pools=[_pool(settings, rank, layers) for rank in range(ranks)])


def _pool(spec: CacheSpec, rank: int, layers: int) -> KVCache:
    alone = SimpleNamespace(world_size=1, pynccl_comm=None)  # reads through the group are not what is tested here
    with get_parallel().override(attn_cp_group=alone):
        pool = LayerSplitDSATokenToKVPool(
            size=spec.device_pages * spec.page_size,
            page_size=spec.page_size,
            dtype=torch.bfloat16,
            kv_lora_rank=4,
            qk_rope_head_dim=2,
            index_head_dim=128,
            kv_cache_dim=6,
            layer_num=layers,
            device="cpu",
            enable_memory_saver=False,
            layer_shard_rank=rank,
            layer_shard_size=spec.ranks,
        )
    return pool


def _host_buffers(host: HostPoolGroup) -> list[torch.Tensor]:
    kv, index = (entry.host_pool for entry in host.entries)
    assert isinstance(kv, MLATokenToKVPoolHost)
    assert isinstance(index, DSAIndexerPoolHost)
    assert isinstance(kv.kv_buffer, torch.Tensor)
    return [kv.kv_buffer, index.index_k_with_scale_buffer]


if __name__ == "__main__":
    unittest.main()
