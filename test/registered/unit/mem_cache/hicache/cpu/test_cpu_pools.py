"""The CPU platform's pools and its paged allocator do in plain torch what SGLang's do with Triton."""

from __future__ import annotations

import unittest
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MHATokenToKVPool, MLATokenToKVPool
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase
from typing_extensions import override

from sglang.srt.mem_cache.hicache.cpu.platform import HostCpuPlatform
from sglang.srt.mem_cache.hicache.cpu.pools import CpuMLATokenToKVPool, CpuPagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.hicache.cpu.support import install_cpu_support
from sglang.srt.mem_cache.hicache.runtime import standalone_runtime
from sglang.srt.mem_cache.hicache.seam.platforms import pool_class_for
from support.caches import LAYERS

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

SIZE, PAGE = 32, 4


class TestCpuPools(CustomTestCase):
    @classmethod
    @override
    def setUpClass(cls) -> None:
        super().setUpClass()
        install_cpu_support()
        cls.enterClassContext(standalone_runtime(page_size=PAGE))

    def test_the_platform_serves_every_kind_of_pool_with_a_class_of_sglangs_or_one_built_on_it(self) -> None:
        platform = HostCpuPlatform()
        for found, base in (
            (pool_class_for(platform, "mha"), MHATokenToKVPool),
            (pool_class_for(platform, "mla"), MLATokenToKVPool),
            (pool_class_for(platform, "dsa"), DSATokenToKVPool),
            (platform.get_paged_allocator_cls(), PagedTokenToKVPoolAllocator),
        ):
            assert found is not None
            self.assertTrue(issubclass(found, base), found)
        self.assertFalse(platform.is_pin_memory_available())
        self.assertEqual(platform.get_default_attention_backend(), "torch_native")

    def test_latent_and_rotary_parts_come_back_from_the_slots_they_were_written_to(self) -> None:
        pool = _make_mla_pool()
        layer: Any = SimpleNamespace(layer_id=1)
        slots = torch.tensor([9, 4, 30])
        latent, rotary = torch.randn(3, 1, 4).bfloat16(), torch.randn(3, 1, 2).bfloat16()
        pool.set_mla_kv_buffer(layer, slots, latent, rotary)
        found = pool.get_mla_kv_buffer(layer, slots)
        torch.testing.assert_close(found, (latent, rotary), rtol=0, atol=0)
        wide = pool.get_mla_kv_buffer(layer, slots[:1], torch.float32)
        torch.testing.assert_close(wide, (latent[:1].float(), rotary[:1].float()), rtol=0, atol=0)
        self.assertEqual(int(pool.get_key_buffer(0).count_nonzero()), 0, "the other layer is untouched")

    def test_an_mla_pool_refuses_index_keys(self) -> None:
        with self.assertRaisesRegex(ValueError, "index_head_dim must be None, got 128"):
            CpuMLATokenToKVPool(SIZE, PAGE, torch.bfloat16, 4, 2, LAYERS, "cpu", False, index_head_dim=128)

    def test_requests_are_extended_and_go_on_token_by_token_page_after_page(self) -> None:
        allocator = _make_allocator()
        slots = _extend(allocator, before=[0, 0], after=[6, 4], last=[-1, -1])
        assert slots is not None
        self.assertEqual(len(set(slots.tolist())), 10)
        for request in (slots[:6], slots[6:]):
            self.assertTrue(all(slot % PAGE == at % PAGE for at, slot in enumerate(request.tolist())))
        self.assertEqual(allocator.available_size(), SIZE - 3 * PAGE)
        after = torch.tensor([7, 5])
        more = allocator.alloc_decode(after, after, torch.stack([slots[5], slots[9]]))
        assert more is not None
        self.assertEqual(int(more[0]), int(slots[5]) + 1, "there was room in its page")
        self.assertEqual(int(more[1]) % PAGE, 0, "its page was full")
        self.assertNotIn(int(more[1]), slots.tolist())

    def test_too_few_pages_take_nothing_and_freed_ones_serve_again(self) -> None:
        allocator = _make_allocator()
        first = _extend(allocator, before=[0], after=[SIZE - PAGE], last=[-1])
        assert first is not None
        self.assertIsNone(_extend(allocator, before=[0], after=[2 * PAGE], last=[-1]))
        self.assertEqual(allocator.available_size(), PAGE)
        allocator.free(first[:PAGE])
        again = _extend(allocator, before=[0], after=[2 * PAGE], last=[-1])
        assert again is not None
        self.assertEqual(allocator.available_size(), 0)
        self.assertLessEqual(set(first[:PAGE].tolist()), set(again.tolist()))


def _make_mla_pool() -> CpuMLATokenToKVPool:
    return CpuMLATokenToKVPool(SIZE, PAGE, torch.bfloat16, 4, 2, LAYERS, "cpu", False)


def _make_allocator() -> CpuPagedTokenToKVPoolAllocator:
    return CpuPagedTokenToKVPoolAllocator(SIZE, PAGE, torch.bfloat16, "cpu", _make_mla_pool(), True)


def _extend(
    allocator: CpuPagedTokenToKVPoolAllocator, *, before: list[int], after: list[int], last: list[int]
) -> torch.Tensor | None:
    first, end = torch.tensor(before), torch.tensor(after)
    return allocator.alloc_extend(first, first, end, end, torch.tensor(last), sum(after) - sum(before))


if __name__ == "__main__":
    unittest.main()
