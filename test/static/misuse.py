"""mypy reads this and nobody runs it: misuse that it must reject.

Each mistake carries the code of the error that it must cause. Under ``--strict`` an ignore that is not needed is an
error itself, so a mistake that mypy stops seeing is reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from typing_extensions import override

from sglang.srt.mem_cache.layouts import (
    BackupPlan,
    CopyPlan,
    CopyRun,
    CpHiCacheNodeMetadata,
    CpSharedKVLayout,
    CpSharedLayout,
    IdentityLayout,
    IdentityNodeMetadata,
    KVLayoutStrategy,
    LayoutConfig,
    LayoutEnvironment,
    LoadPlan,
    NodeMetadata,
    StorageAwareLayout,
    TurnwiseLayout,
    create_layout,
)
from sglang.srt.mem_cache.layouts.pages import pages_of_tokens
from sglang.srt.mem_cache.layouts.testing import LayoutContract, SplitRule

if TYPE_CHECKING:
    import torch

    from sglang.srt.mem_cache.layouts.pages import LaneArray, PageArray


# Metadata of another strategy.


def metadata_of_another_strategy(
    layout: KVLayoutStrategy[IdentityNodeMetadata], node: CpHiCacheNodeMetadata, pages: PageArray
) -> None:
    layout.load_lanes([node])  # type: ignore[list-item]
    layout.plan_load([node], pages)  # type: ignore[list-item]


def metadata_of_two_strategies_mixed(
    layout: CpSharedLayout, one: CpHiCacheNodeMetadata, other: IdentityNodeMetadata
) -> None:
    layout.load_lanes([one, other])  # type: ignore[list-item]


def the_result_of_another_strategy(
    layout: KVLayoutStrategy[IdentityNodeMetadata], plan: BackupPlan, pages: PageArray
) -> CpHiCacheNodeMetadata:
    return layout.finish_backup(plan, pages)  # type: ignore[return-value]


wrong_parameter: KVLayoutStrategy[CpHiCacheNodeMetadata] = IdentityLayout(page_size=64)  # type: ignore[assignment]


# Tokens where pages are asked for, lanes where pages are asked for, and the reverse.


def tensors_are_not_pages(
    layout: KVLayoutStrategy[IdentityNodeMetadata], plan: BackupPlan, node: IdentityNodeMetadata, slots: torch.Tensor
) -> None:
    layout.plan_backup(slots)  # type: ignore[arg-type]
    layout.finish_backup(plan, slots)  # type: ignore[arg-type]
    layout.plan_load([node], slots)  # type: ignore[arg-type]
    layout.lanes_of(slots)  # type: ignore[arg-type]
    plan.bind(slots)  # type: ignore[arg-type]


def lanes_are_not_pages(layout: KVLayoutStrategy[IdentityNodeMetadata], lanes: LaneArray, pages: PageArray) -> None:
    layout.plan_backup(lanes)  # type: ignore[arg-type]
    pages_of_tokens(pages, 64)  # type: ignore[arg-type]


def text_is_not_content(layout: KVLayoutStrategy[IdentityNodeMetadata]) -> None:
    layout.chain_base("tokens", "namespace")  # type: ignore[arg-type]


# Frozen values.


def values_are_frozen(
    run: CopyRun,
    copies: CopyPlan,
    backup: BackupPlan,
    load: LoadPlan,
    node: CpHiCacheNodeMetadata,
    geometry: CpSharedKVLayout,
    config: LayoutConfig,
) -> None:
    run.pages = 2  # type: ignore[misc]
    copies.page_size = 2  # type: ignore[misc]
    backup.demand_pages = (1,)  # type: ignore[misc]
    load.logical_pages = 1  # type: ignore[misc]
    node.cp_rank = 1  # type: ignore[misc]
    geometry.cp_size = 1  # type: ignore[misc]
    config.name = "identity"  # type: ignore[misc]
    config.options["width"] = 3  # type: ignore[index]


def derived_values_cannot_be_set(backup: BackupPlan, node: IdentityNodeMetadata) -> None:
    backup.owned_pages = 1  # type: ignore[misc]
    node.logical_len = 64  # type: ignore[misc]
    node.host_len = 64  # type: ignore[attr-defined]


# Keywords.


def sizes_are_named(pages: PageArray, environment: LayoutEnvironment) -> None:
    CpSharedKVLayout(64, 4, 0)  # type: ignore[call-arg]
    CpSharedLayout(64, 4, 0)  # type: ignore[call-arg]
    CpSharedLayout(page_size=64, shard_size=4)  # type: ignore[call-arg]
    IdentityLayout(64)  # type: ignore[call-arg]
    CopyRun(1, 2, 3)  # type: ignore[call-arg]
    CopyPlan.from_pages(host_pages=pages, device_pages=pages)  # type: ignore[call-arg]
    CopyPlan.concat([])  # type: ignore[call-arg]
    LayoutConfig("identity")  # type: ignore[call-arg]
    LoadPlan(page_size=64, logical_pages=1)  # type: ignore[call-arg]
    create_layout("identity")  # type: ignore[arg-type]


# Strategies and metadata that lack something.


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataWithoutSplit:
    logical_len: int
    host_pages: PageArray
    pages_per_lane: tuple[int, ...]
    legacy_host_value: torch.Tensor | None


def metadata_without_split(node: MetadataWithoutSplit) -> NodeMetadata:
    return node  # type: ignore[return-value]


class MetadataWhoseSplitLosesTheParent(IdentityNodeMetadata):
    @override
    def split(self, split_len: int) -> IdentityNodeMetadata:  # type: ignore[override]
        return super().split(split_len)[1]


def lossy_split(node: MetadataWhoseSplitLosesTheParent) -> NodeMetadata:
    return node  # type: ignore[return-value]


def a_strategy_of_metadata_without_split(layout: KVLayoutStrategy[MetadataWithoutSplit]) -> None:  # type: ignore[type-var]
    del layout


class StrategyWithoutPlanLoad:
    name = "half"
    page_size = 64
    lane_count = 1
    lane = 0

    def validate(self, environment: LayoutEnvironment) -> None:
        raise NotImplementedError

    def logical_tokens(self, physical_tokens: int) -> int:
        raise NotImplementedError

    def chain_base(self, first_page: bytes, namespace: str) -> int:
        raise NotImplementedError

    def extend_lanes(self, base: int, first_page: int, pages: int) -> LaneArray:
        raise NotImplementedError

    def lanes_of(self, slot_pages: PageArray) -> LaneArray:
        raise NotImplementedError

    def plan_backup(self, slot_pages: PageArray) -> BackupPlan:
        raise NotImplementedError

    def finish_backup(self, plan: BackupPlan, host_pages: PageArray) -> IdentityNodeMetadata:
        raise NotImplementedError

    def load_lanes(self, parts: list[IdentityNodeMetadata]) -> LaneArray:
        raise NotImplementedError


without_plan_load: KVLayoutStrategy[IdentityNodeMetadata] = StrategyWithoutPlanLoad()  # type: ignore[assignment]


# Storage is a capability that neither strategy has yet, turns one that `identity` lacks.

identity_storage: StorageAwareLayout = IdentityLayout(page_size=64)  # type: ignore[assignment]
identity_turnwise: TurnwiseLayout = IdentityLayout(page_size=64)  # type: ignore[assignment]
cp_shared_storage: StorageAwareLayout = CpSharedLayout(page_size=64, shard_size=2, shard_rank=0)  # type: ignore[assignment]


# Bindings of the contract suite.


class BindingOfAnotherStrategy(LayoutContract[IdentityNodeMetadata]):
    @override
    def make_layout(self, *, page_size: int, shard_size: int, shard_rank: int) -> CpSharedLayout:  # type: ignore[override]
        return CpSharedLayout(page_size=page_size, shard_size=shard_size, shard_rank=shard_rank)


class BindingWithoutFactory(LayoutContract[IdentityNodeMetadata]):
    pass


BindingWithoutFactory()  # type: ignore[abstract]


def a_rule_of_two_values(whole: object, first: object) -> bool:
    return whole == first


rule: SplitRule = a_rule_of_two_values  # type: ignore[assignment]
