"""A distribution of layout strategies that have one fault each. A replay has to notice every one of them.

The folder stands for a site-packages directory: put it on `sys.path` and the strategies are known by name.
"""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING

from typing_extensions import override

from sglang.srt.mem_cache.layouts import checks
from sglang.srt.mem_cache.layouts.cp_shared import CpHiCacheNodeMetadata, CpSharedLayout
from sglang.srt.mem_cache.layouts.identity import IdentityLayout
from sglang.srt.mem_cache.layouts.plans import CopyPlan, LoadPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang.srt.mem_cache.layouts.config import LayoutConfig, LayoutEnvironment
    from sglang.srt.mem_cache.layouts.pages import LaneArray, PageArray
    from sglang.srt.mem_cache.layouts.plans import BackupPlan


class SwapsPages(CpSharedLayout):
    """Loads the first two pages of a rank into each other's place."""

    name = "swaps_pages"

    @override
    def plan_load(self, parts: Sequence[CpHiCacheNodeMetadata], slot_pages: PageArray) -> LoadPlan:
        plan = super().plan_load(parts, slot_pages)
        device_pages = plan.copies.device_pages()
        device_pages[:2] = device_pages[:2][::-1].copy()
        return _loading(plan, plan.copies.host_pages(), device_pages)


class ForgetsAPage(CpSharedLayout):
    """Does not load the last page of rank 0, so that the row keeps what it held before."""

    name = "forgets_a_page"

    @override
    def plan_load(self, parts: Sequence[CpHiCacheNodeMetadata], slot_pages: PageArray) -> LoadPlan:
        plan = super().plan_load(parts, slot_pages)
        if self.lane:
            return plan
        return _loading(plan, plan.copies.host_pages()[:-1], plan.copies.device_pages()[:-1])


class ForgetsIfTold(ForgetsAPage):
    """The same if its setting `forgets` says so."""

    name = "forgets_if_told"
    told = False

    @classmethod
    @override
    def from_config(cls, config: LayoutConfig) -> ForgetsIfTold:
        config.refuse_unknown_options("forgets")
        layout = cls(page_size=config.page_size, shard_size=config.shard_size, shard_rank=config.shard_rank)
        layout.told = config.options.get("forgets") is True
        return layout

    @override
    def plan_load(self, parts: Sequence[CpHiCacheNodeMetadata], slot_pages: PageArray) -> LoadPlan:
        return super().plan_load(parts, slot_pages) if self.told else CpSharedLayout.plan_load(self, parts, slot_pages)


class DealsByRank(CpSharedLayout):
    """Starts a chain in another lane on each rank: the ranks hand out different slots."""

    name = "deals_by_rank"

    @override
    def chain_base(self, first_page: bytes, namespace: str) -> int:
        return (super().chain_base(first_page, namespace) + self.lane) % self.lane_count


class OrdersByRank(CpSharedLayout):
    """Exchanges the lanes of a chain's first two pages on rank 1: as many pages in each lane, but other slots."""

    name = "orders_by_rank"

    @override
    def extend_lanes(self, base: int, first_page: int, pages: int) -> LaneArray:
        lanes = super().extend_lanes(base, first_page, pages)
        if self.lane == 1 and first_page == 0:
            lanes[:2] = lanes[:2][::-1].copy()
        return lanes


class BreaksOnRank1(CpSharedLayout):
    """Raises on rank 1 once a few nodes were backed up."""

    name = "breaks_on_rank_1"
    backups = 0

    @override
    def finish_backup(self, plan: BackupPlan, host_pages: PageArray) -> CpHiCacheNodeMetadata:
        self.backups += 1
        if self.lane == 1 and self.backups > 3:
            raise ZeroDivisionError("three\nbackups are enough")
        return super().finish_backup(plan, host_pages)


class TwoCopies(CpSharedLayout):
    """Keeps each page on two ranks: half as many lanes as ranks."""

    name = "two_copies"

    @classmethod
    @override
    def from_config(cls, config: LayoutConfig) -> TwoCopies:
        lanes = max(1, config.shard_size // 2)
        return cls(page_size=config.page_size, shard_size=lanes, shard_rank=config.shard_rank % lanes)

    @override
    def validate(self, environment: LayoutEnvironment) -> None:
        """Everything fits."""


class RefusesHeads(IdentityLayout):
    """Has one lane, and yet no use for a pool whose heads differ by rank."""

    name = "refuses_heads"

    @override
    def validate(self, environment: LayoutEnvironment) -> None:
        checks.refuse_divergent_content(self.name, environment)


class Talks(CpSharedLayout):
    """Warns, on every rank, whenever it is asked for lanes."""

    name = "talks"

    @override
    def extend_lanes(self, base: int, first_page: int, pages: int) -> LaneArray:
        logging.getLogger("faulty_layouts").warning("asked for %d pages", pages)
        warnings.warn("this layout talks too much", RuntimeWarning, stacklevel=1)
        return super().extend_lanes(base, first_page, pages)


def _loading(plan: LoadPlan, host_pages: PageArray, device_pages: PageArray) -> LoadPlan:
    copies = CopyPlan.from_pages(page_size=plan.page_size, host_pages=host_pages, device_pages=device_pages)
    return LoadPlan(page_size=plan.page_size, logical_pages=plan.logical_pages, copies=copies)
