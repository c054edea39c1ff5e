"""The contract suite itself: strategies that break one promise each, and the test that must notice."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import pytest
from sglang.test.ci.ci_register import register_cpu_ci
from typing_extensions import override

from sglang.srt.mem_cache.layouts import (
    BackupPlan,
    CopyPlan,
    CpHiCacheNodeMetadata,
    CpSharedLayout,
    DcpStripedLayout,
    HostSharedLayout,
    IdentityLayout,
    KVLayoutStrategy,
    LayoutConfigError,
    LoadPlan,
    PageExchange,
)
from sglang.srt.mem_cache.layouts.exchange import NO_EXCHANGE
from sglang.srt.mem_cache.layouts.owner_check import refuse_shared_owners
from sglang.srt.mem_cache.layouts.testing import LayoutContract, joined, same

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from sglang.srt.mem_cache.layouts.pages import LaneArray, PageArray

register_cpu_ci(est_time=10, suite="base-a-test-cpu")


class _Binding(LayoutContract[Any]):
    split_rules: ClassVar = {"page_size": same, "cp_size": same, "cp_rank": same, "lanes": joined, "host_pages": joined}
    page_sizes: ClassVar[tuple[int, ...]] = (1, 4)
    shard_sizes: ClassVar[tuple[int, ...]] = (1, 2, 3, 5)
    max_examples: ClassVar = 5
    broken: type[CpSharedLayout] = CpSharedLayout

    @override
    def make_layout(self, *, page_size: int, shard_size: int, shard_rank: int) -> KVLayoutStrategy[Any]:
        return cast(
            "KVLayoutStrategy[Any]", self.broken(page_size=page_size, shard_size=shard_size, shard_rank=shard_rank)
        )


class _BaseFromRank(CpSharedLayout):
    @override
    def chain_base(self, first_page: bytes, namespace: str) -> int:
        return (super().chain_base(first_page, namespace) + self.lane) % self.lane_count


class _DemandOfThisRankOnly(CpSharedLayout):
    @override
    def plan_backup(self, slot_pages: PageArray) -> BackupPlan:
        plan = super().plan_backup(slot_pages)
        mine = tuple(pages if lane == self.lane else 0 for lane, pages in enumerate(plan.demand_pages))
        return replace(plan, demand_pages=mine)


class _DealsTwoByTwo(CpSharedLayout):
    @override
    def extend_lanes(self, base: int, first_page: int, pages: int) -> LaneArray:
        lanes = (base + np.arange(first_page, first_page + pages) // 2) % self.lane_count
        return lanes.astype(np.int16)


class _ReservedPagesAccepted(CpSharedLayout):
    @override
    def plan_backup(self, slot_pages: PageArray) -> BackupPlan:
        lanes = self.lanes_of(slot_pages)
        return BackupPlan(
            page_size=self.page_size,
            lanes=lanes,
            demand_pages=tuple(np.bincount(lanes, minlength=self.lane_count).tolist()),
            device_pages=self.geometry.row_pages(slot_pages[lanes == self.lane]),
        )


class _LoadIgnoresOwners(CpSharedLayout):
    @override
    def plan_load(self, parts: Sequence[CpHiCacheNodeMetadata], slot_pages: PageArray) -> LoadPlan:
        self.geometry.check_slot_pages(slot_pages)
        lanes = self.load_lanes(parts)
        host_pages = np.concatenate([part.host_pages for part in parts])
        mine = slot_pages[lanes == self.lane] if len(slot_pages) == len(lanes) else host_pages
        return LoadPlan(
            page_size=self.page_size,
            logical_pages=len(lanes),
            copies=CopyPlan.from_pages(
                page_size=self.page_size, host_pages=host_pages, device_pages=self.geometry.row_pages(mine)
            ),
        )


class _LoadReversesItsHostPages(CpSharedLayout):
    @override
    def plan_load(self, parts: Sequence[CpHiCacheNodeMetadata], slot_pages: PageArray) -> LoadPlan:
        plan = super().plan_load(parts, slot_pages)
        copies = CopyPlan.from_pages(
            page_size=self.page_size,
            host_pages=plan.copies.host_pages()[::-1],
            device_pages=plan.copies.device_pages(),
        )
        return replace(plan, copies=copies)


class _ChainRestartsAtEveryNode(CpSharedLayout):
    @override
    def extend_lanes(self, base: int, first_page: int, pages: int) -> LaneArray:
        return super().extend_lanes(base, 0, pages)


class _OtherMetadata(CpSharedLayout):
    """Nodes get metadata of the class `kind`, whose `split` is wrong."""

    kind: type[CpHiCacheNodeMetadata]

    @override
    def finish_backup(self, plan: BackupPlan, host_pages: PageArray) -> CpHiCacheNodeMetadata:
        right = super().finish_backup(plan, host_pages)
        return self.kind(**{field.name: getattr(right, field.name) for field in fields(right) if field.init})


class _SplitSwapsHalves(_OtherMetadata):
    class kind(CpHiCacheNodeMetadata):
        @override
        def split(self, split_len: int) -> tuple[CpHiCacheNodeMetadata, CpHiCacheNodeMetadata]:
            first, second = super().split(split_len)
            return second, first


class _SplitKeepsViews(_OtherMetadata):
    class kind(CpHiCacheNodeMetadata):
        @override
        def split(self, split_len: int) -> tuple[CpHiCacheNodeMetadata, CpHiCacheNodeMetadata]:
            first, second = super().split(split_len)
            pages, owned = len(first.lanes), len(first.host_pages)
            return (
                replace(first, lanes=self.lanes[:pages], host_pages=self.host_pages[:owned]),
                replace(second, lanes=self.lanes[pages:], host_pages=self.host_pages[owned:]),
            )


class _SplitHostPagesByLogicalPages(_OtherMetadata):
    """The fault that the design warns of: slicing the first pages of the host pages, not the owned ones."""

    class kind(CpHiCacheNodeMetadata):
        @override
        def split(self, split_len: int) -> tuple[CpHiCacheNodeMetadata, CpHiCacheNodeMetadata]:
            first, second = super().split(split_len)
            if len(first.host_pages) and len(second.host_pages):
                pool = np.concatenate([second.host_pages, first.host_pages])
                first = replace(first, host_pages=pool[: len(first.host_pages)].copy())
                second = replace(second, host_pages=pool[len(first.host_pages) :].copy())
            return first, second


class _SplitRoundsDown(_OtherMetadata):
    class kind(CpHiCacheNodeMetadata):
        @override
        def split(self, split_len: int) -> tuple[CpHiCacheNodeMetadata, CpHiCacheNodeMetadata]:
            return super().split(split_len // self.page_size * self.page_size)


class _LogicalCapacityOfOneRank(CpSharedLayout):
    @override
    def logical_tokens(self, physical_tokens: int) -> int:
        return physical_tokens


class _TwoCopies(CpSharedLayout):
    """Each page on two ranks: the ranks agree, and every copy is right."""

    def __init__(self, *, page_size: int, shard_size: int, shard_rank: int) -> None:
        lanes = (shard_size + 1) // 2
        super().__init__(page_size=page_size, shard_size=lanes, shard_rank=shard_rank % lanes)


class _ALaneThatNobodyServes(CpSharedLayout):
    def __init__(self, *, page_size: int, shard_size: int, shard_rank: int) -> None:
        super().__init__(page_size=page_size, shard_size=shard_size + 1, shard_rank=shard_rank)


class _TwoRanksHaveTheLastLane(CpSharedLayout):
    def __init__(self, *, page_size: int, shard_size: int, shard_rank: int) -> None:
        super().__init__(page_size=page_size, shard_size=shard_size, shard_rank=max(shard_rank, min(1, shard_size - 1)))


class _RanksInReverse(CpSharedLayout):
    """Allowed: each rank has a lane of its own, whichever that is."""

    def __init__(self, *, page_size: int, shard_size: int, shard_rank: int) -> None:
        super().__init__(page_size=page_size, shard_size=shard_size, shard_rank=shard_size - 1 - shard_rank)


class _RowsOfTheNextRank(CpSharedLayout):
    """`lanes_of` and plans say one owner, `local_rows` another."""

    @override
    def local_rows(self, slots: torch.Tensor) -> torch.Tensor:
        return super().local_rows(slots + self.page_size)


class _RowsOfEveryRank(CpSharedLayout):
    @override
    def local_rows(self, slots: torch.Tensor) -> torch.Tensor:
        return self.geometry.logical_locs_to_physical(slots)


class _EveryRankTakesEverything(CpSharedLayout):
    @override
    def plan_backup(self, slot_pages: PageArray) -> BackupPlan:
        return replace(super().plan_backup(slot_pages), device_pages=self.geometry.row_pages(slot_pages))


# Host owners and exchanges.


class _LeavesTheExchangeOut(HostSharedLayout):
    """Every rank thinks that its own pages are all that it stores."""

    @override
    def plan_load(self, parts: Sequence[CpHiCacheNodeMetadata], slot_pages: PageArray) -> LoadPlan:
        return replace(super().plan_load(parts, slot_pages), exchange=NO_EXCHANGE)


class _NobodySendsTheLastPage(HostSharedLayout):
    """Its owner is to give it, but does not load it."""

    @override
    def plan_load(self, parts: Sequence[CpHiCacheNodeMetadata], slot_pages: PageArray) -> LoadPlan:
        plan = super().plan_load(parts, slot_pages)
        host, device = plan.copies.host_pages(), plan.copies.device_pages()
        left = slice(0, -1 if len(device) and device[-1] == slot_pages[-1] else None)
        copies = CopyPlan.from_pages(page_size=self.page_size, host_pages=host[left], device_pages=device[left])
        return replace(plan, copies=copies)


class _CountsItsOwnPagesOnly(HostSharedLayout):
    """The ranks come to the exchange with different numbers of pages."""

    @override
    def plan_load(self, parts: Sequence[CpHiCacheNodeMetadata], slot_pages: PageArray) -> LoadPlan:
        plan = super().plan_load(parts, slot_pages)
        mine = plan.exchange.owners == self.host_lane
        exchange = PageExchange(owners=plan.exchange.owners[mine], row_pages=plan.exchange.row_pages[mine])
        return replace(plan, exchange=exchange)


class _GivesRowsOfTheNextPage(HostSharedLayout):
    @override
    def plan_load(self, parts: Sequence[CpHiCacheNodeMetadata], slot_pages: PageArray) -> LoadPlan:
        plan = super().plan_load(parts, slot_pages)
        rows = plan.exchange.row_pages
        return replace(plan, exchange=replace(plan.exchange, row_pages=np.roll(rows, self.host_lane)))


class _BooksHalfOfWhatItTakes(HostSharedLayout):
    """The ledgers admit more than a rank's host pool holds."""

    @override
    def plan_backup(self, slot_pages: PageArray) -> BackupPlan:
        plan = super().plan_backup(slot_pages)
        return replace(plan, demand_pages=tuple(pages // 2 for pages in plan.demand_pages))


class _OwnersThatDoNotExist(HostSharedLayout):
    @override
    def plan_backup(self, slot_pages: PageArray) -> BackupPlan:
        plan = super().plan_backup(slot_pages)
        lanes = plan.lanes + np.int16(self.host_lane_count)
        return replace(plan, lanes=lanes, device_pages=plan.device_pages[:0])


class _TwoOwnersBothAnswer(HostSharedLayout):
    """The last rank says that it is the one before it, so both have those pages, and nobody has its own."""

    def __init__(self, *, page_size: int, shard_size: int, shard_rank: int) -> None:
        twin = shard_rank == shard_size - 1 and shard_size > 1
        super().__init__(page_size=page_size, shard_size=shard_size, shard_rank=shard_rank - twin)


class _KeepsNoRowsOfPages(HostSharedLayout):
    """`local_rows` says that a rank stores what it backs up: readers would miss all other pages."""

    @override
    def local_rows(self, slots: torch.Tensor) -> torch.Tensor:
        return slots * (slots // self.page_size % self.host_lane_count == self.host_lane)


class _StripesOfTheRankBefore(DcpStripedLayout):
    """Two ranks store the same tokens of a page, and nobody those of the last."""

    @override
    def local_rows(self, slots: torch.Tensor) -> torch.Tensor:
        return super().local_rows(slots + 1) if self.shard_rank == 0 else super().local_rows(slots)


class _RankZeroKeepsAll(HostSharedLayout):
    """Allowed: one rank has the host copies of all, and gives them to the others."""

    @override
    def plan_backup(self, slot_pages: PageArray) -> BackupPlan:
        plan = super().plan_backup(slot_pages)
        pages = len(slot_pages)
        demand = (pages, *[0] * (self.host_lane_count - 1))
        mine = slot_pages.copy() if self.host_lane == 0 else slot_pages[:0].copy()
        return replace(plan, lanes=np.zeros(pages, dtype=np.int16), demand_pages=demand, device_pages=mine)


@pytest.mark.parametrize(
    ("broken", "noticed_by"),
    [
        (_LeavesTheExchangeOut, "test_bytes_come_back_at_the_same_positions"),
        (_LeavesTheExchangeOut, "test_ranks_exchange_what_they_store_and_do_not_load"),
        (_NobodySendsTheLastPage, "test_bytes_come_back_at_the_same_positions"),
        (_CountsItsOwnPagesOnly, "test_bytes_come_back_at_the_same_positions"),
        (_CountsItsOwnPagesOnly, "test_ranks_exchange_what_they_store_and_do_not_load"),
        (_CountsItsOwnPagesOnly, "test_all_ranks_answer_alike"),
        (_GivesRowsOfTheNextPage, "test_bytes_come_back_at_the_same_positions"),
        (_GivesRowsOfTheNextPage, "test_ranks_exchange_what_they_store_and_do_not_load"),
        (_BooksHalfOfWhatItTakes, "test_no_host_lane_takes_more_than_it_was_admitted_for"),
        (_BooksHalfOfWhatItTakes, "test_demand_is_what_each_lane_really_copies"),
        (_OwnersThatDoNotExist, "test_demand_is_what_each_lane_really_copies"),
        (_TwoOwnersBothAnswer, "test_each_host_lane_is_one_ranks_or_every_rank_keeps_all"),
        (_KeepsNoRowsOfPages, "test_a_slot_has_a_row_on_its_owner_and_a_row_of_the_padding_page_elsewhere"),
        (_StripesOfTheRankBefore, "test_a_slot_has_a_row_on_its_owner_and_a_row_of_the_padding_page_elsewhere"),
    ],
)
def test_a_broken_host_tier_is_noticed(broken: type[HostSharedLayout | DcpStripedLayout], noticed_by: str) -> None:
    class Broken(_Binding):
        shard_sizes: ClassVar = (2, 4)
        page_sizes: ClassVar = (4, 16)

        @override
        def make_layout(self, *, page_size: int, shard_size: int, shard_rank: int) -> KVLayoutStrategy[Any]:
            return self.kind(page_size=page_size, shard_size=shard_size, shard_rank=shard_rank)

        kind: type[HostSharedLayout | DcpStripedLayout] = broken
        split_rules: ClassVar = _Binding.split_rules

    class Sound(Broken):
        kind = DcpStripedLayout if issubclass(broken, DcpStripedLayout) else HostSharedLayout

    with pytest.raises((AssertionError, pytest.fail.Exception)):
        getattr(Broken(), noticed_by)()
    getattr(Sound(), noticed_by)()


@pytest.mark.parametrize(
    "broken", [_OwnersThatDoNotExist, _TwoOwnersBothAnswer, _KeepsNoRowsOfPages, _StripesOfTheRankBefore]
)
def test_a_host_tier_that_is_noticed_is_refused_at_start(broken: type[HostSharedLayout | DcpStripedLayout]) -> None:
    ranks = [broken(page_size=4, shard_size=4, shard_rank=rank) for rank in range(4)]
    with pytest.raises(LayoutConfigError, match=r"^--kv-layout-strategy \w+: [^\n]*; accepted: [^\n]*$"):
        refuse_shared_owners(ranks)


@pytest.mark.parametrize(
    ("broken", "noticed_by"),
    [
        (_BaseFromRank, "test_all_ranks_answer_alike"),
        (_DemandOfThisRankOnly, "test_demand_is_what_each_lane_really_copies"),
        (_DemandOfThisRankOnly, "test_all_ranks_answer_alike"),
        (_ReservedPagesAccepted, "test_reserved_pages_are_refused_and_the_others_fill_every_pool_once"),
        (_LogicalCapacityOfOneRank, "test_reserved_pages_are_refused_and_the_others_fill_every_pool_once"),
        (_LoadIgnoresOwners, "test_a_load_into_wrong_lanes_or_a_wrong_number_of_slots_raises_on_every_rank"),
        (_LoadReversesItsHostPages, "test_bytes_come_back_at_the_same_positions"),
        (_DealsTwoByTwo, "test_a_strategy_that_says_so_deals_pages_in_turn"),
        (_ChainRestartsAtEveryNode, "test_lanes_of_a_chain_start_at_its_base_and_can_be_computed_piece_by_piece"),
        (_SplitHostPagesByLogicalPages, "test_the_parts_of_a_node_are_what_backups_of_the_parts_would_be"),
        (_SplitSwapsHalves, "test_bytes_come_back_at_the_same_positions"),
        (_SplitKeepsViews, "test_metadata_keeps_no_other_memory_alive"),
        (_SplitHostPagesByLogicalPages, "test_the_halves_of_every_split_have_the_right_lengths_and_host_pages"),
        (_SplitHostPagesByLogicalPages, "test_bytes_come_back_at_the_same_positions"),
        (_SplitRoundsDown, "test_a_split_outside_the_node_or_off_a_page_raises_value_error"),
        (_TwoCopies, "test_each_lane_is_one_ranks_or_every_rank_stores_all"),
        (_ALaneThatNobodyServes, "test_each_lane_is_one_ranks_or_every_rank_stores_all"),
        (_TwoRanksHaveTheLastLane, "test_each_lane_is_one_ranks_or_every_rank_stores_all"),
        (_RowsOfTheNextRank, "test_a_slot_has_a_row_on_its_owner_and_a_row_of_the_padding_page_elsewhere"),
        (_RowsOfEveryRank, "test_a_slot_has_a_row_on_its_owner_and_a_row_of_the_padding_page_elsewhere"),
        (_EveryRankTakesEverything, "test_pages_of_a_backup_are_disjoint_between_lanes_and_cover_the_node"),
    ],
)
def test_a_broken_strategy_is_noticed(broken: type[CpSharedLayout], noticed_by: str) -> None:
    class Broken(_Binding):
        pass

    Broken.broken = broken
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        getattr(Broken(), noticed_by)()
    getattr(_Binding(), noticed_by)()


def test_ranks_in_another_order_have_a_lane_each_all_the_same() -> None:
    class Permuted(_Binding):
        broken = _RanksInReverse

    Permuted().test_each_lane_is_one_ranks_or_every_rank_stores_all()
    Permuted().test_a_slot_has_a_row_on_its_owner_and_a_row_of_the_padding_page_elsewhere()
    Permuted().test_bytes_come_back_at_the_same_positions()


def test_one_rank_may_keep_all_host_pages_and_give_them_to_the_others() -> None:
    class RankZero(LayoutContract[CpHiCacheNodeMetadata]):
        shard_sizes: ClassVar = (1, 2, 3)
        page_sizes: ClassVar = (4,)
        max_examples: ClassVar = 5
        split_rules: ClassVar = _Binding.split_rules

        @override
        def make_layout(self, *, page_size: int, shard_size: int, shard_rank: int) -> _RankZeroKeepsAll:
            return _RankZeroKeepsAll(page_size=page_size, shard_size=shard_size, shard_rank=shard_rank)

    binding = RankZero()
    for name in dir(binding):
        if name.startswith("test_"):
            getattr(binding, name)()
    refuse_shared_owners([binding.make_layout(page_size=4, shard_size=3, shard_rank=rank) for rank in range(3)])


@pytest.mark.parametrize("broken", [_TwoCopies, _ALaneThatNobodyServes, _TwoRanksHaveTheLastLane, _RowsOfTheNextRank])
def test_what_is_noticed_is_refused_at_start_in_one_line(broken: type[CpSharedLayout]) -> None:
    ranks = [broken(page_size=4, shard_size=4, shard_rank=rank) for rank in range(4)]
    with pytest.raises(LayoutConfigError, match=r"^--kv-layout-strategy cp_shared: rank.*; accepted: [^\n]*$"):
        refuse_shared_owners(ranks)


def test_every_rank_order_and_identity_are_accepted_at_start() -> None:
    for cls in (CpSharedLayout, _RanksInReverse):
        refuse_shared_owners([cls(page_size=4, shard_size=4, shard_rank=rank) for rank in range(4)])
    refuse_shared_owners([IdentityLayout(page_size=4)] * 4)


def test_a_strategy_that_raises_when_asked_is_refused_by_name() -> None:
    class Raises(CpSharedLayout):
        @override
        def lanes_of(self, slot_pages: PageArray) -> LaneArray:
            raise ZeroDivisionError("two\nlines")

    with pytest.raises(LayoutConfigError, match=r"cp_shared: ZeroDivisionError when asked .*: two lines; accepted"):
        refuse_shared_owners([Raises(page_size=4, shard_size=2, shard_rank=rank) for rank in range(2)])


def test_a_mapping_that_is_consistently_another_one_is_noticed_if_homes_are_stated() -> None:
    class Shifted(CpSharedLayout):
        @override
        def lanes_of(self, slot_pages: PageArray) -> LaneArray:
            return super().lanes_of(slot_pages + 1)

        @override
        def plan_backup(self, slot_pages: PageArray) -> BackupPlan:
            if int(slot_pages.min(initial=self.lane_count)) < self.lane_count:
                raise LayoutConfigError("reserved")
            return super().plan_backup(slot_pages + 1)

        @override
        def local_rows(self, slots: torch.Tensor) -> torch.Tensor:
            return super().local_rows(slots + self.page_size)

    class Stated(_Binding):
        broken = Shifted

        @override
        def stated_home(self, slot_page: int, shard_size: int) -> tuple[int, int]:
            return slot_page % shard_size, slot_page // shard_size

    with pytest.raises(AssertionError, match="is not at"):
        Stated().test_pages_lie_where_the_binding_says()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _MetadataWithANewField(CpHiCacheNodeMetadata):
    hit_count: int = 0

    @classmethod
    def extend(cls, data: CpHiCacheNodeMetadata, hit_count: int) -> _MetadataWithANewField:
        return cls(
            page_size=data.page_size,
            cp_size=data.cp_size,
            cp_rank=data.cp_rank,
            lanes=data.lanes,
            host_pages=data.host_pages,
            hit_count=hit_count,
        )

    @override
    def split(self, split_len: int) -> tuple[_MetadataWithANewField, _MetadataWithANewField]:
        first, second = CpHiCacheNodeMetadata.split(self, split_len)
        return self.extend(first, 0), self.extend(second, 0)


class _CountsHitsButForgetsThemOnSplit(CpSharedLayout):
    @override
    def finish_backup(self, plan: BackupPlan, host_pages: PageArray) -> _MetadataWithANewField:
        return _MetadataWithANewField.extend(super().finish_backup(plan, host_pages), hit_count=3)


def test_a_metadata_field_without_a_split_rule_is_noticed() -> None:
    class Binding(_Binding):
        broken = _CountsHitsButForgetsThemOnSplit

    with pytest.raises(AssertionError, match=r"decide a split rule for metadata fields \['hit_count'\]"):
        Binding().test_every_metadata_field_has_a_split_rule_and_keeps_it()


def test_a_metadata_field_that_a_split_forgets_is_noticed() -> None:
    class Binding(_Binding):
        broken = _CountsHitsButForgetsThemOnSplit
        split_rules: ClassVar = {**_Binding.split_rules, "hit_count": same}

    with pytest.raises(AssertionError, match="field 'hit_count' breaks its rule"):
        Binding().test_every_metadata_field_has_a_split_rule_and_keeps_it()


def test_a_split_rule_for_a_field_that_is_gone_is_noticed() -> None:
    class Binding(_Binding):
        split_rules: ClassVar = {**_Binding.split_rules, "host_len": same}

    with pytest.raises(AssertionError, match=r"split_rules names \['host_len'\]"):
        Binding().test_every_metadata_field_has_a_split_rule_and_keeps_it()
