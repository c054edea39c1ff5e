"""The design's "Required unit coverage" 5: what does not go together is refused before host memory is taken."""

from __future__ import annotations

import unittest
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.hisparse_memory_pool import HiSparseDSATokenToKVPool
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool
from sglang.srt.mem_cache.pool_host import common
from sglang.test.ci.ci_register import register_cpu_ci
from typing_extensions import override

from sglang.srt.mem_cache.hicache.assemble import assemble_cache
from sglang.srt.mem_cache.hicache.host.pools import build_host_pool
from sglang.srt.mem_cache.hicache.settings import ShardGroup
from sglang.srt.mem_cache.layouts import (
    AnyKVLayoutStrategy,
    CpSharedLayout,
    GroupKind,
    LayoutConfig,
    LayoutConfigError,
    PoolKind,
)
from support.caches import (
    CacheSpec,
    CacheTestCase,
    make_allocator,
    make_device_pool,
    make_group,
    make_layout,
    make_params,
    make_settings,
    pooled_keys_page_size,
)
from support.groups import Lockstep, Seat

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang.srt.mem_cache.memory_pool import KVCache

    from sglang.srt.mem_cache.hicache.radix_cache import HiRadixCache
    from sglang.srt.mem_cache.layouts import LayoutEnvironment
    from sglang.srt.mem_cache.layouts.pages import LaneArray

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

_DSA = CacheSpec(pool=PoolKind.DSA)
_DSA_FIELDS: dict[str, Any] = {
    "size": 8 * 64,
    "page_size": 64,
    "kv_lora_rank": 4,
    "dtype": torch.bfloat16,
    "qk_rope_head_dim": 2,
    "layer_num": 2,
    "device": "cpu",
    "index_head_dim": 128,
    "enable_memory_saver": False,
    "kv_cache_dim": 6,
}


class _RefusesNothing(CpSharedLayout):
    name = "refuses_nothing"

    @override
    def validate(self, environment: LayoutEnvironment) -> None:
        pass


class _NamesPages(_RefusesNothing):
    name = "names_pages"

    def storage_keys(self, page_hashes: Sequence[str], lanes: LaneArray) -> Sequence[str]:
        return [page for page, lane in zip(page_hashes, lanes, strict=True) if lane == self.lane]


class TestRefusedAtConstruction(CacheTestCase):
    @override
    def setUp(self) -> None:
        super().setUp()
        self.host_allocations = 0
        allocate: Callable[..., torch.Tensor] = common.ALLOC_MEMORY_FUNCS["cpu"]

        def counted(*arguments: Any, **named: Any) -> torch.Tensor:  # noqa: ANN401  # passes SGLang's own on
            self.host_allocations += 1
            return allocate(*arguments, **named)

        common.ALLOC_MEMORY_FUNCS["cpu"] = counted
        self.addCleanup(common.ALLOC_MEMORY_FUNCS.__setitem__, "cpu", allocate)

    def _build(
        self,
        spec: CacheSpec,
        *,
        layout: AnyKVLayoutStrategy | None = None,
        pool: KVCache | None = None,
        group: ShardGroup | None = None,
        **settings: Any,  # noqa: ANN401
    ) -> HiRadixCache[Any]:
        layout = make_layout(spec, 0) if layout is None else layout
        allocator = make_allocator(spec, layout, pool if pool is not None else make_device_pool(spec))
        lockstep = Lockstep(1)
        lockstep.gather([[spec.host_pages]])
        return assemble_cache(
            make_params(spec, allocator),
            layout=layout,
            settings=make_settings(spec, **settings),
            group=group if group is not None else make_group(spec, 0),
            agreement=Seat(lockstep=lockstep, rank=0),
        )

    def _refused(self, pattern: str, spec: CacheSpec, **changes: Any) -> None:  # noqa: ANN401  # see _build
        with self.assertRaisesRegex(LayoutConfigError, pattern) as raised:
            self._build(spec, **changes)
        self.assertNotIn("\n", str(raised.exception))
        self.assertEqual(self.host_allocations, 0)

    def test_what_is_accepted_does_take_host_memory(self) -> None:
        self._build(_DSA)
        self.assertGreater(self.host_allocations, 0)

    def test_a_storage_backend_is_refused_with_every_layout_naming_both_flags(self) -> None:
        for layout in ("cp_shared", "identity"):
            for backend in ("file", "mooncake", "nixl"):
                self._refused(
                    f"--kv-layout-strategy {layout} does not support --hicache-storage-backend {backend}",
                    CacheSpec(layout=layout, pool=PoolKind.DSA),
                    storage_backend=backend,
                )

    def test_a_storage_backend_is_refused_also_where_the_strategy_forgets_to(self) -> None:
        for strategy, why in (
            (_RefusesNothing, "it cannot name its pages for a storage tier"),
            (_NamesPages, "it can name its pages, but no storage tier asks it to yet"),
        ):
            layout = strategy.from_config(LayoutConfig(page_size=4, shard_size=3))
            self._refused(
                f"--kv-layout-strategy {layout.name} does not support --hicache-storage-backend file: {why}; drop",
                CacheSpec(),
                layout=layout,
                storage_backend="file",
            )

    def test_a_hisparse_pool_is_refused_naming_both_flags(self) -> None:
        for layout in ("cp_shared", "identity"):
            self._refused(
                rf"--kv-layout-strategy {layout} does not support the KV pool HiSparseDSATokenToKVPool "
                r"\(--enable-hisparse\)",
                CacheSpec(layout=layout, pool=PoolKind.DSA),
                pool=HiSparseDSATokenToKVPool(**_DSA_FIELDS),
            )

    def test_heads_split_over_tensor_parallel_ranks_cannot_be_shared(self) -> None:
        group = ShardGroup(kind=GroupKind.ATTENTION_TP, size=3, rank=0)
        self._refused(
            "cp_shared does not support the KV pool MHATokenToKVPool with --tp-size 3",
            CacheSpec(pool=PoolKind.MHA),
            group=group,
        )
        self._build(CacheSpec(pool=PoolKind.MLA), group=group)

    def test_a_pool_whose_index_is_not_one_row_a_token_is_refused_by_name(self) -> None:
        self._refused(
            "does not support the KV pool DSATokenToKVPool",
            _DSA,
            pool=DSATokenToKVPool(**{**_DSA_FIELDS, "page_size": pooled_keys_page_size(2), "index_kpool": 2}),
        )

    def test_a_group_that_is_not_the_layouts_is_refused_with_both_numbers(self) -> None:
        for size, rank, what in ((2, 0, "shard group size 3, .* is 2"), (3, 1, "shard group rank 0, .* is 1")):
            group = ShardGroup(kind=GroupKind.ATTENTION_CP, size=size, rank=rank)
            self._refused(f"--kv-layout-strategy cp_shared was built for {what}", _DSA, group=group)

    def test_a_strategy_whose_lanes_are_not_one_for_each_rank_is_refused_though_it_validates_nothing(self) -> None:
        class ValidatesNothing(CpSharedLayout):
            @override
            def validate(self, environment: LayoutEnvironment) -> None:
                """Everything fits."""

        spec = CacheSpec()
        for lanes, ranks in ((2, 4), (3, 2)):
            layout = ValidatesNothing(page_size=spec.page_size, shard_size=lanes, shard_rank=1)
            told = f"a rank stores lane 1 of {lanes} in a group of {ranks}; accepted: {ranks} lanes"
            with self.assertRaisesRegex(LayoutConfigError, told):
                assemble_cache(
                    make_params(spec, make_allocator(spec, layout, make_device_pool(spec))),
                    layout=layout,
                    settings=make_settings(spec),
                    group=ShardGroup(kind=GroupKind.ATTENTION_CP, size=ranks, rank=1),
                )
            self.assertEqual(self.host_allocations, 0)

    def test_host_memory_is_given_up_if_the_group_does_not_agree_on_it(self) -> None:
        spec = CacheSpec()
        made: list[Any] = []

        def build(*given: Any, **named: Any) -> Any:  # noqa: ANN401  # as `build_host_pool`
            made.append(build_host_pool(*given, **named))
            return made[-1]

        layout = make_layout(spec, 0)
        agreement = mock.Mock()
        agreement.capacity.side_effect = RuntimeError("a rank is gone")
        with (
            mock.patch("sglang.srt.mem_cache.hicache.assemble.build_host_pool", build),
            self.assertRaisesRegex(RuntimeError, "a rank is gone"),
        ):
            assemble_cache(
                make_params(spec, make_allocator(spec, layout, make_device_pool(spec))),
                layout=layout,
                settings=make_settings(spec),
                group=make_group(spec, 0),
                agreement=agreement,
            )
        self.assertIsNone(made[0].kv_buffer)

    def test_an_allocator_without_the_layouts_lanes_is_refused(self) -> None:
        spec = CacheSpec()
        allocator = PagedTokenToKVPoolAllocator(32, 4, torch.bfloat16, "cpu", make_device_pool(spec), need_sort=False)
        with self.assertRaisesRegex(LayoutConfigError, "built for allocator lanes 3, but here it is 1"):
            assemble_cache(
                make_params(spec, allocator),
                layout=make_layout(spec, 0),
                settings=make_settings(spec),
                group=make_group(spec, 0),
            )
        self.assertEqual(self.host_allocations, 0)

    def test_another_page_size_is_refused(self) -> None:
        spec = CacheSpec()
        layout = make_layout(CacheSpec(pool=PoolKind.DSA), 0)
        allocator = make_allocator(spec, make_layout(spec, 0), make_device_pool(spec))
        with self.assertRaisesRegex(LayoutConfigError, "built for page size 64, but here it is 4"):
            assemble_cache(
                make_params(spec, allocator), layout=layout, settings=make_settings(spec), group=make_group(spec, 0)
            )
        self.assertEqual(self.host_allocations, 0)

    def test_a_storage_backend_cannot_be_attached_later_either(self) -> None:
        cache = self._build(_DSA)
        attached, reason = cache.attach_storage_backend("file", served_model_name="m")
        self.assertFalse(attached)
        self.assertRegex(reason, "--kv-layout-strategy cp_shared does not support --hicache-storage-backend file")
        self.assertFalse(cache.enable_storage)
        self.assertTrue(cache.detach_storage_backend()[0])


if __name__ == "__main__":
    unittest.main()
