"""`TreeParts`: the tree of two tiers, put together from what its owner hands over.

Each part knows those above it in this picture, and none below::

    accounting   in_flight   report
    tree                              structure; tells accounting and in_flight
    transfers    host_room            until acks are settled; who leaves the host
    backups, copies_ahead             device to host
    device_room                       who leaves the device
    load_backs                        host to device
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic

from sglang.srt.mem_cache.layouts.protocol import KVLayoutStrategy, MetadataT

from .accounting import Accounting
from .acks import Transfers
from .backups import Backups
from .copies_ahead import CopiesAhead
from .device_room import DeviceRoom
from .host_room import HostRoom
from .in_flight import InFlight
from .load_backs import LoadBacks
from .radix_tree import LayoutRadixTree

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from sglang.srt.mem_cache.events import KVCacheEventRecorder

    from ..agreement import Agreement
    from ..settings import HiCacheSettings
    from ..slots.allocator import SlotAllocator
    from .calls import Inserted, Insertion
    from .node import LayoutTreeNode
    from .protocols import CopyController
    from .report import TrafficReport


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TreeParts(Generic[MetadataT]):
    """What `radix_cache.HiRadixCache` has; enough to run every decision of the cache without it."""

    events: KVCacheEventRecorder
    report: TrafficReport
    accounting: Accounting[MetadataT]
    in_flight: InFlight[MetadataT]
    tree: LayoutRadixTree[MetadataT]
    transfers: Transfers[MetadataT]
    host_room: HostRoom[MetadataT]
    backups: Backups[MetadataT]
    device_room: DeviceRoom[MetadataT]
    load_backs: LoadBacks[MetadataT]

    def insert(self, insertion: Insertion) -> Inserted[MetadataT]:
        """`LayoutRadixTree.insert`, in which nodes that are used often enough are backed up."""
        return self.tree.insert(insertion, self.backups.use)


def build_tree_parts(
    *,
    layout: KVLayoutStrategy[MetadataT],
    settings: HiCacheSettings,
    slots: SlotAllocator,
    controller: CopyController[MetadataT],
    agreement: Agreement,
    priority: Callable[[LayoutTreeNode[MetadataT]], Any],
    events: KVCacheEventRecorder,
    report: TrafficReport,
    device: torch.device,
    bigrams: bool = False,
) -> TreeParts[MetadataT]:
    """An empty tree over `slots` with a host tier behind `controller`.

    `priority` is that of SGLang's eviction strategies. No pool is needed: slots, controller and agreement may be ones
    that only count.
    """
    in_flight: InFlight[MetadataT] = InFlight()
    accounting = Accounting(layout, priority)
    tree = LayoutRadixTree(
        page_size=layout.page_size,
        accounting=accounting,
        in_flight=in_flight,
        events=events,
        device=device,
        bigrams=bigrams,
    )
    transfers = Transfers(
        controller, agreement=agreement, accounting=accounting, in_flight=in_flight, events=events, report=report
    )
    host_room = HostRoom(controller, tree=tree, accounting=accounting, events=events, report=report)
    backups = Backups(
        controller,
        layout=layout,
        settings=settings,
        accounting=accounting,
        host_room=host_room,
        transfers=transfers,
        report=report,
    )
    copies_ahead = CopiesAhead(
        settings=settings,
        device_pages=int(slots.room_pages().sum()),
        host_pages=sum(controller.ledger.free_pages),
        page_size=layout.page_size,
        accounting=accounting,
        backups=backups,
    )
    device_room = DeviceRoom(
        slots,
        settings=settings,
        tree=tree,
        accounting=accounting,
        backups=backups,
        copies_ahead=copies_ahead,
        host_room=host_room,
        transfers=transfers,
        events=events,
        report=report,
    )
    load_backs = LoadBacks(
        controller,
        layout=layout,
        settings=settings,
        slots=slots,
        accounting=accounting,
        device_room=device_room,
        transfers=transfers,
        events=events,
        report=report,
    )
    return TreeParts(
        events=events,
        report=report,
        accounting=accounting,
        in_flight=in_flight,
        tree=tree,
        transfers=transfers,
        host_room=host_room,
        backups=backups,
        device_room=device_room,
        load_backs=load_backs,
    )
