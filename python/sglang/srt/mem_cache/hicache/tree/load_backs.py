"""`LoadBacks`: the way up. Which nodes come back to the device from the host, all of them or none."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Generic

from sglang.srt.disaggregation.kv_events import StorageMedium

from sglang.srt.mem_cache.layouts.errors import LayoutInvariantError
from sglang.srt.mem_cache.layouts.protocol import KVLayoutStrategy, MetadataT

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from sglang.srt.mem_cache.events import KVCacheEventRecorder

    from sglang.srt.mem_cache.layouts.pages import PageArray

    from ..settings import HiCacheSettings
    from ..slots.allocator import SlotAllocator
    from .accounting import Accounting
    from .acks import Transfers
    from .device_room import DeviceRoom
    from .node import LayoutTreeNode
    from .protocols import CopyController
    from .report import TrafficReport

logger = logging.getLogger(__name__)


class LoadBacks(Generic[MetadataT]):
    """The way from the host to the device."""

    def __init__(
        self,
        controller: CopyController[MetadataT],
        *,
        layout: KVLayoutStrategy[MetadataT],
        settings: HiCacheSettings,
        slots: SlotAllocator,
        accounting: Accounting[MetadataT],
        device_room: DeviceRoom[MetadataT],
        transfers: Transfers[MetadataT],
        events: KVCacheEventRecorder,
        report: TrafficReport,
    ) -> None:
        self._controller = controller
        self._layout = layout
        self._page_size = layout.page_size
        self._threshold = settings.load_back_threshold
        self._slots = slots
        self._accounting = accounting
        self._device_room = device_room
        self._transfers = transfers
        self._events = events
        self._report = report

    def load_back(self, node: LayoutTreeNode[MetadataT], mem_quota: int | None = None) -> torch.Tensor | None:
        """Bring `node` and its evicted ancestors back to the device; all of them or none.

        Returns their slots, int64, shape ``[tokens]``, on the pool's device, with the copy queued until
        `ready_to_load_host_cache`, or None, with every lock as before, if the hit is below the threshold, above
        `mem_quota` (logical tokens that the caller may use), finds no room, or was deleted after the caller's match.
        Raises `LayoutInvariantError`, with nothing changed, if no ancestor is on the device.
        """
        nodes, above = _evicted_path(node)
        if not nodes or any(evicted.metadata is None for evicted in nodes):
            return None
        host_hit_length = sum(evicted.host_len for evicted in nodes)
        locked = self._accounting.lock(above)
        over_quota = mem_quota is not None and host_hit_length > mem_quota + locked
        if host_hit_length < self._threshold or over_quota:
            self._accounting.unlock(above)
            return None
        slot_pages = self._load(nodes, node.id)
        self._accounting.unlock(above)
        if slot_pages is None:
            return None
        value = self._give_slots(nodes, slot_pages)
        self._transfers.begin_load(node, above)
        return value

    def _load(self, nodes: Sequence[LayoutTreeNode[MetadataT]], load_id: int) -> PageArray | None:
        """Allocate and queue, evicting if a lane is short. They stay held on the host if, and only if, it works."""
        parts = [_metadata_of(node) for node in nodes]
        self._accounting.host_copies.hold(nodes[-1])
        slot_pages = self._controller.load(parts, node_id=load_id)
        if slot_pages is None:
            self._device_room.make(self._layout.load_lanes(parts))
            slot_pages = self._controller.load(parts, node_id=load_id)
        if slot_pages is None:
            logger.warning(
                "load_back: no room for %d tokens of node %d even after eviction; recomputing (%d tokens evictable)",
                sum(part.logical_len for part in parts),
                load_id,
                self._accounting.evictable_tokens,
            )
            self._report.stats.refused_loads += 1
            self._accounting.host_copies.release(nodes[-1])
        return slot_pages

    def _give_slots(self, nodes: Sequence[LayoutTreeNode[MetadataT]], slot_pages: PageArray) -> torch.Tensor:
        value = self._slots.slots(slot_pages)
        size, page = self._page_size, 0
        for node in nodes:
            end = page + node.tokens // size
            own = slot_pages[page:end].copy()
            self._accounting.put_on_device(node, value[page * size : end * size].clone(), own)
            self._events.record_store(node, medium=StorageMedium.GPU)
            page = end
        return value


def _evicted_path(
    node: LayoutTreeNode[MetadataT],
) -> tuple[list[LayoutTreeNode[MetadataT]], LayoutTreeNode[MetadataT]]:
    """The nodes from below the first one on the device down to `node`, in that order, and that first one."""
    nodes: list[LayoutTreeNode[MetadataT]] = []
    above = node
    while above.value is None:
        nodes.insert(0, above)
        if above.parent is None:
            raise LayoutInvariantError(f"node {node.id} has no ancestor on the device")
        above = above.parent
    return nodes, above


def _metadata_of(node: LayoutTreeNode[MetadataT]) -> MetadataT:
    if node.metadata is None:
        raise LayoutInvariantError(f"node {node.id} has left the device without a host copy")
    return node.metadata
