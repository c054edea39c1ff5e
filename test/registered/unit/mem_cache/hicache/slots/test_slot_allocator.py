from __future__ import annotations

import random
import unittest
from typing import TYPE_CHECKING

import numpy as np
import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.paged import alloc_extend_naive
from sglang.test.ci.ci_register import register_cpu_ci

from sglang.srt.mem_cache.hicache.slots.allocator import (
    LaneSlotAllocator,
    StockSlotAllocator,
    slot_allocator,
)
from sglang.srt.mem_cache.layouts import LayoutConfigError, LayoutInvariantError
from support.caches import CacheSpec, CacheTestCase, make_allocator, make_device_pool, make_layout
from support.groups import Group

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sglang.srt.mem_cache.layouts.pages import LaneArray

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

PAGE = 4
_SPECS = (CacheSpec(ranks=1), CacheSpec(ranks=3), CacheSpec(ranks=5), CacheSpec(layout="identity"))


class TestPagesByLane(CacheTestCase):
    def test_every_rank_hands_out_the_logical_slots_of_all_and_never_a_reserved_one(self) -> None:
        for spec in _SPECS:
            allocator = _make_allocator(spec)
            self.assertEqual(allocator.size, 8 * PAGE * spec.lanes)
            self.assertEqual(allocator.physical_size, 8 * PAGE)
            slots = allocator.alloc(allocator.size)
            assert slots is not None
            self.assertEqual(sorted(slots.tolist()), list(range(spec.lanes * PAGE, 9 * PAGE * spec.lanes)))
            self.assertEqual(allocator.available_size(), 0)
            self.assertIsNone(allocator.alloc(PAGE))

    def test_pages_come_in_the_lanes_asked_for_in_that_order(self) -> None:
        rng = random.Random(0)
        for spec in _SPECS:
            allocator = _make_allocator(spec)
            held: list[int] = []
            for _ in range(200):
                lanes = _lanes(rng.randrange(spec.lanes) for _ in range(rng.randrange(9)))
                room = allocator.room_pages()
                pages = allocator.alloc_lanes(lanes)
                enough = bool((np.bincount(lanes, minlength=spec.lanes) <= room).all())
                self.assertEqual(pages is not None, enough)
                if pages is None:
                    self.assertEqual(allocator.room_pages().tolist(), room.tolist())
                    rng.shuffle(held)
                    cut = len(held) // 2
                    allocator.free_slot_pages(np.array(held[:cut], dtype=np.int64))
                    held = held[cut:]
                    continue
                self.assertEqual((pages % spec.lanes).tolist(), lanes.tolist())
                held += pages.tolist()
                self.assertEqual(len(set(held)), len(held))
                self.assertEqual(allocator.available_size(), allocator.size - len(held) * PAGE)
            free = allocator.get_all_free_pages().tolist()
            self.assertEqual(sorted(free + held), list(range(spec.lanes, 9 * spec.lanes)))

    def test_one_short_lane_refuses_the_whole_demand(self) -> None:
        allocator = _make_allocator(CacheSpec(ranks=3))
        self.assertIsNone(allocator.alloc_lanes(_lanes([0, 2] + [1] * 9)))
        self.assertEqual(allocator.room_pages().tolist(), [8, 8, 8])
        self.assertIsNotNone(allocator.alloc_lanes(_lanes([1] * 8)))

    def test_a_lane_outside_the_group_is_a_loud_error(self) -> None:
        allocator = _make_allocator(CacheSpec(ranks=3))
        cache = Group(CacheSpec(ranks=3)).ranks[0].cache
        for lane in (3, -1):
            for allocate in (allocator.alloc_lanes, cache.alloc_slots):
                with self.assertRaisesRegex(LayoutInvariantError, rf"lanes must lie in \[0, 2\], got \[\s*{lane}\]"):
                    allocate(_lanes([lane]))

    def test_a_page_given_twice_in_one_call_raises_and_frees_nothing(self) -> None:
        allocator = _make_allocator(CacheSpec(ranks=3))
        pages = allocator.alloc_lanes(_lanes([0, 1, 2]))
        assert pages is not None
        room = allocator.room_pages().tolist()
        with self.assertRaisesRegex(LayoutInvariantError, "one of them twice"):
            allocator.free_slot_pages(pages[[0, 1, 1]])
        self.assertEqual(allocator.room_pages().tolist(), room)
        allocator.free_slot_pages(pages)

    def test_freeing_twice_raises_and_frees_nothing(self) -> None:
        allocator = _make_allocator(CacheSpec(ranks=3))
        pages = allocator.alloc_lanes(_lanes([0, 1, 2]))
        assert pages is not None
        allocator.free_slot_pages(pages[1:2])
        room = allocator.room_pages().tolist()
        with self.assertRaisesRegex(LayoutInvariantError, r"slot pages \[4\] are freed but not in use"):
            allocator.free_slot_pages(pages)
        self.assertEqual(allocator.room_pages().tolist(), room)
        with self.assertRaises(LayoutInvariantError):
            allocator.free_slot_pages(np.array([0], dtype=np.int64))  # reserved, never in use

    def test_freeing_any_slot_of_a_page_frees_the_page_once(self) -> None:
        allocator = _make_allocator(CacheSpec(ranks=3))
        slots = allocator.alloc(3 * PAGE)
        assert slots is not None
        allocator.free(slots[: PAGE + 1])
        self.assertEqual(allocator.available_size(), allocator.size - PAGE)

    def test_frees_inside_a_group_happen_at_its_end_from_a_copy(self) -> None:
        allocator = _make_allocator(CacheSpec(ranks=3))
        slots = allocator.alloc(2 * PAGE)
        assert slots is not None
        allocator.free_group_begin()
        allocator.free(slots)
        slots.fill_(0)
        self.assertEqual(allocator.available_size(), allocator.size - 2 * PAGE)
        allocator.free_group_end()
        self.assertEqual(allocator.available_size(), allocator.size)

    def test_clear_gives_everything_back_also_what_waits_in_a_group(self) -> None:
        allocator = _make_allocator(CacheSpec(ranks=3))
        fresh = allocator.get_all_free_pages().tolist()
        slots = allocator.alloc(5 * PAGE)
        assert slots is not None
        allocator.free_group_begin()
        allocator.free(slots)
        allocator.clear()
        self.assertEqual(allocator.get_all_free_pages().tolist(), fresh)
        self.assertIsNone(allocator.free_group)

    def test_a_pool_without_a_whole_page_is_refused(self) -> None:
        with self.assertRaisesRegex(LayoutConfigError, "physical_size must be >= 4, got 0"):
            _make_allocator(CacheSpec(device_pages=8), physical_size=0)


class TestExtendAndDecode(CacheTestCase):
    def test_extend_agrees_with_a_token_by_token_oracle(self) -> None:
        for spec in _SPECS:
            rng = random.Random(spec.lanes)
            for _ in range(25):
                _Oracle(spec, rng).run(self, steps=12)

    def test_extend_in_one_lane_hands_out_what_sglangs_own_does(self) -> None:
        rng = random.Random(1)
        for _ in range(100):
            allocator = _make_allocator(CacheSpec(ranks=1, device_pages=16))
            firsts, lasts = [], []
            for _ in range(rng.randrange(1, 4)):
                first = rng.randrange(2 * PAGE)
                whole = allocator.alloc(-(-first // PAGE) * PAGE)
                assert whole is not None
                firsts.append(first)
                lasts.append(int(whole[first - 1]) if first else -1)
            ends = [first + rng.randrange(2 * PAGE) for first in firsts]
            added = sum(ends) - sum(firsts)
            expected = torch.full((added,), -1, dtype=torch.int64)
            prefix, total, last = (torch.tensor(numbers, dtype=torch.int64) for numbers in (firsts, ends, lasts))
            alloc_extend_naive(prefix, total, last, allocator.get_all_free_pages(), expected, PAGE, "cpu")
            slots = allocator.alloc_extend(prefix, prefix, total, total, last, added)
            self.assertEqual(_list(slots), expected.tolist())

    def test_extend_that_does_not_fit_takes_nothing(self) -> None:
        allocator = _make_allocator(CacheSpec(ranks=3))
        self.assertIsNone(_extend(allocator, [0, 0], [PAGE, 24 * PAGE], [-1, -1], [0, 0]))
        self.assertEqual(allocator.available_size(), allocator.size)

    def test_extend_with_a_wrong_total_names_both_numbers(self) -> None:
        allocator = _make_allocator(CacheSpec(ranks=3))
        zero, five = torch.tensor([0]), torch.tensor([5])
        with self.assertRaisesRegex(LayoutConfigError, "extend_num_tokens must be 5, got 4"):
            allocator.alloc_extend(zero, zero, five, five, torch.tensor([-1]), 4)

    def test_without_a_base_a_new_chain_starts_in_the_lane_with_most_room(self) -> None:
        allocator = _make_allocator(CacheSpec(ranks=3))
        allocator.alloc_lanes(_lanes([0, 0, 2]))
        slots = _list(_extend(allocator, [0], [9], [-1], None))
        self.assertEqual([slot // PAGE % 3 for slot in slots[::PAGE]], [1, 2, 0])


class TestStockAllocator(CacheTestCase):
    def test_sglangs_own_allocator_serves_as_one_lane(self) -> None:
        spec = CacheSpec(layout="identity")
        pool = make_device_pool(spec)
        stock = PagedTokenToKVPoolAllocator(8 * PAGE, PAGE, torch.bfloat16, "cpu", pool, need_sort=False)
        slots = slot_allocator(stock)
        self.assertIsInstance(slots, StockSlotAllocator)
        self.assertEqual((slots.lane_count, slots.room_pages().tolist()), (1, [8]))
        pages = slots.alloc_lanes(_lanes([0] * 5))
        assert pages is not None
        self.assertEqual(slots.slots(pages).view(-1, PAGE)[:, 0].tolist(), (pages * PAGE).tolist())
        self.assertIsNone(slots.alloc_lanes(_lanes([0] * 4)))
        self.assertEqual(stock.available_size(), 3 * PAGE)
        slots.free_slot_pages(pages)
        slots.free_slot_pages(pages[:0])
        self.assertEqual(stock.available_size(), 8 * PAGE)

    def test_a_laned_allocator_serves_as_itself(self) -> None:
        allocator = _make_allocator(CacheSpec(ranks=3))
        self.assertIs(slot_allocator(allocator), allocator)


class _Oracle:
    """Requests that grow; each knows, token by token, which slot it must get next."""

    def __init__(self, spec: CacheSpec, rng: random.Random) -> None:
        self.lanes, self.rng = spec.lanes, rng
        self.allocator = _make_allocator(spec)
        self.chains: list[list[int]] = [[] for _ in range(3)]
        self.bases = [rng.randrange(spec.lanes) for _ in self.chains]
        self.free = set(range(spec.lanes, 9 * spec.lanes))

    def run(self, case: CacheTestCase, *, steps: int) -> None:
        for _ in range(steps):
            batch = self.rng.sample(range(3), self.rng.randrange(1, 4))
            decode = self.rng.random() < 0.3
            more = [1 if decode else self.rng.randrange(3 * PAGE) for _ in batch]
            firsts = [len(self.chains[number]) for number in batch]
            ends = [first + count for first, count in zip(firsts, more, strict=True)]
            lasts = [self.chains[number][-1] if self.chains[number] else -1 for number in batch]
            if decode and all(firsts):
                slots = self.allocator.alloc_decode(torch.tensor(ends), torch.tensor(ends), torch.tensor(lasts))
            else:
                bases = [self.bases[n] if not self.chains[n] or self.rng.random() < 0.5 else None for n in batch]
                slots = _extend(self.allocator, firsts, ends, lasts, bases)
            if slots is None:
                case.assertFalse(self._fits(batch, more))
                continue
            case.assertTrue(self._fits(batch, more))
            given = iter(_list(slots))
            for number, count in zip(batch, more, strict=True):
                for _ in range(count):
                    self._place(case, number, next(given))
            case.assertIsNone(next(given, None))
            case.assertEqual(self.allocator.available_size(), len(self.free) * PAGE)

    def _place(self, case: CacheTestCase, number: int, slot: int) -> None:
        own = self.chains[number]
        if len(own) % PAGE:
            case.assertEqual(slot, own[-1] + 1)
        else:
            lane = (self.bases[number] + len(own) // PAGE) % self.lanes
            case.assertEqual((slot % PAGE, slot // PAGE % self.lanes), (0, lane))
            self.free.remove(slot // PAGE)
        own.append(slot)

    def _fits(self, batch: Sequence[int], more: Sequence[int]) -> bool:
        needed = [0] * self.lanes
        for number, count in zip(batch, more, strict=True):
            length = len(self.chains[number])
            for page in range(-(-length // PAGE), -(-(length + count) // PAGE)):
                needed[(self.bases[number] + page) % self.lanes] += 1
        room = [sum(page % self.lanes == lane for page in self.free) for lane in range(self.lanes)]
        return all(want <= have for want, have in zip(needed, room, strict=True))


def _extend(
    allocator: LaneSlotAllocator,
    firsts: Sequence[int],
    ends: Sequence[int],
    lasts: Sequence[int],
    bases: Sequence[int | None] | None,
) -> torch.Tensor | None:
    prefix, total = torch.tensor(firsts), torch.tensor(ends)
    added = sum(ends) - sum(firsts)
    return allocator.alloc_extend(prefix, prefix, total, total, torch.tensor(lasts), added, rotation_bases=bases)


def _list(slots: torch.Tensor | None) -> list[int]:
    assert slots is not None
    assert slots.dtype == torch.int64
    return slots.tolist()


def _lanes(lanes: Iterable[int]) -> LaneArray:
    return np.array(list(lanes), dtype=np.int16)


def _make_allocator(spec: CacheSpec, physical_size: int | None = None) -> LaneSlotAllocator:
    layout, pool = make_layout(spec, 0), make_device_pool(spec)
    if physical_size is None:
        return make_allocator(spec, layout, pool)
    return LaneSlotAllocator(
        layout=layout, physical_size=physical_size, dtype=torch.bfloat16, device="cpu", kvcache=pool
    )


if __name__ == "__main__":
    unittest.main()
