"""Two and four real processes, each with real pools, tree and controller, that agree over gloo and nothing else.

`test_rank_agreement` drives all ranks in one process, where a rank that reduces too often or waits for a peer cannot
hang; here it would. The processes are started once for all tests.
"""

from __future__ import annotations

import re
import unittest
from typing import TYPE_CHECKING, ClassVar

import pytest
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase
from typing_extensions import override

from sglang.srt.mem_cache.layouts import CpSharedLayout, HostSharedLayout, PoolKind
from support.caches import CacheSpec
from support.gloo.ranks import GlooRanks
from support.gloo.scenarios import (
    footprint,
    lagging_ranks,
    lanes_that_ranks_share,
    one_page_nodes,
    random_traffic,
    round_trip,
    two_stages,
)
from support.gloo.waits import check_events_alone, construct_alone, exchange_alone, follow_alone, gather_alone

if TYPE_CHECKING:
    from support.gloo.traffic import TrafficReport
    from support.gloo.waits import Loss

register_cpu_ci(est_time=60, suite="base-a-test-cpu")

TRAFFIC_OPERATIONS = ("start", "start_two", "chunk", "finish", "abort", "pin", "unpin", "evict", "evict_host")
DEVICE_PAGES, HOST_PAGES = 6, 8  # of a cp_shared rank whose footprint is measured
BOUND_SECONDS = 1.0  # for a rank that waits for another one which does not come
BOUND = "1 s, --watchdog-timeout"


@pytest.mark.processes
@pytest.mark.timeout(400)
class TestRanksOverGloo(CustomTestCase):
    ranks: ClassVar[GlooRanks]

    @classmethod
    @override
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.ranks = cls.enterClassContext(GlooRanks(4))

    # Agreement.

    def test_four_ranks_hold_equal_trees_through_thousands_of_random_operations(self) -> None:
        reports = self._drive(4, _spec(ranks=4, device_pages=8), steps=1500, seed=1)
        operations = reports[0].operations
        for operation in (*TRAFFIC_OPERATIONS, "reset", "loads", "loads refused", "no room"):
            self.assertGreater(operations[operation], 0, f"no {operation} among {operations}")
        self.assertTrue(any(len(ids) > 1 for ids, _ in reports[0].acks), "no two loads went as one transfer")

    def test_two_ranks_hold_equal_trees_with_every_pool_host_layout_and_policy(self) -> None:
        cases = (
            _spec(pool=PoolKind.MHA, mem_layout="page_first_direct", policy="write_through_selective", eviction="lfu"),
            _spec(pool=PoolKind.MLA, policy="write_back", eviction="slru"),
            _spec(pool=PoolKind.DSA, mem_layout="page_first_direct", eviction="priority"),
            _spec(pool=PoolKind.DSA, policy="write_back", host_pages=7),
            _spec(layout="identity", device_pages=20, host_pages=30, eviction="fifo"),
            _spec(layout="host_shared", device_pages=20, host_pages=14),
            _spec(layout="host_shared", pool=PoolKind.DSA, device_pages=20, policy="write_back", host_pages=9),
        )
        for seed, spec in enumerate(cases):
            with self.subTest(spec=spec):
                self._drive(2, spec, steps=300, seed=seed)

    def test_four_ranks_hold_equal_trees_under_host_pressure(self) -> None:
        reports = self._drive(4, _spec(ranks=4, device_pages=5, host_pages=2), steps=300, seed=7)
        self.assertGreater(reports[0].stats.evicted_host_tokens, 0)
        self.assertGreater(reports[0].stats.refused_backups, 0)

    def test_four_ranks_that_exchange_pages_hold_equal_trees_under_host_pressure(self) -> None:
        spec = _spec(ranks=4, layout="host_shared", device_pages=24, host_pages=4, pool=PoolKind.MHA)
        reports = self._drive(4, spec, steps=400, seed=11)
        self.assertGreater(reports[0].stats.evicted_host_tokens, 0)

    def test_a_grid_of_two_groups_holds_equal_trees_with_one_reduction_in_each_group(self) -> None:
        reports = self._drive(4, _spec(ranks=2), steps=300, seed=8, grid=True)
        for report in reports:
            self.assertEqual(report.collectives, {(0, 1, 1)})

    def test_ranks_whose_processes_were_given_lanes_that_do_not_fit_all_refuse_alike(self) -> None:
        for lanes, counts, told in (
            ([3, 1, 0, 2], [4, 4, 4, 4], "^$"),
            ([0, 0, 0, 0], [1, 1, 1, 1], "^$"),
            ([0, 1, 1, 3], [4, 4, 4, 4], "ranks 0 to 3 store lanes 0, 1, 1, 3 of 4; accepted: 4 lanes"),
            ([0, 1, 0, 1], [2, 2, 2, 2], "ranks 0 to 3 store lanes 0, 1, 0, 1 of 2; accepted: 4 lanes"),
            ([0, 1, 2, 3], [5, 5, 5, 5], "ranks 0 to 3 store lanes 0, 1, 2, 3 of 5; accepted: 4 lanes"),
            ([0, 0, 0, 0], [1, 1, 4, 1], "ranks 0 to 3 store lanes 0, 0, 0, 0 of 1, 1, 4, 1; accepted: 4 lanes"),
        ):
            with self.subTest(lanes=lanes, counts=counts):
                answers = self.ranks.run(4, lanes_that_ranks_share, kind=CpSharedLayout, lanes=lanes, counts=counts)
                self.assertEqual(len(set(answers)), 1)
                self.assertRegex(answers[0], told)

    def test_ranks_whose_processes_were_given_host_lanes_that_do_not_fit_all_refuse_alike(self) -> None:
        for lanes, counts, told in (
            ([3, 1, 0, 2], [4, 4, 4, 4], "^$"),
            ([0, 1, 1, 3], [4, 4, 4, 4], "ranks 0 to 3 back up host lanes 0, 1, 1, 3 of 4; accepted: each lane"),
            ([0, 1, 2, 3], [4, 4, 5, 4], "ranks 0 to 3 back up host lanes 0, 1, 2, 3 of 4, 4, 5, 4; accepted"),
        ):
            with self.subTest(lanes=lanes, counts=counts):
                answers = self.ranks.run(4, lanes_that_ranks_share, kind=HostSharedLayout, lanes=lanes, counts=counts)
                self.assertEqual(len(set(answers)), 1)
                self.assertRegex(answers[0], told)

    def test_pipeline_stages_share_the_smallest_capacity_and_later_ones_follow_the_first(self) -> None:
        agreed = self.ranks.run(4, two_stages, capacities=[40, 30, 20, 10], ready=[3, 2, 9, 0])
        self.assertEqual(agreed, [(10, (2, 5))] * 4)

    # Bytes.

    def test_bytes_are_equal_after_load_back_with_every_pool_and_host_layout(self) -> None:
        for pool in (PoolKind.MHA, PoolKind.MLA, PoolKind.DSA):
            for mem_layout in ("layer_first", "page_first_direct"):
                spec = _spec(ranks=4, pool=pool, mem_layout=mem_layout)
                with self.subTest(pool=pool, mem_layout=mem_layout):
                    trips = self.ranks.run(4, round_trip, spec, chains=3, pages=7)
                    self.assertEqual([trip.wrong_pages for trip in trips], [0] * 4)
                    self.assertEqual(sum(trip.verified_pages for trip in trips), 3 * 7)
                    self.assertEqual({trip.loaded_tokens for trip in trips}, {3 * 7 * spec.page_size})
                    self.assertEqual(len({trip.digest for trip in trips}), 1)

    def test_pages_that_one_rank_loads_come_to_all_with_every_pool_and_host_layout(self) -> None:
        for pool in (PoolKind.MHA, PoolKind.MLA, PoolKind.DSA):
            for mem_layout in ("layer_first", "page_first_direct"):
                spec = _spec(ranks=4, layout="host_shared", pool=pool, mem_layout=mem_layout, device_pages=24)
                for staging_bytes in (None, 1):  # one byte: a page of each rank at a time
                    with self.subTest(pool=pool, mem_layout=mem_layout, staging_bytes=staging_bytes):
                        self._exchange(spec, staging_bytes)

    def _exchange(self, spec: CacheSpec, staging_bytes: int | None) -> None:
        trips = self.ranks.run(4, round_trip, spec, chains=3, pages=7, staging_bytes=staging_bytes)
        self.assertEqual([trip.wrong_pages for trip in trips], [0] * 4)
        self.assertEqual([trip.verified_pages for trip in trips], [3 * 7] * 4)
        self.assertEqual({trip.loaded_tokens for trip in trips}, {3 * 7 * spec.page_size})
        everything = sum(trip.loaded_bytes for trip in trips)  # each page once
        self.assertEqual([trip.loaded_bytes + trip.received_bytes for trip in trips], [everything] * 4)
        self.assertEqual(len({trip.digest for trip in trips}), 1)

    def test_ranks_that_own_nothing_of_a_load_get_it_from_the_one_that_does(self) -> None:
        spec = _spec(ranks=4, layout="host_shared", load_back_pages=1)
        trips = self.ranks.run(4, round_trip, spec, chains=1, pages=1)
        self.assertEqual([trip.wrong_pages for trip in trips], [0] * 4)
        self.assertEqual(sorted(trip.received_bytes > 0 for trip in trips), [False, True, True, True])

    def test_each_rank_holds_an_nth_of_the_bytes_that_identity_holds_for_the_same_tokens(self) -> None:
        for ranks in (2, 4):
            for pool in (PoolKind.MHA, PoolKind.MLA, PoolKind.DSA):
                with self.subTest(ranks=ranks, pool=pool):
                    self._compare_footprints(ranks, pool)

    def _compare_footprints(self, ranks: int, pool: PoolKind) -> None:
        shared = _spec(ranks=ranks, pool=pool, device_pages=DEVICE_PAGES, host_pages=1 + HOST_PAGES)
        whole = _spec(ranks=ranks, pool=pool, layout="identity", device_pages=6 * ranks, host_pages=1 + 8 * ranks)
        pages = 2 * ranks
        (identity, *others) = self.ranks.run(ranks, footprint, whole, chains=2, pages=pages)
        self.assertEqual(others, [identity] * (ranks - 1))
        self.assertEqual(identity.device_pages_written, 2 * pages)
        self.assertEqual(identity.host_pages_used, 2 * pages)
        for own in self.ranks.run(ranks, footprint, shared, chains=2, pages=pages):
            self.assertEqual(own.logical_tokens, identity.logical_tokens)
            self.assertEqual(own.capacity_tokens, identity.capacity_tokens)
            self.assertEqual(own.device_pages_written * ranks, identity.device_pages_written)
            self.assertEqual(own.host_pages_used * ranks, identity.host_pages_used)
            self.assertEqual(own.backed_up_bytes * ranks, identity.backed_up_bytes)
            # Pool bytes: what SGLang adds to each pool is the same for both, the rest goes by N.
            self.assertEqual(own.page_bytes, identity.page_bytes)
            self.assertEqual(own.device_pool_bytes, (DEVICE_PAGES + 1) * own.page_bytes)
            self.assertEqual(identity.device_pool_bytes, (DEVICE_PAGES * ranks + 1) * own.page_bytes)
            added = own.host_pool_bytes - HOST_PAGES * own.page_bytes
            self.assertEqual(identity.host_pool_bytes, HOST_PAGES * ranks * own.page_bytes + added)
            self.assertLess(added, 2 * own.page_bytes)

    # Acknowledgements.

    def test_every_rank_has_one_ack_per_operation_even_where_it_owns_nothing(self) -> None:
        spec = _spec(ranks=4, load_back_pages=1)
        counts = self.ranks.run(4, one_page_nodes, spec, nodes=6)
        for acks in ([count.writes for count in counts], [count.loads for count in counts]):
            self.assertEqual([len(own) for own in acks], [6] * 4)
            for same in zip(*acks, strict=True):
                self.assertEqual(
                    len({(ids, tokens) for ids, tokens, _ in same}), 1, "the ranks acknowledge other nodes"
                )
                self.assertEqual((len(same[0][0]), same[0][1]), (1, spec.page_size))
                self.assertEqual(
                    sum(nbytes > 0 for _, _, nbytes in same), 1, "a page of one owner was copied by others"
                )
        self.assertEqual([count.settled for count in counts], [(6, 6)] * 4)

    def test_checking_for_events_takes_exactly_one_reduction_whatever_is_pending(self) -> None:
        for count in self.ranks.run(4, one_page_nodes, _spec(ranks=4, load_back_pages=1), nodes=3):
            self.assertEqual(count.collectives, [1] * (3 + 3 + 1))

    def test_no_rank_settles_before_the_slowest_has_finished(self) -> None:
        lags = self.ranks.run(4, lagging_ranks, _spec(ranks=4), nodes=3)
        for number, lag in enumerate(lags):
            self.assertEqual(lag.ready, [0] * number + [3] * (4 - number))
            self.assertEqual(lag.settled, [0, 0, 0, 3])
            self.assertEqual(lag.collectives, [1] * 4)

    # A rank that does not come.

    def test_a_rank_that_does_not_check_for_events_is_named_within_the_bound_and_nobody_settles(self) -> None:
        losses = self.ranks.run(2, check_events_alone, _spec(), seconds=BOUND_SECONDS, group_seconds=20 * BOUND_SECONDS)
        self._check_losses(
            losses, "check_hicache_events (how many copies have finished on every rank)", BOUND, "nothing was settled"
        )
        self.assertEqual([loss.acks for loss in losses], [1, 1])

    def test_without_a_bound_the_time_out_of_the_group_ends_the_wait_and_the_rank_is_named(self) -> None:
        losses = self.ranks.run(2, check_events_alone, _spec(), seconds=None, group_seconds=BOUND_SECONDS)
        self._check_losses(losses, "check_hicache_events", "its process group's time-out", "nothing was settled")

    def test_a_rank_that_makes_no_cache_is_named_within_the_bound(self) -> None:
        losses = self.ranks.run(2, construct_alone, _spec(), seconds=BOUND_SECONDS)
        self._check_losses(losses, "the start of the cache", BOUND, "no cache was made")

    def test_a_rank_that_gathers_no_pages_is_named_within_the_bound(self) -> None:
        losses = self.ranks.run(2, gather_alone, seconds=BOUND_SECONDS)
        self._check_losses(losses, "the gather of KV pages", BOUND, "the batch has no result")

    def test_a_rank_that_starts_no_load_is_named_within_the_bound(self) -> None:
        spec = _spec(layout="host_shared")
        losses = self.ranks.run(2, exchange_alone, spec, seconds=BOUND_SECONDS)
        self._check_losses(losses, "the exchange of pages that were loaded", BOUND, "the load has no result")

    def test_a_pipeline_stage_that_is_missing_is_named_within_the_bound(self) -> None:
        place = "check_hicache_events (what the first pipeline stage has decided)"
        for late in (0, 1):
            with self.subTest(late_stage=late):
                losses = self.ranks.run(2, follow_alone, late_stage=late, seconds=BOUND_SECONDS)
                self._check_losses(losses, place, BOUND, "nothing was settled", late=late)

    def _check_losses(self, losses: list[Loss], place: str, bound: str, undone: str, *, late: int = 1) -> None:
        """One rank gave up at its bound; the `late` one, which came afterwards, was told at once."""
        for rank, loss in enumerate(losses):
            peer = 1 - rank
            self.assertRegex(loss.text, rf"^rank {rank} waited [0-9.]+ s in vain for rank {peer} in {re.escape(place)}")
            self.assertIn(f"a collective of ranks 0 and 1 with a bound of {bound}: {undone}. Look at rank", loss.text)
            self.assertRegex(loss.text, rf"Look at rank {peer} for .+\. The cause: \S")
            self.assertNotIn("\n", loss.text)
        self.assertRegex(losses[1 - late].text, r"The cause: Timed out waiting 1000ms for \w+ operation to complete$")
        self.assertGreaterEqual(losses[1 - late].seconds, BOUND_SECONDS)
        self.assertLess(losses[1 - late].seconds, 10 * BOUND_SECONDS)

    def _drive(self, ranks: int, spec: CacheSpec, *, steps: int, seed: int, grid: bool = False) -> list[TrafficReport]:
        """The same random operations on every rank; whatever must be equal on all ranks is."""
        reports = self.ranks.run(ranks, random_traffic, spec, steps=steps, seed=seed, grid=grid)
        first = reports[0]
        for report in reports:
            self.assertEqual(report.digests, first.digests)
            self.assertEqual(report.operations, first.operations)
            self.assertEqual(report.answers, first.answers)
            self.assertEqual(report.acks, first.acks, "a rank has more, fewer or other acks")
            if not grid:
                self.assertEqual(report.collectives, {(1,) if ranks == 2 else (1, 0, 0)})
            self.assertGreater(report.verified_pages, 0)
        self.assertGreater(len(first.digests), steps // 5)
        self.assertGreater(first.stats.loads, 0, "nothing was ever loaded back")
        if not spec.exchanges:  # loads end in step there
            self.assertNotEqual(first.ready, reports[1].ready, "all ranks saw their copies end at the same time")
        return reports


def _spec(
    *,
    ranks: int = 2,
    layout: str = "cp_shared",
    pool: PoolKind = PoolKind.MLA,
    mem_layout: str = "layer_first",
    policy: str = "write_through",
    eviction: str = "lru",
    device_pages: int = 10,
    host_pages: int = 14,
    load_back_pages: int = 2,
) -> CacheSpec:
    return CacheSpec(
        layout=layout,
        ranks=ranks,
        pool=pool,
        mem_layout=mem_layout,
        policy=policy,  # type: ignore[arg-type]  # one of its literals
        eviction=eviction,
        device_pages=device_pages,
        host_pages=host_pages,
        load_back_pages=load_back_pages,
    )


if __name__ == "__main__":
    unittest.main()
