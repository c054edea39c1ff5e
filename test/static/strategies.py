"""mypy reads this and nobody runs it: what the strategies are, and that metadata keeps its type through them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, assert_type

from typing_extensions import override

from sglang.srt.mem_cache.layouts import (
    AnyKVLayoutStrategy,
    BackupPlan,
    CopyPlan,
    CopyRun,
    CpHiCacheNodeMetadata,
    CpSharedKVLayout,
    CpSharedLayout,
    DcpStripedLayout,
    HostLanesLayout,
    HostSharedLayout,
    IdentityLayout,
    IdentityNodeMetadata,
    KVLayoutStrategy,
    LayoutConfig,
    LoadPlan,
    MetadataT,
    NodeMetadata,
    PageExchange,
    StorageAwareLayout,
    StripedLayout,
    TurnwiseLayout,
    create_layout,
    deals_in_turn,
    has_host_lanes,
    names_pages,
    stripes_pages,
)
from sglang.srt.mem_cache.layouts.testing import LayoutContract

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt
    import torch

# One typed assignment proves that a strategy, and its metadata, conform.

identity: KVLayoutStrategy[IdentityNodeMetadata] = IdentityLayout(page_size=64)
cp_shared: KVLayoutStrategy[CpHiCacheNodeMetadata] = CpSharedLayout(page_size=64, shard_size=4, shard_rank=0)
host_shared: KVLayoutStrategy[CpHiCacheNodeMetadata] = HostSharedLayout(page_size=64, shard_size=4, shard_rank=0)
dcp_striped: KVLayoutStrategy[IdentityNodeMetadata] = DcpStripedLayout(page_size=64, shard_size=4, shard_rank=0)


def metadata_conforms(one: IdentityNodeMetadata, other: CpHiCacheNodeMetadata) -> tuple[NodeMetadata, NodeMetadata]:
    return one, other


# Metadata keeps its type through backup, split and back.


def identity_keeps_its_metadata(plan: BackupPlan, pages: npt.NDArray[np.int64]) -> None:
    node = identity.finish_backup(plan, pages)
    assert_type(node, IdentityNodeMetadata)
    assert_type(node.split(64), tuple[IdentityNodeMetadata, IdentityNodeMetadata])
    assert_type(node.legacy_host_value, "torch.Tensor")


def cp_shared_keeps_its_metadata(plan: BackupPlan, pages: npt.NDArray[np.int64]) -> None:
    node = cp_shared.finish_backup(plan, pages)
    assert_type(node, CpHiCacheNodeMetadata)
    assert_type(node.split(64), tuple[CpHiCacheNodeMetadata, CpHiCacheNodeMetadata])
    assert_type(node.owned_positions, "torch.Tensor")
    assert_type(node.pages_per_lane, tuple[int, ...])


def any_strategy_keeps_its_metadata(
    layout: KVLayoutStrategy[MetadataT], node: MetadataT, pages: npt.NDArray[np.int64]
) -> MetadataT:
    """How tree and controller see a strategy: one type variable, no downcast."""
    first, second = node.split(layout.page_size)
    assert_type(layout.plan_load([first, second], pages), LoadPlan)
    assert_type(layout.load_lanes([first]), "npt.NDArray[np.int16]")
    assert_type(node.split(0), tuple[MetadataT, MetadataT])
    return second


# Plans.


def plans_are_typed(layout: KVLayoutStrategy[MetadataT], pages: npt.NDArray[np.int64], load: LoadPlan) -> None:
    plan = layout.plan_backup(pages)
    assert_type(plan, BackupPlan)
    assert_type(plan.demand_pages, tuple[int, ...])
    assert_type(plan.lanes, "npt.NDArray[np.int16]")
    assert_type(plan.bind(pages), CopyPlan)
    assert_type(load.copies, CopyPlan)
    assert_type([*load.copies.runs()], list[CopyRun])
    assert_type(load.logical_pages, int)
    assert_type(load.exchange, PageExchange)


# The registry erases the type parameter, and only there.

assert_type(create_layout(LayoutConfig()), AnyKVLayoutStrategy)
assert_type(create_layout(LayoutConfig()), KVLayoutStrategy[Any])


# Geometry gives back the kind of array that it was given.


def geometry_keeps_the_kind(geometry: CpSharedKVLayout, tensor: torch.Tensor, array: npt.NDArray[np.int64]) -> None:
    assert_type(geometry.owner(tensor), "torch.Tensor")
    assert_type(geometry.logical_locs_to_physical(tensor), "torch.Tensor")
    array_rows = geometry.physical_to_logical(geometry.logical_locs_to_physical(array), 0)
    rows: npt.NDArray[np.int64] = array_rows
    assert_type(geometry.page_owners(rows), "npt.NDArray[np.int16]")


# A binding of the contract suite names its metadata once.


class IdentityBinding(LayoutContract[IdentityNodeMetadata]):
    @override
    def make_layout(self, *, page_size: int, shard_size: int, shard_rank: int) -> IdentityLayout:
        return IdentityLayout(page_size=page_size)


def a_binding_makes_strategies_of_its_metadata(binding: LayoutContract[IdentityNodeMetadata]) -> None:
    layout = binding.make_layout(page_size=1, shard_size=1, shard_rank=0)
    assert_type(layout, KVLayoutStrategy[IdentityNodeMetadata])


def a_function_for_one_strategy(
    layout: KVLayoutStrategy[IdentityNodeMetadata], parts: Sequence[IdentityNodeMetadata]
) -> IdentityNodeMetadata:
    layout.load_lanes(parts)
    return parts[0]


assert_type(a_function_for_one_strategy(IdentityLayout(page_size=1), []), IdentityNodeMetadata)


# A guard says both what a strategy can do and, where it answers no, that it cannot.


host_lanes: HostLanesLayout = HostSharedLayout(page_size=64, shard_size=4, shard_rank=0)
striped: StripedLayout = DcpStripedLayout(page_size=64, shard_size=4, shard_rank=0)
turnwise: TurnwiseLayout = CpSharedLayout(page_size=64, shard_size=4, shard_rank=0)


def guards_narrow_both_ways(
    layout: IdentityLayout | HostLanesLayout,
    other: IdentityLayout | TurnwiseLayout,
    third: IdentityLayout | StripedLayout,
) -> None:
    if has_host_lanes(layout):
        assert_type(layout.host_lane, int | None)
    else:
        assert_type(layout, IdentityLayout)
    if not stripes_pages(third):
        assert_type(third, IdentityLayout)
    if not deals_in_turn(other):
        assert_type(other, IdentityLayout)


def a_storage_backend_asks_for_keys(layout: AnyKVLayoutStrategy, lanes: npt.NDArray[np.int16]) -> Sequence[str]:
    return layout.storage_keys([], lanes) if names_pages(layout) else []


def keys_of_a_storage_aware_layout(layout: StorageAwareLayout, lanes: npt.NDArray[np.int16]) -> Sequence[str]:
    return layout.storage_keys([], lanes)
