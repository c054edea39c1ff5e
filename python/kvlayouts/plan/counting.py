"""Slots and a host tier that only count: what the cache's tree needs below it, without a pool, an index or a byte.

Which slot or host page it is never changes a decision, only how many of them each lane has. So one slot page stands for
all of its lane, the ledger for host memory, and a copy has ended when it begins. Plans, metadata and lanes are the
strategy's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Generic

import numpy as np
import torch
from sglang.srt.managers.cache_controller import HiCacheAck

from sglang.srt.mem_cache.hicache.host.ledger import HostLedger, HostShortfall
from sglang.srt.mem_cache.hicache.slots.page_runs import pages_by_lane
from sglang.srt.mem_cache.layouts.capabilities import has_host_lanes
from sglang.srt.mem_cache.layouts.facts import host_lanes
from sglang.srt.mem_cache.layouts.protocol import KVLayoutStrategy, MetadataT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang.srt.mem_cache.layouts.pages import LaneArray, PageArray
    from sglang.srt.mem_cache.layouts.plans import BackupPlan
    from sglang.srt.mem_cache.layouts.protocol import AnyKVLayoutStrategy


class CountingSlots:
    """The slots of ranks that have `rank_pages` device pages each, as room in each lane. A `SlotAllocator`.

    `longest` is the most pages that anything is given at once. `layout` has pages of one token.
    """

    def __init__(self, layout: AnyKVLayoutStrategy, rank_pages: int, longest: int) -> None:
        self.lane_count = layout.lane_count
        # Pages below the lane count are padding.
        pages = np.arange(self.lane_count, self.lane_count + layout.logical_tokens(rank_pages), dtype=np.int64)
        lanes = layout.lanes_of(pages)
        self._room: PageArray = pages_by_lane(lanes, self.lane_count)
        self._page_of: PageArray = np.zeros(self.lane_count, dtype=np.int64)
        self._page_of[lanes[::-1]] = pages[::-1]  # the first of each lane is set last
        self._pages = int(self._page_of.max()) + 1
        # Where a slot page says who has it on the host, slot pages are handed out in turn, as long runs of them are.
        self._in_turn = has_host_lanes(layout) and self.lane_count == 1
        self._next = 0
        self._slots = torch.zeros(longest, dtype=torch.int64)
        self.longest = longest

    def room_pages(self) -> PageArray:
        """Free pages of each lane, shape ``[lane_count]``."""
        return self._room

    def alloc_lanes(self, lanes: LaneArray) -> PageArray | None:
        """Pages in the lanes asked for, or None with nothing taken if a lane is short."""
        left = self._room - pages_by_lane(lanes, self.lane_count)
        if left.min() < 0:
            return None
        self._room = left
        if not self._in_turn:
            return self._page_of[lanes]
        self._next += len(lanes)
        return np.arange(self._next - len(lanes) + 1, self._next + 1, dtype=np.int64)

    def free_slot_pages(self, slot_pages: PageArray) -> None:
        """Give pages back, once for each time that they were handed out."""
        if self._in_turn:
            self._room = self._room + len(slot_pages)
            return
        self._room = self._room + np.bincount(slot_pages, minlength=self._pages)[self._page_of]

    def slots(self, slot_pages: PageArray) -> torch.Tensor:
        """As many slots as pages. Nobody looks at them."""
        return self._slots[: len(slot_pages)]


class _Ended:
    """The event of a copy that takes no time."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


_ENDED: Final[Any] = _Ended()  # SGLang's ack wants events of a device


class CountingController(Generic[MetadataT]):
    """Host memory as its ledger, and copies as counts of pages in each lane. A `CopyController`."""

    def __init__(self, layout: KVLayoutStrategy[MetadataT], slots: CountingSlots, ledger: HostLedger) -> None:
        self.ledger = ledger
        self.ack_write_queue: list[HiCacheAck] = []
        self.ack_load_queue: list[HiCacheAck] = []
        self.backed_up_pages: PageArray = np.zeros(host_lanes(layout).count, dtype=np.int64)
        self.loaded_pages: PageArray = np.zeros(host_lanes(layout).count, dtype=np.int64)
        self._layout = layout
        self._slots = slots
        self._queued: list[tuple[int, int]] = []  # ids and logical tokens of backups
        self._host_pages: PageArray = np.arange(slots.longest, dtype=np.int64)  # no copy has more

    def write(self, slot_pages: PageArray, *, node_id: int) -> MetadataT | HostShortfall:
        """Back a node up, if every lane has room for it."""
        return self.write_plan(self._layout.plan_backup(slot_pages), node_id=node_id)

    def write_plan(self, plan: BackupPlan, *, node_id: int) -> MetadataT | HostShortfall:
        """`write` for a node whose plan is made."""
        if not self.ledger.admits(plan.demand_pages):
            return HostShortfall(plan=plan, missing_pages=self.ledger.missing_pages(plan.demand_pages))
        self.ledger.take(plan.demand_pages)
        self.backed_up_pages += plan.demand_pages
        self._queued.append((node_id, plan.logical_tokens))
        return self._layout.finish_backup(plan, self._host_pages[: plan.owned_pages])

    def start_writing(self) -> None:
        """One ack for all queued backups, as where they are copied: who waits for one waits for all."""
        if self._queued:
            ids, tokens = zip(*self._queued, strict=True)
            self.ack_write_queue.append(HiCacheAck(_ENDED, _ENDED, list(ids), sum(tokens)))
            self._queued.clear()

    def load(self, parts: Sequence[MetadataT], *, node_id: int) -> PageArray | None:
        """Slot pages for nodes on the host, or None with nothing taken if a lane is short."""
        slot_pages = self._slots.alloc_lanes(self._layout.load_lanes(parts))
        if slot_pages is None:
            return None
        for part in parts:
            self.loaded_pages += part.pages_per_lane
        self.ack_load_queue.append(HiCacheAck(_ENDED, _ENDED, [node_id], len(slot_pages)))
        return slot_pages

    def release_host(self, metadata: MetadataT) -> int:
        """Free a node's host pages. Returns its logical tokens."""
        self.ledger.give(metadata.pages_per_lane)
        return metadata.logical_len
