"""What SGLang's scheduler asks the cache for beside its requests: transfers under way, one queue at a time, storage."""

from __future__ import annotations

import math
import unittest
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.test.ci.ci_register import register_cpu_ci

from sglang.srt.mem_cache.hicache.runtime import standalone_runtime
from sglang.srt.mem_cache.hicache.seam.server_flags import SIZED_BY_FRACTION
from sglang.srt.mem_cache.hicache.settings import HiCacheSettings
from sglang.srt.mem_cache.layouts.errors import LayoutConfigError
from support.caches import CacheSpec, CacheTestCase, chain
from support.faults import begin, each_layout, fault_spec
from support.groups import Group

register_cpu_ci(est_time=15, suite="base-a-test-cpu")


class TestTransfersUnderWay(CacheTestCase):
    @each_layout
    def test_they_are_listed_until_every_rank_has_them(self, layout: str) -> None:
        group = self._with_one_of_each_under_way(layout)
        for rank in group.ranks:
            self.assertEqual((len(rank.cache.ongoing_write_through), len(rank.cache.ongoing_load_back)), (1, 1))
        group.release(0, 1, 2)
        group.settle()
        for rank in group.ranks:
            self.assertEqual((len(rank.cache.ongoing_write_through), len(rank.cache.ongoing_load_back)), (1, 1))
        group.release(3)
        group.settle()
        for rank in group.ranks:
            self.assertEqual((rank.cache.ongoing_write_through, rank.cache.ongoing_load_back), ({}, {}))

    @each_layout
    def test_host_memory_is_given_up_when_they_have_ended(self, layout: str) -> None:
        group = self._with_one_of_each_under_way(layout)
        for rank in group.ranks:
            rank.cache.release_host_resources()
            self.assertEqual((rank.engine.write_events, rank.engine.load_events), ([], []), "nothing is copied later")
            self.assertEqual((len(rank.cache.ongoing_write_through), len(rank.cache.ongoing_load_back)), (1, 1))

    @each_layout
    def test_each_queue_can_be_settled_alone_with_a_reduction_of_its_own(self, layout: str) -> None:
        group = self._with_one_of_each_under_way(layout)
        group.release()
        before = list(group.lockstep.calls)
        group.lockstep.gather([[1]] * group.spec.ranks)
        group.each(lambda rank: rank.cache.writing_check())
        for rank in group.ranks:
            self.assertEqual((len(rank.cache.ongoing_write_through), len(rank.cache.ongoing_load_back)), (0, 1))
        group.lockstep.gather([[1]] * group.spec.ranks)
        group.each(lambda rank: rank.cache.loading_check())
        for rank in group.ranks:
            self.assertEqual((len(rank.cache.ongoing_write_through), len(rank.cache.ongoing_load_back)), (0, 0))
        self.assertEqual(group.lockstep.calls, [calls + 2 for calls in before])

    def test_whether_a_load_has_ended_here_is_answered_without_settling_it(self) -> None:
        group = self._with_one_of_each_under_way("cp_shared")
        calls = list(group.lockstep.calls)
        for rank in group.ranks:
            self.assertTrue(rank.cache.is_load_back_event_done(-1), "nothing was queued")
            self.assertTrue(rank.cache.is_load_back_event_done(0), "the copy has run, since the request is")
            self.assertEqual(len(rank.cache.ongoing_load_back), 1)
        self.assertEqual(group.lockstep.calls, calls)

    def _with_one_of_each_under_way(self, layout: str) -> Group:
        """A backup and a load that no rank has seen the end of."""
        group = Group(fault_spec(layout))
        group.serve(chain(group.spec, 1, 2, 3))
        group.evict_all()
        group.hold()
        group.finish(begin(group, 7, 8))
        begin(group, 1, 2, 3)
        return group


class TestNoStorage(CacheTestCase):
    @each_layout
    def test_nothing_is_fetched_attached_found_or_cleared(self, layout: str) -> None:
        (cache, *_) = [rank.cache for rank in Group(fault_spec(layout)).ranks]
        attached, reason = cache.attach_storage_backend("mooncake", served_model_name="m")
        self.assertEqual(
            (attached, reason),
            (
                False,
                f"--kv-layout-strategy {layout} does not support --hicache-storage-backend mooncake: it cannot name "
                "its pages for a storage tier; drop --hicache-storage-backend (accepted: none)",
            ),
        )
        self.assertTrue(cache.detach_storage_backend()[0])
        self.assertFalse(cache.clear_storage_backend())
        self.assertFalse(cache.enable_storage)
        request = CacheRequestHandle("request-1", 0)
        cache.prefetch_from_storage("request-1", cache.root_node, [1, 2, 3])
        self.assertTrue(cache.check_prefetch_progress(request), "a request must not wait for what never comes")
        self.assertFalse(cache.has_ongoing_prefetch(request))
        self.assertEqual(cache.pop_prefetch_loaded_tokens(request), 0)
        self.assertEqual(cache.query_storage_hit_length(cache.root_node, [1, 2, 3]), 0)


class TestSettings(CacheTestCase):
    def test_a_servers_flags_arrive_field_by_field(self) -> None:
        # As a server resolves it: sizes of the user's own leave no fraction.
        resolved: dict[str, Any] = {"hicache_host_memory_fraction": None} if SIZED_BY_FRACTION else {}
        with standalone_runtime(
            page_size=4,
            hicache_write_policy="write_through_selective",
            hicache_io_backend="kernel",
            hicache_mem_layout="page_first_direct",
            hicache_ratio=3.5,
            hicache_size=7,
            served_model_name="tiny",
            watchdog_timeout=90,
            **resolved,
        ):
            found = HiCacheSettings.from_server()
        self.assertEqual(
            found,
            HiCacheSettings(
                write_policy="write_through_selective",
                io_backend="kernel",
                mem_layout="page_first_direct",
                host_ratio=3.5,
                host_gb=7,
                model_name="tiny",
                peer_seconds=90,
            ),
        )
        self.assertEqual(found.write_through_threshold, 2)

    def test_a_rank_waits_for_others_as_long_as_sglangs_watchdog_does(self) -> None:
        for flag, seconds in ((0.5, 0.5), (300, 300), (1e30, 1e9)):
            with self.subTest(flag=flag), standalone_runtime(page_size=4, watchdog_timeout=flag):
                self.assertEqual(HiCacheSettings.from_server().peer_seconds, seconds)
        for useless in (None, 0, -1, math.inf, math.nan):  # SGLang's watchdog does not work with these either
            with self.subTest(flag=useless), standalone_runtime(page_size=4, watchdog_timeout=useless):
                self.assertIsNone(HiCacheSettings.from_server().peer_seconds)

    def test_an_unknown_write_policy_is_refused_by_flag_value_and_choices(self) -> None:
        with self.assertRaisesRegex(
            LayoutConfigError,
            "^--hicache-write-policy must be one of write_through, write_through_selective, write_back, got 'write'$",
        ):
            HiCacheSettings(write_policy="write")  # type: ignore[arg-type]  # the mistake under test

    def test_host_memory_is_given_up_once_and_can_be_asked_for_again(self) -> None:
        (rank,) = Group(CacheSpec(layout="identity", ranks=1)).ranks
        rank.cache.release_host_resources()
        rank.cache.release_host_resources()


if __name__ == "__main__":
    unittest.main()
