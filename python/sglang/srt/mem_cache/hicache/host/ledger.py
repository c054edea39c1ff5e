"""The mirrored ledger of host memory: what every rank of the shard group has free.

Each rank keeps the same ledger and updates it with the same numbers, so each knows whether *all* ranks can
take a backup without asking them. A backup is admitted only if every lane has room; otherwise no rank
allocates anything and all of them evict the same nodes. Capacity is the smallest host pool of the group,
agreed on once at start.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import ge
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.layouts.config import check_range
from sglang.srt.mem_cache.layouts.errors import LayoutInvariantError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang.srt.mem_cache.layouts.plans import BackupPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class HostShortfall:
    """A backup that was not admitted. Nothing was changed, on any rank.

    `missing_pages` must be freed in each lane before `plan` can be written.
    """

    plan: BackupPlan
    missing_pages: tuple[int, ...]


class HostLedger:
    """Free host pages of each lane, in pages. Pure bookkeeping; equal on all ranks."""

    def __init__(self, *, lane_count: int, capacity_pages: int) -> None:
        check_range("lane_count", lane_count, 1)
        check_range("capacity_pages", capacity_pages, 0)
        self.capacity_pages = capacity_pages
        self._free = [capacity_pages] * lane_count

    @property
    def free_pages(self) -> tuple[int, ...]:
        """Free host pages of each lane."""
        return tuple(self._free)

    @property
    def used_pages(self) -> tuple[int, ...]:
        """Host pages in use in each lane."""
        return tuple(self.capacity_pages - pages for pages in self._free)

    def free_in(self, lane: int) -> int:
        """Free host pages of one lane."""
        return self._free[lane]

    def missing_pages(self, demand_pages: Sequence[int]) -> tuple[int, ...]:
        """Pages that must be freed in each lane before `demand_pages` can be admitted; all 0 if it can be."""
        return tuple(
            [needed - free if needed > free else 0 for needed, free in zip(demand_pages, self._free, strict=True)]
        )

    def admits(self, demand_pages: Sequence[int]) -> bool:
        """Whether every lane has room for `demand_pages`."""
        return all(map(ge, self._free, demand_pages))

    def take(self, demand_pages: Sequence[int]) -> None:
        """Book a backup. `LayoutInvariantError`, with nothing booked, if a lane would go below 0."""
        left = [free - needed for needed, free in zip(demand_pages, self._free, strict=True)]
        if min(left) < 0:
            raise LayoutInvariantError(f"backup needs {tuple(demand_pages)} host pages, ledger has {self.free_pages}")
        self._free = left

    def give(self, demand_pages: Sequence[int]) -> None:
        """Book a release. `LayoutInvariantError`, with nothing booked, if a lane would exceed its capacity."""
        free = [free + given for given, free in zip(demand_pages, self._free, strict=True)]
        if max(free) > self.capacity_pages:
            raise LayoutInvariantError(
                f"release of {tuple(demand_pages)} host pages on top of {self.free_pages} free ones "
                f"exceeds the capacity {self.capacity_pages}"
            )
        self._free = free

    def clear(self) -> None:
        """Everything is free again."""
        self._free = [self.capacity_pages] * len(self._free)
