"""`TieredRadixTree`: nodes move down. Backup to the host, eviction from the device, deletion from the host.

    hits reach the threshold ──▶ backup into free host pages, locked until the ack
    device slots are needed  ──▶ leaf leaves the device (host copy kept, or made first, or the leaf is deleted)
    host pages are needed    ──▶ a mirror (the host copy of a node on the device) is given up, then a host-only leaf

While the host has room, a hit is backed up early and leaves the device at once. When it is full, no copy is displaced
for a node that stays on the device anyway: the node is backed up on its way out.

Room is made by shortfall, in the order of SGLang's eviction strategies, until every *lane* that is short has it.
Each decision is computed from mirrored state, so all ranks take it alike without asking.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Generic

import numpy as np
from sglang.srt.disaggregation.kv_events import StorageMedium
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, EvictResult

from sglang.srt.mem_cache.layouts.errors import LayoutInvariantError
from sglang.srt.mem_cache.layouts.pages import NO_PAGES
from sglang.srt.mem_cache.layouts.protocol import MetadataT

from ..controller import HiCacheController, HostShortfall
from ..slots.page_runs import pages_by_lane
from .accounting import parent_of
from .radix_tree import LayoutRadixTree

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang.srt.managers.cache_controller import HiCacheAck

    from sglang.srt.mem_cache.layouts.pages import LaneArray, PageArray

    from ..agreement import Agreement
    from ..settings import HiCacheSettings
    from ..slots.allocator import SlotAllocator
    from .in_flight import InFlight
    from .node import LayoutTreeNode
    from .stats import CacheStats


class TieredRadixTree(LayoutRadixTree[MetadataT], Generic[MetadataT]):
    """A radix tree that backs nodes up and evicts them. Its parts are made by `radix_cache.HiRadixCache`."""

    settings: HiCacheSettings
    slots: SlotAllocator
    cache_controller: HiCacheController[MetadataT]
    in_flight: InFlight[MetadataT]
    agreement: Agreement
    stats: CacheStats

    # Backup.

    def _on_hit(self, node: LayoutTreeNode[MetadataT]) -> None:
        super()._on_hit(node)
        if self.settings.write_policy != "write_back" and not node.backuped and self._earns_a_copy(node):
            self.write_backup(node)

    def write_backup(self, node: LayoutTreeNode[MetadataT], write_back: bool = False) -> int:
        """Copy a node to the host. Returns its logical tokens, 0 if that is put off or refused, with nothing changed.

        Into free host pages and below a parent that is backed up, so that host copies form prefixes; the node is
        locked until the ack. With `write_back` the node is about to leave the device: see `_back_up_leaving`. Raises
        `LayoutInvariantError` if ledger, metadata and node contradict each other.
        """
        if write_back:
            return node.tokens if self._back_up_leaving(node) else 0
        if not parent_of(node).backuped:
            return 0
        outcome = self.cache_controller.write(node.slot_pages, node_id=node.id)
        if isinstance(outcome, HostShortfall):
            return 0
        self._begin_backup(node, outcome, locked=True)
        self.inc_lock_ref(node)
        return node.tokens

    def _back_up_leaving(self, leaf: LayoutTreeNode[MetadataT]) -> bool:
        """Copy a leaf that is about to leave the device, making room there if needed; False, unchanged, if refused.

        Except under write_back, host copies form prefixes: what has none above it is copied too. The slots of all
        these nodes are read until the acks are settled.
        """
        nodes = [leaf]
        while self.settings.write_policy != "write_back" and not parent_of(nodes[-1]).backuped:
            nodes.append(parent_of(nodes[-1]))
        nodes.reverse()
        plans = [self.layout.plan_backup(node.slot_pages) for node in nodes]
        demand = [sum(pages) for pages in zip(*(plan.demand_pages for plan in plans), strict=True)]
        if not self._make_host_room(demand, below=parent_of(nodes[0])):
            self.stats.refused_backups += 1
            return False
        for node, plan in zip(nodes, plans, strict=True):
            outcome = self.cache_controller.write_plan(plan, node_id=node.id)
            if isinstance(outcome, HostShortfall):
                raise LayoutInvariantError(
                    f"room was made for {plan.demand_pages} pages, yet {outcome.missing_pages} are missing"
                )
            self._begin_backup(node, outcome, locked=False)
        self.stats.late_backups += len(nodes)
        return True

    def _begin_backup(self, node: LayoutTreeNode[MetadataT], metadata: MetadataT, *, locked: bool) -> None:
        if metadata.logical_len != node.tokens:
            raise LayoutInvariantError(f"metadata of {metadata.logical_len} tokens for node {node.id} of {node.tokens}")
        self.host_room.hold(node)
        node.set_metadata(metadata)
        self._refresh_path(node)
        self.in_flight.begin_backup(node, locked=locked)

    def _earns_a_copy(self, node: LayoutTreeNode[MetadataT]) -> bool:
        return self.settings.write_policy == "write_back" or node.hit_count >= self.settings.write_through_threshold

    def _after_split(self, upper: LayoutTreeNode[MetadataT], child: LayoutTreeNode[MetadataT]) -> None:
        self.in_flight.split(upper, child)

    def writing_check(self, write_back: bool = False) -> None:
        """Settle finished backups; with `write_back`, wait for all of them first, without a reduction."""
        queue = self.cache_controller.ack_write_queue
        if write_back:
            self._settle_writes(len(queue))
        else:
            self._settle_writes(self.agreement.minimum([ready_acks(queue)])[0])

    def _settle_writes(self, count: int) -> None:
        for _ in range(count):
            ack = self.cache_controller.ack_write_queue.pop(0)
            ack.finish_event.synchronize()
            self.stats.backups += len(ack.node_ids)
            self.stats.backed_up_tokens += ack.num_tokens
            self.stats.backed_up_bytes += ack.num_bytes
            self.stats.zero_owned_backups += ack.num_bytes == 0
            for backup_id in ack.node_ids:
                backup = self.in_flight.end_backup(backup_id)
                for part in backup.parts:
                    self.kv_events.record_store(part, medium=StorageMedium.CPU)
                self.host_room.release(backup.node)
                if backup.locked:
                    self._lock(backup.node, -1)
            if self.metrics_collector is not None:
                self._report_write(ack)

    def _report_write(self, ack: HiCacheAck) -> None:
        if self.metrics_collector is None:
            return
        for pool, tokens in (ack.num_tokens_by_pool or {}).items():
            self.metrics_collector.increment_backup_num_tokens(num_tokens=tokens, pool=pool)
        self.metrics_collector.increment_backup_num_bytes(ack.num_bytes)
        if ack.timing_enabled:
            self.metrics_collector.observe_backup_duration(ack_seconds(ack))

    def _report_dropped(self, tokens: int) -> None:
        """A leaf was deleted under write_back because the host had no room for it."""
        if self.settings.write_policy != "write_back":
            return
        self.stats.dropped_tokens += tokens
        if self.metrics_collector is not None:
            self.metrics_collector.increment_dropped_tokens(num_tokens=tokens, reason="host_pressure", pool="kv")

    # Host eviction.

    def _make_host_room(self, demand_pages: Sequence[int], *, below: LayoutTreeNode[MetadataT]) -> bool:
        """Give up host copies until every lane has room for `demand_pages`; False, with none gone, if that cannot be.

        Not those of `below` and above it, under which the pages will lie. Progress is physical room in each lane,
        whatever the logical length of the nodes that go.
        """
        if self.cache_controller.ledger.admits(demand_pages):
            return True
        self.host_room.hold(below)
        made = self._give_up_copies(demand_pages)
        self.host_room.release(below)
        return made

    def _give_up_copies(self, demand_pages: Sequence[int]) -> bool:
        ledger = self.cache_controller.ledger
        if not self.host_room.can_make(ledger.missing_pages(demand_pages)):
            return False
        while not ledger.admits(demand_pages):
            node = self.host_room.pop_first(ledger.missing_pages(demand_pages))
            if node is None:
                return False
            if node.value is None:
                self._delete_host_leaf(node)
            else:
                self._drop_host_copy(node)
                self._refresh(parent_of(node))
        return True

    def evict_host(self, num_tokens: int) -> int:
        """Delete host-only leaves of at least `num_tokens` logical tokens. Returns the tokens deleted."""
        deleted = 0
        while deleted < num_tokens and (node := self.host_order.pop_first()) is not None:
            deleted += self._delete_host_leaf(node)
        return deleted

    def _delete_host_leaf(self, node: LayoutTreeNode[MetadataT]) -> int:
        tokens = self._drop_host_copy(node)
        self._unlink(node)
        return tokens

    def _drop_host_copy(self, node: LayoutTreeNode[MetadataT]) -> int:
        if node.metadata is None:
            raise LayoutInvariantError(f"node {node.id} has no host copy to drop")
        self.kv_events.record_remove(node, medium=StorageMedium.CPU)
        self.host_room.dropped(node)
        tokens = self.cache_controller.release_host(node.metadata)
        self.stats.evicted_host_tokens += tokens
        node.clear_metadata()
        self._refresh(node)
        return tokens

    # Device eviction.

    def evict(self, params: EvictParams) -> EvictResult:
        """Free at least `num_tokens` slots from unlocked leaves, or all that can be freed.

        Leaves with a host copy keep it. Others are backed up first if they have the hits for it, or deleted.
        """
        target = params.num_tokens
        return EvictResult(num_tokens_evicted=self._evict(lambda tokens, _: tokens >= target))

    def alloc_slots(self, lanes: LaneArray) -> PageArray | None:
        """Logical pages in the lanes asked for, evicting until each lane has room, or None if it cannot be made."""
        self.make_device_room(lanes)
        return self.slots.alloc_lanes(lanes)

    def make_device_room(self, lanes: LaneArray) -> None:
        """Evict until each lane has room for `lanes`; what was evicted stays so if it cannot be made.

        If one lane is beyond help while all lanes together could serve, nothing is evicted: it would be in vain.
        """
        short = pages_by_lane(lanes, self.slots.lane_count) - self.slots.room_pages()
        if short.max() <= 0:
            return
        in_vain = bool((short > self.evictable_lane_pages).any())
        if in_vain and int(short.sum()) <= int(self.evictable_lane_pages.sum()):
            return
        self._evict(lambda _, freed: not np.count_nonzero(freed < short))

    def _evict(self, enough: Callable[[int, PageArray], bool]) -> int:
        """Evict in order until ``enough(logical tokens, pages freed in each lane)``; returns the tokens."""
        started = time.perf_counter()
        tokens, freed = 0, np.zeros(self.slots.lane_count, dtype=np.int64)
        staged: list[PageArray] = []  # slots of nodes that have left, while they are read
        kept: list[LayoutTreeNode[MetadataT]] = []
        while not enough(tokens, freed) and (node := self.device_order.pop_first()) is not None:
            lane_pages = self._lane_pages(node)
            pages = self._evict_node(node, staged)
            if len(pages):
                tokens += len(pages) * self.page_size
                freed += lane_pages
            else:
                kept.append(node)
        self._finish_staged(staged)
        for node in kept:
            self._refresh(node)
        self.stats.evicted_device_tokens += tokens
        self.update_eviction_metrics(tokens, started)
        return tokens

    def _evict_node(self, node: LayoutTreeNode[MetadataT], staged: list[PageArray]) -> PageArray:
        """Evict one leaf. Returns the pages that are free now or will be when `staged` is finished; none if kept."""
        if not node.backuped and self._earns_a_copy(node):
            self.write_backup(node, write_back=True)
        if not node.backuped:
            self._finish_staged(staged)
            return self._drop_subtree(node)
        self.kv_events.record_remove(node, medium=StorageMedium.GPU)
        pages = self._take_off_device(node)
        if self.in_flight.is_copied(node):
            staged.append(pages)
        else:
            self.slots.free_slot_pages(pages)
        return pages

    def _finish_staged(self, staged: list[PageArray]) -> None:
        """Wait for the copies of nodes that have left the device, then free their slots."""
        if not staged:
            return
        self.writing_check(write_back=True)
        for pages in staged:
            self.slots.free_slot_pages(pages)
        staged.clear()

    def _drop_subtree(self, root: LayoutTreeNode[MetadataT]) -> PageArray:
        """Delete a leaf that has no host copy, and host-only nodes below it. Returns its pages, none if kept.

        Kept, with nothing changed, if a node below is held.
        """
        if root.host_ref_counter > 0:
            return NO_PAGES
        below = [root]
        for node in below:
            below.extend(node.children.values())
        for node in reversed(below[1:]):
            self._drop_host_copy(node)
        self.kv_events.record_remove(root)
        pages = self._take_off_device(root)
        self.slots.free_slot_pages(pages)
        self._unlink(root)
        self._report_dropped(len(pages) * self.page_size)
        return pages


def ready_acks(queue: Sequence[HiCacheAck]) -> int:
    """Acks at the head of the queue whose copies have finished on this rank."""
    for ready, ack in enumerate(queue):
        if not ack.finish_event.query():
            return ready
    return len(queue)


def ack_seconds(ack: HiCacheAck) -> float:
    """Time between the events of a finished ack, in seconds."""
    return ack.start_event.elapsed_time(ack.finish_event) / 1000.0
