"""Lanes that are full though the others are not: room taken from one lane of the device or of the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sglang.srt.mem_cache.layouts.facts import host_lanes, page_rows

if TYPE_CHECKING:
    import random

    import torch

    from sglang.srt.mem_cache.hicache.radix_cache import HiRadixCache
    from sglang.srt.mem_cache.layouts.pages import PageArray


class Pressure:
    """Takes and gives back free pages, the same on every rank. The cache sees only that they are not free."""

    def __init__(self, cache: HiRadixCache[Any]) -> None:
        self._cache = cache
        self._host_lanes = host_lanes(cache.layout)
        self._slot_pages: list[PageArray] = []
        self._host: list[tuple[list[int], torch.Tensor | None]] = []

    def apply(self, plan: random.Random) -> str:
        """Fill one lane of one tier, up to all that is free there."""
        lanes = self._cache.layout.lane_count
        drawn = plan.randrange(max(lanes, self._host_lanes.count))
        share = plan.choice([0.5, 1.0])
        if plan.random() < 0.5:
            return f"{self._fill_device(drawn % lanes, share)} pages of device lane {drawn % lanes}"
        lane = drawn % self._host_lanes.count
        return f"{self._fill_host(lane, share)} pages of host lane {lane}"

    def release(self) -> None:
        """Give everything back."""
        controller = self._cache.cache_controller
        for pages in self._slot_pages:
            self._cache.slots.free_slot_pages(pages)
        for demand, rows in self._host:
            if rows is not None:
                controller.mem_pool_host.free(rows)
            controller.ledger.give(demand)
        self._slot_pages.clear()
        self._host.clear()

    def _fill_device(self, lane: int, share: float) -> int:
        pages = int(self._cache.slots.room_pages()[lane] * share)
        taken = self._cache.slots.alloc_lanes(np.full(pages, lane, dtype=np.int16))
        if taken is not None:
            self._slot_pages.append(taken)
        return pages

    def _fill_host(self, lane: int, share: float) -> int:
        controller = self._cache.cache_controller
        pages = int(controller.ledger.free_pages[lane] * share)
        demand = [0] * self._host_lanes.count
        demand[lane] = pages
        controller.ledger.take(demand)
        rows = None
        if pages and lane == self._host_lanes.own:
            rows = controller.mem_pool_host.alloc(pages * page_rows(self._cache.layout))
        self._host.append((demand, rows))
        return pages
