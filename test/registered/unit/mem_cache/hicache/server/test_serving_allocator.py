"""The server's allocator: eviction by lane, chain bases, and no failure while any lane has room."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import torch
from sglang.test.ci.ci_register import register_cpu_ci

from sglang.srt.mem_cache.hicache.check.invariants import violations
from sglang.srt.mem_cache.hicache.server.allocator import ServingSlotAllocator
from support.caches import CacheSpec, CacheTestCase, chain, make_device_pool, make_layout
from support.groups import Group

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang.srt.mem_cache.layouts.pages import LaneArray

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

PAGE = 4
RANKS = 3
ROW_PAGES = 8


def make(rank: int = 0) -> ServingSlotAllocator:
    """The allocator of one rank of three, with 24 logical pages."""
    spec = CacheSpec(ranks=RANKS, device_pages=ROW_PAGES)
    return ServingSlotAllocator(
        layout=make_layout(spec, rank),
        physical_size=ROW_PAGES * PAGE,
        dtype=torch.bfloat16,
        device="cpu",
        kvcache=make_device_pool(spec),
    )


def extend(
    allocator: ServingSlotAllocator, firsts: Sequence[int], ends: Sequence[int], lasts: Sequence[int]
) -> torch.Tensor | None:
    """Slots for the tokens ``firsts[i] .. ends[i]`` of each request, whose last slot so far is ``lasts[i]``."""
    prefix, total, last = (torch.tensor(list(numbers), dtype=torch.int64) for numbers in (firsts, ends, lasts))
    return allocator.alloc_extend(prefix, prefix, total, total, last, sum(ends) - sum(firsts))


def lanes_of(slots: torch.Tensor | None) -> list[int]:
    """Lane of each page of whole-page slots."""
    assert slots is not None
    return (slots[::PAGE] // PAGE % RANKS).tolist()


class TestServingAllocator(CacheTestCase):
    def test_a_chain_starts_in_the_lane_of_its_base_and_rotates(self) -> None:
        allocator = make()
        for base in range(RANKS):
            with allocator.chain_bases([base]):
                slots = extend(allocator, [0], [5 * PAGE], [-1])
            self.assertEqual(lanes_of(slots), [(base + page) % RANKS for page in range(5)])

    def test_a_chain_goes_on_where_its_position_says_and_fills_the_begun_page_first(self) -> None:
        allocator = make()
        with allocator.chain_bases([1]):
            begun = extend(allocator, [0], [PAGE + 2], [-1])
            assert begun is not None
            rest = extend(allocator, [PAGE + 2], [4 * PAGE], [int(begun[-1])])
        assert rest is not None
        self.assertEqual(rest[:2].tolist(), [int(begun[-1]) + 1, int(begun[-1]) + 2])
        self.assertEqual(lanes_of(torch.cat([begun, rest])), [1, 2, 0, 1])

    def test_a_short_lane_is_evicted_for_before_another_one_is_taken(self) -> None:
        allocator = make()
        held = allocator.alloc_lanes(np.zeros(ROW_PAGES, dtype=np.int16))
        assert held is not None
        asked: list[list[int]] = []

        def make_room(lanes: LaneArray) -> None:
            asked.append(lanes.tolist())
            allocator.free_slot_pages(held[:1])

        allocator.serve(make_room, None)
        with allocator.chain_bases([0]):
            self.assertEqual(lanes_of(extend(allocator, [0], [2 * PAGE], [-1])), [0, 1])
        self.assertEqual(asked, [[0, 1]])
        self.assertEqual(allocator.off_lane_pages, 0)

    def test_no_request_fails_while_all_lanes_together_have_room(self) -> None:
        rng = random.Random(3)
        for _ in range(200):
            allocator = make()
            allocator.alloc_lanes(np.array([rng.choice((0, 0, 0, 1)) for _ in range(rng.randrange(9))], dtype=np.int16))
            allocator.serve(lambda _lanes: None, None)
            free = allocator.available_size() // PAGE
            pages = rng.randrange(1, free + 1)
            with allocator.chain_bases([rng.randrange(RANKS)]):
                slots = extend(allocator, [0], [pages * PAGE], [-1])
            assert slots is not None
            self.assertEqual(len(set(slots.tolist())), pages * PAGE)
            self.assertEqual(allocator.available_size() // PAGE, free - pages)
            with allocator.chain_bases([0]):
                self.assertIsNone(extend(allocator, [0], [(free - pages + 1) * PAGE], [-1]))
            self.assertEqual(allocator.available_size() // PAGE, free - pages)

    def test_every_rank_falls_back_to_the_same_pages(self) -> None:
        found = []
        for rank in range(RANKS):
            allocator = make(rank)
            allocator.alloc_lanes(np.array([0] * 8 + [1] * 7 + [2] * 2, dtype=np.int16))
            with allocator.chain_bases([0, 1]):
                slots = extend(allocator, [0, 0], [3 * PAGE, 2 * PAGE], [-1, -1])
            assert slots is not None
            found.append(slots.tolist())
            self.assertGreater(allocator.off_lane_pages, 0)
        self.assertEqual(found[0], found[1])
        self.assertEqual(found[0], found[2])

    def test_a_lane_that_has_room_keeps_its_pages_in_a_fallback(self) -> None:
        allocator = make()
        allocator.alloc_lanes(np.zeros(ROW_PAGES, dtype=np.int16))
        with allocator.chain_bases([0]):
            lanes = lanes_of(extend(allocator, [0], [4 * PAGE], [-1]))
        self.assertEqual(lanes[1:3], [1, 2])
        self.assertNotIn(0, lanes)


class TestRoomByLane(CacheTestCase):
    def test_eviction_goes_on_until_the_short_lane_has_room(self) -> None:
        group = Group(CacheSpec())
        for number in range(8):
            group.serve(chain(group.spec, *range(10 * number, 10 * number + 3)))
        self.assertEqual(group.each(lambda rank: rank.allocator.available_size()), [0] * 3)
        demand = np.array([1] * 3, dtype=np.int16)
        group.each(lambda rank: rank.cache.make_device_room(demand))
        for rank in group.ranks:
            self.assertGreaterEqual(int(rank.allocator.room_pages()[1]), 3)
            self.assertGreater(rank.cache.evictable_size(), 0)
            self.assertEqual(violations(rank.cache), [])

    def test_nothing_is_evicted_for_a_lane_that_is_beyond_help(self) -> None:
        group = Group(CacheSpec())
        # A request holds all of lane 0 but one page; the cache has pages in every lane.
        held = group.each(lambda rank: rank.allocator.alloc_lanes(np.zeros(7, dtype=np.int16)))
        group.serve(chain(group.spec, 1, 2, 3))
        before = group.each(lambda rank: rank.cache.evictable_size())
        group.each(lambda rank: rank.cache.make_device_room(np.zeros(2, dtype=np.int16)))
        self.assertEqual(group.each(lambda rank: rank.cache.evictable_size()), before)
        group.each(lambda rank: rank.cache.make_device_room(np.zeros(1, dtype=np.int16)))
        self.assertEqual(group.each(lambda rank: int(rank.allocator.room_pages()[0])), [1] * 3)
        for rank, pages in zip(group.ranks, held, strict=True):
            assert pages is not None
            self.assertEqual(violations(rank.cache, held_slot_pages=len(pages)), [])
