"""The parts of the tree decide the same without a pool: a token a page, slots and host pages that are only counted."""

from __future__ import annotations

import random
import unittest
from array import array
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Generic

import numpy as np
import torch
from sglang.srt.managers.cache_controller import HiCacheAck
from sglang.srt.mem_cache.events import KVCacheEventRecorder
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_eviction_strategy
from sglang.test.ci.ci_register import register_cpu_ci

from sglang.srt.mem_cache.hicache.agreement import RankAgreement
from sglang.srt.mem_cache.hicache.host.ledger import HostLedger, HostShortfall
from sglang.srt.mem_cache.hicache.tree.calls import Insertion
from sglang.srt.mem_cache.hicache.tree.parts import build_tree_parts
from sglang.srt.mem_cache.hicache.tree.report import TrafficReport
from sglang.srt.mem_cache.layouts import LayoutConfig, create_layout
from sglang.srt.mem_cache.layouts.protocol import KVLayoutStrategy, MetadataT
from support.caches import CacheSpec, CacheTestCase, chain, make_settings
from support.groups import Group

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang.srt.mem_cache.hicache.accepted import WritePolicy
    from sglang.srt.mem_cache.layouts.pages import LaneArray, PageArray
    from sglang.srt.mem_cache.layouts.plans import BackupPlan

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

AT_ONCE: Any = SimpleNamespace(query=lambda: True, synchronize=lambda: None)  # the events of copies that take no time


class CountingSlots:
    """Slots of pages of one token, of which only the free number in each lane is kept."""

    def __init__(self, lane_count: int, pages: int) -> None:
        self.lane_count = lane_count
        self._room = np.full(lane_count, pages, dtype=np.int64)
        self._next = 1  # as elsewhere, the first page of each lane is never handed out

    def room_pages(self) -> PageArray:
        return self._room.copy()

    def alloc_lanes(self, lanes: LaneArray) -> PageArray | None:
        left = self._room - np.bincount(lanes, minlength=self.lane_count)
        if left.min() < 0:
            return None
        self._room = left
        self._next += len(lanes)
        return lanes + self.lane_count * np.arange(
            self._next - len(lanes), self._next
        )  # a page's lane is its remainder

    def free_slot_pages(self, slot_pages: PageArray) -> None:
        self._room += np.bincount(slot_pages % self.lane_count, minlength=self.lane_count)

    def slots(self, slot_pages: PageArray) -> torch.Tensor:
        return torch.from_numpy(slot_pages)


class CountingController(Generic[MetadataT]):
    """Host memory of which only the ledger is kept. Copies end when they begin."""

    def __init__(self, layout: KVLayoutStrategy[MetadataT], slots: CountingSlots, ledger: HostLedger) -> None:
        self.ledger = ledger
        self.ack_write_queue: list[HiCacheAck] = []
        self.ack_load_queue: list[HiCacheAck] = []
        self._layout = layout
        self._slots = slots

    def write(self, slot_pages: PageArray, *, node_id: int) -> MetadataT | HostShortfall:
        return self.write_plan(self._layout.plan_backup(slot_pages), node_id=node_id)

    def write_plan(self, plan: BackupPlan, *, node_id: int) -> MetadataT | HostShortfall:
        if not self.ledger.admits(plan.demand_pages):
            return HostShortfall(plan=plan, missing_pages=self.ledger.missing_pages(plan.demand_pages))
        self.ledger.take(plan.demand_pages)
        self.ack_write_queue.append(HiCacheAck(AT_ONCE, AT_ONCE, [node_id], plan.logical_tokens))
        return self._layout.finish_backup(plan, np.arange(plan.owned_pages))

    def load(self, parts: Sequence[MetadataT], *, node_id: int) -> PageArray | None:
        pages = self._slots.alloc_lanes(self._layout.load_lanes(parts))
        if pages is not None:
            self.ack_load_queue.append(HiCacheAck(AT_ONCE, AT_ONCE, [node_id], len(pages)))
        return pages

    def release_host(self, metadata: MetadataT) -> int:
        self.ledger.give(metadata.pages_per_rank)
        return metadata.logical_len


class Counted:
    """The tree of rank 0 of `spec`, a token a page, and requests one at a time."""

    def __init__(self, spec: CacheSpec) -> None:
        self.layout = create_layout(LayoutConfig(name=spec.layout, page_size=1, shard_size=spec.ranks, shard_rank=0))
        self.slots = CountingSlots(self.layout.lane_count, spec.device_pages)
        self.ledger = HostLedger(lane_count=self.layout.lane_count, capacity_pages=spec.host_pages)
        self.report = TrafficReport()
        self.parts = build_tree_parts(
            layout=self.layout,
            settings=make_settings(spec, load_back_threshold=spec.load_back_pages),
            slots=self.slots,
            controller=CountingController(self.layout, self.slots, self.ledger),
            agreement=RankAgreement([]),
            priority=get_eviction_strategy(spec.eviction).get_priority,
            events=KVCacheEventRecorder(enabled=False, page_size=1),
            report=self.report,
            device=torch.device("cpu"),
        )

    def serve(self, pages: Sequence[int], base: int) -> tuple[int, int] | None:
        """Pages found on the device and on the host, or None if the rest finds no room."""
        parts, tokens = self.parts, array("q", pages)
        match = parts.tree.match(RadixKey(tokens))
        found, node, loaded = len(match.slots), match.device_node, None
        if match.host_tokens:
            loaded = parts.load_backs.load_back(match.host_node)
            node = node if loaded is None else match.host_node
        cached = found + (0 if loaded is None else len(loaded))
        parts.accounting.lock(node)
        own = parts.device_room.alloc(self.layout.extend_lanes(base, cached, len(pages) - cached))
        if own is not None:
            above, at = [own], node
            while at.parent is not None:
                above.insert(0, at.slot_pages)
                at = at.parent
            slots = np.concatenate(above)
            insertion = Insertion(key=RadixKey(tokens), value=self.slots.slots(slots), slot_pages=slots)
            known = parts.insert(insertion).known_tokens
            self.slots.free_slot_pages(slots[cached:known])
        parts.accounting.unlock(node)
        parts.transfers.settle()
        return None if own is None else (found, cached - found)


class TestPartsThatOnlyCount(CacheTestCase):
    def test_they_find_back_up_load_and_evict_the_same_pages_as_the_real_cache(self) -> None:
        policies: tuple[WritePolicy, ...] = ("write_through", "write_through_selective", "write_back")
        for policy in policies:
            for layout in ("identity", "cp_shared"):
                with self.subTest(policy=policy, layout=layout):
                    self._compare(CacheSpec(layout=layout, policy=policy, host_pages=6))

    def _compare(self, spec: CacheSpec) -> None:
        group, counted, rng = Group(spec), Counted(spec), random.Random(7)
        rank, size = group.ranks[0], spec.page_size
        found_on_host = 0
        for _ in range(120):
            pages = [rng.randrange(3) + 10 * place for place in range(rng.randrange(1, 8))]
            tokens = chain(spec, *pages)
            real = group.start(tokens)
            if real is not None:
                group.finish(real)
            group.settle()
            expected = None if real is None else (real.device_pages, real.host_pages)
            base = rank.layout.chain_base(tokens[:size].tobytes(), "")
            self.assertEqual(counted.serve(pages, base), expected)
            self.assertEqual(counted.slots.room_pages().tolist(), rank.allocator.room_pages().tolist())
            self.assertEqual(counted.ledger.free_pages, rank.controller.ledger.free_pages)
            found_on_host += 0 if real is None else real.host_pages
        theirs, ours = rank.cache.stats, counted.report.stats
        for name in ("backups", "loads", "refused_backups", "refused_loads"):
            self.assertEqual(getattr(ours, name), getattr(theirs, name), name)
        for name in ("backed_up_tokens", "loaded_tokens", "evicted_device_tokens", "evicted_host_tokens"):
            self.assertEqual(getattr(ours, name) * size, getattr(theirs, name), name)
        self.assertGreater(found_on_host, 0)
        self.assertGreater(theirs.evicted_host_tokens, 0)


if __name__ == "__main__":
    unittest.main()
