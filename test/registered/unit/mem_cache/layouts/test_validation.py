"""What the strategies refuse to work with. Each refusal is one line that names both settings."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
from sglang.test.ci.ci_register import register_cpu_ci

from sglang.srt.mem_cache.layouts import (
    CpSharedLayout,
    GroupKind,
    HostSharedLayout,
    IdentityLayout,
    LayoutConfigError,
    LayoutEnvironment,
    PoolKind,
)

if TYPE_CHECKING:
    from typing import Any

    from sglang.srt.mem_cache.layouts import AnyKVLayoutStrategy

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

IDENTITY = IdentityLayout(page_size=64)
CP_SHARED = CpSharedLayout(page_size=64, shard_size=4, shard_rank=1)
HOST_SHARED = HostSharedLayout(page_size=64, shard_size=4, shard_rank=1)
EACH = pytest.mark.parametrize("layout", [IDENTITY, CP_SHARED, HOST_SHARED], ids=lambda layout: layout.name)
EACH_SHARED = pytest.mark.parametrize("layout", [CP_SHARED, HOST_SHARED], ids=lambda layout: layout.name)


def _make_environment(layout: AnyKVLayoutStrategy, **changes: Any) -> LayoutEnvironment:  # noqa: ANN401  (fields of a dataclass)
    """What `layout` was built for, but for `changes`."""
    fitting = LayoutEnvironment(
        pool_kind=PoolKind.DSA,
        pool_class="DSATokenToKVPool",
        page_size=64,
        allocator_lanes=layout.lane_count,
        group_kind=GroupKind.ATTENTION_CP,
        shard_size=4,
        shard_rank=1,
    )
    return dataclasses.replace(fitting, **changes)


def _refusal(layout: AnyKVLayoutStrategy, **changes: Any) -> str:  # noqa: ANN401  (fields of a dataclass)
    with pytest.raises(LayoutConfigError) as caught:
        layout.validate(_make_environment(layout, **changes))
    message = str(caught.value)
    assert "\n" not in message
    assert f"--kv-layout-strategy {layout.name}" in message
    return message


@EACH
@pytest.mark.parametrize("kind", [PoolKind.DSA, PoolKind.MLA, PoolKind.MHA])
def test_dsa_mla_and_mha_pools_are_served_under_context_parallelism(
    layout: AnyKVLayoutStrategy, kind: PoolKind
) -> None:
    layout.validate(_make_environment(layout, pool_kind=kind))


@EACH_SHARED
@pytest.mark.parametrize("kind", [PoolKind.DSA, PoolKind.MLA])
def test_pools_of_identical_content_are_shared_over_an_attention_tp_group(
    layout: AnyKVLayoutStrategy, kind: PoolKind
) -> None:
    layout.validate(_make_environment(layout, pool_kind=kind, group_kind=GroupKind.ATTENTION_TP))


@EACH
def test_a_storage_backend_is_refused_naming_both_flags(layout: AnyKVLayoutStrategy) -> None:
    message = _refusal(layout, storage_backend="mooncake")
    assert "--hicache-storage-backend mooncake" in message


@EACH
def test_hisparse_is_refused_naming_pool_and_flag(layout: AnyKVLayoutStrategy) -> None:
    message = _refusal(layout, pool_kind=PoolKind.HISPARSE, pool_class="HiSparseDSATokenToKVPool")
    assert "HiSparseDSATokenToKVPool (--enable-hisparse)" in message
    assert "accepted pools: DSA, MLA, MHA" in message


@EACH
def test_an_unknown_pool_is_refused_naming_its_class_and_the_pools_served(
    layout: AnyKVLayoutStrategy,
) -> None:
    message = _refusal(layout, pool_kind=PoolKind.OTHER, pool_class="SWAKVPool")
    assert "the KV pool SWAKVPool;" in message
    assert "--enable-hisparse" not in message
    assert "accepted pools: DSA, MLA, MHA" in message


@EACH_SHARED
def test_layers_that_differ_between_ranks_are_refused_naming_the_flag(layout: AnyKVLayoutStrategy) -> None:
    assert "--enable-dsa-cache-layer-split: every rank holds other layers" in _refusal(layout, layers_differ=True)
    IDENTITY.validate(_make_environment(IDENTITY, layers_differ=True))


@EACH_SHARED
def test_mha_under_attention_tp_is_refused_because_every_rank_holds_other_heads(layout: AnyKVLayoutStrategy) -> None:
    changes = {"pool_kind": PoolKind.MHA, "pool_class": "MHATokenToKVPool", "group_kind": GroupKind.ATTENTION_TP}
    message = _refusal(layout, **changes)
    assert "MHATokenToKVPool" in message
    assert "--tp-size 4" in message
    assert "--attention-context-parallel-size" in message
    IDENTITY.validate(_make_environment(IDENTITY, **changes))


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        (IDENTITY, {"page_size": 16}, "was built for page size 64, but here it is 16; accepted: 64"),
        (IDENTITY, {"allocator_lanes": 4}, "built for allocator lanes 1, but here it is 4"),
        (CP_SHARED, {"page_size": 16}, "was built for page size 64, but here it is 16; accepted: 64"),
        (CP_SHARED, {"shard_size": 8}, "built for shard group size 4, but here it is 8"),
        (CP_SHARED, {"shard_rank": 2}, "built for shard group rank 1, but here it is 2"),
        (CP_SHARED, {"allocator_lanes": 1}, "built for allocator lanes 4, but here it is 1"),
        (HOST_SHARED, {"page_size": 16}, "was built for page size 64, but here it is 16; accepted: 64"),
        (HOST_SHARED, {"shard_size": 8}, "built for shard group size 4, but here it is 8"),
        (HOST_SHARED, {"shard_rank": 2}, "built for shard group rank 1, but here it is 2"),
        (HOST_SHARED, {"allocator_lanes": 4}, "built for allocator lanes 1, but here it is 4"),
    ],
)
def test_a_size_that_differs_is_refused_with_both_numbers(
    layout: AnyKVLayoutStrategy, changes: dict[str, int], message: str
) -> None:
    assert message in _refusal(layout, **changes)


def test_identity_works_in_a_group_of_any_size() -> None:
    for kind, size in ((GroupKind.SINGLE, 1), (GroupKind.ATTENTION_TP, 8)):
        IDENTITY.validate(_make_environment(IDENTITY, group_kind=kind, shard_size=size, shard_rank=size - 1))
