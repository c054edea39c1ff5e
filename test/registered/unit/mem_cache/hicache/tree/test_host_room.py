"""A full host tier: what gives way, what stays, what is backed up on its way out; nothing goes in vain."""

from __future__ import annotations

import random
import unittest
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.test.ci.ci_register import register_cpu_ci

from sglang.srt.mem_cache.layouts.errors import LayoutInvariantError
from support.caches import CacheSpec, CacheTestCase, chain
from support.groups import Group, Request

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache.tree.node import LayoutTreeNode
    from support.caches import Rank

register_cpu_ci(est_time=30, suite="base-a-test-cpu")

ONE_LANE: dict[str, Any] = {"layout": "identity", "ranks": 2}


class TestMirrorsGiveWay(CacheTestCase):
    def test_a_host_smaller_than_the_device_serves_what_has_left_the_device(self) -> None:
        for layout in ("identity", "cp_shared"):
            for policy in ("write_through", "write_back"):
                with self.subTest(layout=layout, policy=policy):
                    spec = CacheSpec(layout=layout, ranks=4, policy=policy, device_pages=8, host_pages=4)
                    group = Group(spec)
                    for first in range(0, 10 * spec.lanes, spec.lanes):
                        _serve(group, tuple(range(first, first + spec.lanes)))
                        group.check()
                    request = _start(group, *range(spec.lanes))
                    self.assertEqual((request.device_pages, request.host_pages), (0, spec.lanes))

    def test_the_least_recent_mirror_goes_first_and_host_only_leaves_stay(self) -> None:
        group = Group(CacheSpec(**ONE_LANE, device_pages=12, host_pages=4))
        _serve(group, (1,))
        group.evict_all()  # on the host alone
        _serve(group, (2,), (3,), (4,), (2,))
        _serve(group, (5,))  # put off: the host is full
        self.assertEqual(_on_host(group), {1, 2, 3, 4})
        # Everything has left but what is locked when the copy of 5 needs room.
        locked = [_start(group, page) for page in (3, 4, 2)]
        group.evict_all()
        self.assertEqual(_on_host(group), {1, 2, 4, 5}, "3 was the least recently used mirror, 1 older but alone")
        for request in locked:
            group.abort(request)
        group.check()

    def test_a_mirror_with_a_host_copy_below_it_stays(self) -> None:
        group = Group(CacheSpec(**ONE_LANE, device_pages=12, host_pages=3))
        _serve(group, (1,), (1, 2), (3,))  # 1 is above 2, and both are less recent than 3
        request = _start(group, 1, 2)
        above = _start(group, 3)
        _serve(group, (4,))
        group.evict_all()
        self.assertEqual(_on_host(group), {1, 3, 4}, "2 lies below 1, so it goes first")
        group.abort(request)
        group.abort(above)
        group.check()

    def test_a_copy_under_way_or_above_one_is_held(self) -> None:
        group = Group(CacheSpec(**ONE_LANE, device_pages=12, host_pages=3))
        _serve(group, (1,))
        group.hold()
        group.finish(_start(group, 1, 2))
        for rank in group.ranks:
            self.assertEqual([node.host_ref_counter for node in rank.nodes()], [1, 1])
            self.assertEqual(rank.accounting.host_copies.lane_pages, [0])
        group.check()
        group.release()
        group.settle()
        for rank in group.ranks:
            self.assertEqual([node.host_ref_counter for node in rank.nodes()], [0, 0])
            self.assertEqual(rank.accounting.host_copies.lane_pages, [2])
            with self.assertRaisesRegex(LayoutInvariantError, r"host copy of node \d+ is released, but it is not held"):
                rank.accounting.host_copies.release(rank.nodes()[0])
        group.check()


class TestNothingIsEvictedInVain(CacheTestCase):
    def test_the_host_keeps_what_it_has_where_room_cannot_be_made(self) -> None:
        """16 pages: six alone, eight mirrors that are being copied, two free. Nine are needed, eight can be had."""
        group = Group(CacheSpec(**ONE_LANE, device_pages=24, host_pages=16))
        _serve(group, *((page,) for page in range(6)))
        group.evict_all()
        group.hold()
        for page in range(10, 18):
            group.finish(_start(group, page))
        group.finish(_start(group, *range(20, 29)))
        before = _on_host(group)
        self.assertEqual(len(before), 14)
        group.agreed(lambda rank: rank.cache.evict(EvictParams(num_tokens=36)).num_tokens_evicted)
        self.assertEqual(_on_host(group), before)
        self.assertEqual(group.agreed(lambda rank: rank.cache.stats.refused_backups), 1)
        group.check()

    def test_with_those_mirrors_copied_the_room_is_made_of_them(self) -> None:
        group = Group(CacheSpec(**ONE_LANE, device_pages=24, host_pages=16))
        _serve(group, *((page,) for page in range(6)))
        group.evict_all()
        _serve(group, *((page,) for page in range(10, 18)), tuple(range(20, 29)))
        held = [_start(group, page) for page in range(10, 18)]
        group.evict_all()
        self.assertEqual(_on_host(group), {*range(6), 17, *range(20, 29)})
        for request in held:
            group.abort(request)
        group.check()

    def test_a_lane_beyond_help_costs_the_other_lanes_nothing(self) -> None:
        """The short lane is full of copies under way; what is on the host alone lies in the other lanes."""
        group = Group(CacheSpec(ranks=4, device_pages=8, host_pages=2))
        lanes = _pages_by_lane(group)
        _serve(group, *((page,) for lane in (1, 2, 3) for page in lanes[lane][:2]))
        group.evict_all()
        group.hold()
        for page in lanes[0][:2]:
            group.finish(_start(group, page))
        group.finish(_start(group, lanes[0][2]))
        before = _on_host(group)
        self.assertEqual(len(before), 8)
        group.evict_all()
        self.assertEqual(_on_host(group), before)
        group.check()

    def test_a_copy_that_does_not_help_goes_where_it_lies_above_one_that_does(self) -> None:
        """One-page nodes: the only leaf has no page in the short lane, the node above it has."""
        group = Group(CacheSpec(ranks=4, device_pages=8, host_pages=2))
        first, second, third, *_ = _pages_by_lane(group)[0]
        _serve(group, (first,), (first, 90), (second,), (second, 91))  # 90 and 91 are in lane 1
        group.evict_all()
        _serve(group, (third,))
        group.evict_all()
        self.assertEqual(_on_host(group), {second, 91, third})
        group.check()


class TestOnTheWayOut(CacheTestCase):
    def test_a_mirror_that_was_given_up_is_made_again_when_its_node_leaves(self) -> None:
        group = Group(CacheSpec(**ONE_LANE, device_pages=8, host_pages=2))
        _serve(group, (1,), (2,), (3,))
        locked = [_start(group, 1), _start(group, 2)]
        _leave(group)  # 3 takes the room of the mirror of 1
        self.assertEqual(_on_host(group), {2, 3})
        group.abort(locked[0])
        group.evict_all()
        self.assertEqual(_on_host(group), {1, 3})
        self.assertEqual(_start(group, 1).host_pages, 1)

    def test_it_takes_hits_to_earn_that(self) -> None:
        group = Group(CacheSpec(**ONE_LANE, policy="write_through_selective", device_pages=8, host_pages=2))
        _serve(group, (1,), (1,), (2,), (2,), (3,), (3,), (4,))  # 1 and 2 fill the host
        locked = [_start(group, 1), _start(group, 2)]
        group.evict_all()
        self.assertEqual(_on_host(group), {2, 3}, "3 was used twice, 4 once")
        for request in locked:
            group.abort(request)

    def test_what_is_above_it_is_copied_too_so_that_host_copies_form_prefixes(self) -> None:
        for layout in ("identity", "cp_shared"):
            group = Group(CacheSpec(layout=layout, ranks=4, device_pages=8, host_pages=2))
            lanes = group.spec.lanes
            filling = tuple(range(100, 100 + 2 * lanes))
            _serve(group, filling, (1,), (1, 2))
            pin = _start(group, *filling)
            first = _start(group, 1)  # it is not next to leave, so it is not copied ahead
            group.agreed(lambda rank: rank.cache.evict(EvictParams(num_tokens=1)).num_tokens_evicted)
            self.assertTrue({1, 2} <= _on_host(group), "2 alone has left the device")
            group.check()
            group.abort(first)
            group.evict_all()
            group.abort(pin)
            group.check()
            self.assertEqual(_start(group, 1, 2).host_pages, 2, "with the right bytes, which `start` compares")

    def test_slots_are_free_only_when_their_copies_have_ended(self) -> None:
        """A chain leaves node by node within one eviction; its first node is copied for the sake of the second."""
        group = Group(CacheSpec(**ONE_LANE, device_pages=8, host_pages=2))
        _serve(group, (9, 8), (1,), (1, 2))
        pin = _start(group, 9, 8)
        group.hold()
        group.evict_all()
        for rank in group.ranks:
            self.assertEqual((rank.controller.ack_write_queue, rank.cache.stats.late_backups), ([], 2))
            self.assertEqual(rank.cache.stats.backups, 3, "one ack for each node")
        group.abort(pin)
        request = _start(group, 1, 2)
        self.assertEqual(request.host_pages, 2)

    def test_ranks_stay_equal_and_host_copies_prefixes_whatever_comes(self) -> None:
        for layout in ("identity", "cp_shared"):
            for policy in ("write_through", "write_through_selective", "write_back"):
                for eviction in ("lru", "lfu", "fifo", "mru"):
                    with self.subTest(layout=layout, policy=policy, eviction=eviction):
                        self._drive(
                            CacheSpec(
                                layout=layout,
                                ranks=4,
                                policy=policy,
                                eviction=eviction,
                                device_pages=16 if layout == "identity" else 4,
                                host_pages=8 if layout == "identity" else 2,
                            )
                        )

    def _drive(self, spec: CacheSpec) -> None:
        choice, group = random.Random(7), Group(spec)
        running: list[Request] = []
        for _ in range(80):
            pages = [choice.randrange(3) for _ in range(choice.randrange(1, 6))]
            request = group.start(chain(spec, *pages))
            if request is not None:
                running.append(request)
            if running and (len(running) == 3 or choice.random() < 0.6):
                group.finish(running.pop(choice.randrange(len(running))))
            if choice.random() < 0.5:
                group.settle()
            group.check()
        for request in running:
            group.abort(request)
        group.settle()
        self.assertGreater(group.agreed(lambda rank: rank.cache.stats.loads), 0)
        group.evict_all()
        group.agreed(lambda rank: rank.cache.evict_host(1_000_000))
        for rank in group.ranks:
            self.assertEqual(rank.host_free_pages(), spec.host_pages)


def _serve(group: Group, *chains: tuple[int, ...]) -> None:
    for pages in chains:
        group.serve(chain(group.spec, *pages))


def _leave(group: Group) -> None:
    """Everything unlocked leaves the device; what is locked keeps its bytes."""
    group.agreed(lambda rank: rank.cache.evict(EvictParams(num_tokens=1_000)).num_tokens_evicted)


def _start(group: Group, *pages: int) -> Request:
    request = group.start(chain(group.spec, *pages))
    assert request is not None, "the request finds no room"
    return request


def _on_host(group: Group) -> set[int]:
    """The pages, by name, that have a host copy."""
    return set(group.agreed(lambda rank: sorted(page for node in rank.nodes() for page in _pages(rank, node))))


def _pages(rank: Rank, node: LayoutTreeNode[Any]) -> list[int]:
    if node.metadata is None:
        return []
    return [token // 1_000 for token in node.key.token_ids[:: rank.spec.page_size]]


def _pages_by_lane(group: Group) -> dict[int, list[int]]:
    """First pages of chains, by the lane that they fall into."""
    layout = group.ranks[0].layout
    lanes: dict[int, list[int]] = {}
    for page in range(1, 60):
        lanes.setdefault(layout.chain_base(chain(group.spec, page).tobytes(), ""), []).append(page)
    return lanes


if __name__ == "__main__":
    unittest.main()
