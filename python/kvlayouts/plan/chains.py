"""Which lanes the pages of a chain take, as the strategy answers, counted by lane for any stretch of pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvlayouts.common.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang.srt.mem_cache.layouts.pages import LaneArray, PageArray
    from sglang.srt.mem_cache.layouts.registry import AnyKVLayoutStrategy


class ChainLanes:
    """Lanes of the chains of a trace under one strategy.

    `first_pages` are the contents of the chains' first pages, as bytes; chains are numbered by them. Raises
    `InputError` for a strategy whose backups do not take exactly one host page in the lane of each page: that
    is what the simulation counts with.
    """

    def __init__(self, layout: AnyKVLayoutStrategy, first_pages: Sequence[bytes], longest_pages: int) -> None:
        self.lane_count = layout.lane_count
        self._bases = [layout.chain_base(content, "") for content in first_pages]
        self._lanes: dict[int, LaneArray] = {
            base: layout.extend_lanes(base, 0, longest_pages) for base in set(self._bases)
        }
        for lanes in self._lanes.values():
            _check_plans(layout, lanes)

    def count(self, chain: int, first_page: int, end_page: int) -> PageArray:
        """Pages in each lane among pages ``first_page .. end_page - 1`` of a chain, shape ``[lane_count]``."""
        lanes = self._lanes[self._bases[chain]]
        return np.bincount(lanes[first_page:end_page], minlength=self.lane_count)


def device_pages_by_lane(layout: AnyKVLayoutStrategy, rank_pages: int) -> PageArray:
    """Slot pages in each lane where every rank has a device pool of `rank_pages` pages, shape ``[lane_count]``."""
    pages = layout.logical_tokens(rank_pages * layout.page_size) // layout.page_size
    return np.bincount(layout.lanes_of(_usable(layout, pages)), minlength=layout.lane_count)


def _usable(layout: AnyKVLayoutStrategy, pages: int) -> PageArray:
    """The first `pages` slot pages that are handed out: those below the lane count are padding."""
    return np.arange(layout.lane_count, layout.lane_count + pages, dtype=np.int64)


def _check_plans(layout: AnyKVLayoutStrategy, lanes: LaneArray) -> None:
    """Ask for the plans of a node in these lanes and compare them with the count of its pages by lane."""
    lanes = lanes[: 4 * layout.lane_count]
    supply = _usable(layout, (len(lanes) + 1) * layout.lane_count)
    by_lane = [supply[layout.lanes_of(supply) == lane].tolist() for lane in range(layout.lane_count)]
    slot_pages = np.array([by_lane[lane].pop(0) for lane in lanes.tolist()], dtype=np.int64)
    plan = layout.plan_backup(slot_pages)
    metadata = layout.finish_backup(plan, np.arange(plan.owned_pages, dtype=np.int64))
    counted = tuple(np.bincount(lanes, minlength=layout.lane_count).tolist())
    if plan.demand_pages != counted or metadata.pages_per_rank != counted:
        raise InputError(
            f"--layout {layout.name}: backs {counted} pages of the lanes up in {plan.demand_pages} host pages; "
            "plan needs one host page in the lane of each page"
        )
    if not np.array_equal(layout.load_lanes([metadata]), lanes):
        raise InputError(
            f"--layout {layout.name}: loads pages into other lanes than it backed them up from; plan needs the same"
        )
