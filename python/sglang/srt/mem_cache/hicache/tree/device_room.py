"""`DeviceRoom`: who leaves the device. A leaf keeps its host copy, gets one first, or is deleted.

Room is made by shortfall, in the order of SGLang's eviction strategies, until every *lane* that is short has it.
Each decision is computed from mirrored state, so all ranks take it alike without asking.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Generic

import numpy as np
from sglang.srt.disaggregation.kv_events import StorageMedium

from sglang.srt.mem_cache.layouts.pages import NO_PAGES
from sglang.srt.mem_cache.layouts.protocol import MetadataT

from ..slots.page_runs import pages_by_lane

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.mem_cache.events import KVCacheEventRecorder

    from sglang.srt.mem_cache.layouts.pages import LaneArray, PageArray

    from ..settings import HiCacheSettings
    from ..slots.allocator import SlotAllocator
    from .accounting import Accounting
    from .acks import Transfers
    from .backups import Backups
    from .copies_ahead import CopiesAhead
    from .host_room import HostRoom
    from .node import LayoutTreeNode
    from .radix_tree import LayoutRadixTree
    from .report import TrafficReport

    Staged = tuple[LayoutTreeNode[MetadataT], PageArray]
    """A node that has left the device while it is copied, and its slots."""


class DeviceRoom(Generic[MetadataT]):
    """Slots of a tree, from the side that gives them up."""

    def __init__(
        self,
        slots: SlotAllocator,
        *,
        settings: HiCacheSettings,
        tree: LayoutRadixTree[MetadataT],
        accounting: Accounting[MetadataT],
        backups: Backups[MetadataT],
        copies_ahead: CopiesAhead[MetadataT],
        host_room: HostRoom[MetadataT],
        transfers: Transfers[MetadataT],
        events: KVCacheEventRecorder,
        report: TrafficReport,
    ) -> None:
        self._slots = slots
        self._writes_back = settings.write_policy == "write_back"
        self._page_size = tree.page_size
        self._tree = tree
        self._accounting = accounting
        self._backups = backups
        self._copies_ahead = copies_ahead
        self._host_room = host_room
        self._transfers = transfers
        self._events = events
        self._report = report

    def alloc(self, lanes: LaneArray) -> PageArray | None:
        """Logical pages in the lanes asked for, evicting until each lane has room, or None if it cannot be made."""
        self.make(lanes)
        return self._slots.alloc_lanes(lanes)

    def make(self, lanes: LaneArray) -> None:
        """Evict until each lane has room for `lanes`; what was evicted stays so if it cannot be made.

        If one lane is beyond help while all lanes together could serve, nothing is evicted: it would be in vain.
        """
        short = pages_by_lane(lanes, self._slots.lane_count) - self._slots.room_pages()
        if short.max() <= 0:
            return
        evictable = self._accounting.evictable_lane_pages
        in_vain = bool((short > evictable).any())
        if in_vain and int(short.sum()) <= int(evictable.sum()):
            return
        self.evict_until(lambda _, freed: not np.count_nonzero(freed < short))

    def evict(self, num_tokens: int) -> int:
        """Evict at least `num_tokens` logical tokens, or all that can be. Returns the tokens evicted."""
        return self.evict_until(lambda tokens, _: tokens >= num_tokens)

    def evict_until(self, enough: Callable[[int, PageArray], bool]) -> int:
        """Evict in order until ``enough(logical tokens, pages freed in each lane)``; returns the tokens.

        Leaves with a host copy keep it. Others are backed up first if they have the hits for it, or deleted.
        """
        started = time.perf_counter()
        order = self._accounting.device_order
        tokens, freed = 0, np.zeros(self._slots.lane_count, dtype=np.int64)
        staged: list[Staged[MetadataT]] = []
        kept: list[LayoutTreeNode[MetadataT]] = []
        while not enough(tokens, freed):
            node = order.pop_first()
            if node is None:
                if not staged:
                    break
                self._finish_staged(staged)  # settles older copies too, and what they locked can go
                continue
            lane_pages = self._accounting.lane_pages(node)
            pages = self._evict_node(node, staged)
            if len(pages):
                tokens += len(pages) * self._page_size
                freed += lane_pages
            else:
                kept.append(node)
        self._finish_staged(staged)
        for node in kept:
            self._accounting.refresh(node)
        self._copies_ahead.evicted(tokens)
        self._report.evicted_from_device(tokens, time.perf_counter() - started)
        return tokens

    def _evict_node(self, node: LayoutTreeNode[MetadataT], staged: list[Staged[MetadataT]]) -> PageArray:
        """Evict one leaf. Returns the pages that are free now or will be when `staged` is finished; none if kept."""
        if not node.backuped and self._backups.earns_a_copy(node):
            self._backups.back_up_leaving(node)
        if not node.backuped:
            self._finish_staged(staged)
            return self._drop_subtree(node)
        self._events.record_remove(node, medium=StorageMedium.GPU)
        pages = self._accounting.take_off_device(node)
        if self._transfers.in_flight.is_copied(node):
            staged.append((node, pages))
        else:
            self._slots.free_slot_pages(pages)
        return pages

    def _finish_staged(self, staged: list[Staged[MetadataT]]) -> None:
        """Wait for the copies of nodes that have left the device, then free their slots."""
        for node, pages in staged:
            self._transfers.finish_backup(node)
            self._slots.free_slot_pages(pages)
        staged.clear()

    def _drop_subtree(self, root: LayoutTreeNode[MetadataT]) -> PageArray:
        """Delete a leaf that has no host copy, and host-only nodes below it. Returns its pages, none if kept.

        Kept, with nothing changed, if a node below is held.
        """
        if root.host_ref_counter > 0:
            return NO_PAGES
        for node in reversed(list(self._tree.nodes_below(root))):
            self._host_room.drop_copy(node)
        self._events.record_remove(root)
        pages = self._accounting.take_off_device(root)
        self._slots.free_slot_pages(pages)
        self._tree.unlink(root)
        if self._writes_back:
            self._report.dropped(len(pages) * self._page_size)
        return pages
