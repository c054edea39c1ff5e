"""The mirrored ledger of host memory: what every rank of the shard group has free.

Each rank keeps the same ledger and updates it with the same numbers, so each knows whether *all* ranks can
take a backup without asking them. A backup is admitted only if every lane has room; otherwise no rank
allocates anything and all of them evict the same nodes. Capacity is the smallest host pool of the group,
agreed on once at start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sglang.srt.mem_cache.layouts.config import check_range
from sglang.srt.mem_cache.layouts.errors import LayoutInvariantError

if TYPE_CHECKING:
    from collections.abc import Sequence


class HostLedger:
    """Free host pages of each lane, in pages. Pure bookkeeping; equal on all ranks."""

    def __init__(self, *, lane_count: int, capacity_pages: int) -> None:
        check_range("lane_count", lane_count, 1)
        check_range("capacity_pages", capacity_pages, 0)
        self.capacity_pages = capacity_pages
        self._free = np.full(lane_count, capacity_pages, dtype=np.int64)

    @property
    def free_pages(self) -> tuple[int, ...]:
        """Free host pages of each lane."""
        return tuple(int(pages) for pages in self._free)

    @property
    def used_pages(self) -> tuple[int, ...]:
        """Host pages in use in each lane."""
        return tuple(self.capacity_pages - int(pages) for pages in self._free)

    def missing_pages(self, demand_pages: Sequence[int]) -> tuple[int, ...]:
        """Pages that must be freed in each lane before `demand_pages` can be admitted; all 0 if it can be."""
        short = np.maximum(np.asarray(demand_pages, dtype=np.int64) - self._free, 0)
        return tuple(int(pages) for pages in short)

    def admits(self, demand_pages: Sequence[int]) -> bool:
        """Whether every lane has room for `demand_pages`."""
        return bool((self._free >= demand_pages).all())

    def ever_admits(self, demand_pages: Sequence[int]) -> bool:
        """Whether an empty host tier would have room for `demand_pages`."""
        return max(demand_pages) <= self.capacity_pages

    def take(self, demand_pages: Sequence[int]) -> None:
        """Book a backup. `LayoutInvariantError`, with nothing booked, if a lane would go below 0."""
        if not self.admits(demand_pages):
            raise LayoutInvariantError(f"backup needs {tuple(demand_pages)} host pages, ledger has {self.free_pages}")
        self._free -= demand_pages

    def give(self, demand_pages: Sequence[int]) -> None:
        """Book a release. `LayoutInvariantError`, with nothing booked, if a lane would exceed its capacity."""
        if bool((self._free + demand_pages > self.capacity_pages).any()):
            raise LayoutInvariantError(
                f"release of {tuple(demand_pages)} host pages on top of {self.free_pages} free ones "
                f"exceeds the capacity {self.capacity_pages}"
            )
        self._free += demand_pages

    def clear(self) -> None:
        """Everything is free again."""
        self._free.fill(self.capacity_pages)
