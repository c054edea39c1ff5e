"""One scrape of all ranks of a server: tokens count once for a tree, bytes and seconds for each rank by its label."""

from __future__ import annotations

import tempfile
import unittest
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from sglang.srt.managers.scheduler_components.metrics_reporter import SchedulerMetricsReporter
from sglang.srt.observability.metrics_collector import RadixCacheMetricsCollector, SchedulerStats
from sglang.test.ci.ci_register import register_cpu_ci
from typing_extensions import override

from sglang.srt.mem_cache.hicache.server import metrics
from sglang.srt.mem_cache.hicache.server.metrics import (
    COUNTERS,
    GAUGES,
    PER_RANK,
    PREFIX,
    ReportingRank,
    report_host_tokens,
    traffic_collector,
)
from support.caches import CacheSpec, CacheTestCase, chain
from support.groups import Group
from support.reporting import ReportingGroup, own_metrics, place_of

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

DEVICE_PAGES = 24  # of all lanes
HOST_PAGES = 12
SERVERS = (("identity", 1), ("identity", 2), ("cp_shared", 2), ("identity", 3), ("cp_shared", 3))
OF_TREE = {
    *(PREFIX + name for name in GAUGES if name not in PER_RANK),
    *(f"{PREFIX}{name}_total" for name in COUNTERS if name not in PER_RANK),
    *(f"sglang:{name}_tokens_total" for name in ("hicache_backup", "load_back", "evicted", "hicache_dropped")),
}
OF_RANK = {
    *(PREFIX + name for name in GAUGES if name in PER_RANK),
    *(f"{PREFIX}{name}_total" for name in COUNTERS if name in PER_RANK),
    *(f"sglang:{name}_bytes_total" for name in ("hicache_backup", "load_back")),
    "sglang:eviction_duration_seconds_count",
}
LOCAL = {f"{PREFIX}device_page_imbalance", f"{PREFIX}host_page_imbalance"}  # lanes differ with the number of ranks


class TestOneScrapeOfAllRanks(CacheTestCase):
    def test_what_is_logical_does_not_depend_on_the_number_of_ranks(self) -> None:
        found = {server: self._serve(*server).scrape() for server in SERVERS}
        alone = found["identity", 1]
        self.assertEqual(alone.total("sglang:hicache_backup_tokens_total"), 12 * 4)
        self.assertEqual(alone.total("sglang:load_back_tokens_total"), 12 * 4)
        self.assertEqual(alone.total("sglang:evicted_tokens_total"), 38 * 4)
        self.assertEqual(alone.total(f"{PREFIX}refused_backups_total"), 1)
        self.assertEqual(alone.total(f"{PREFIX}host_used_tokens"), 12 * 4)
        self.assertEqual(alone.total(f"{PREFIX}device_capacity_tokens"), DEVICE_PAGES * 4)
        for server, scrape in found.items():
            for name in OF_TREE - LOCAL:
                with self.subTest(server=server, name=name):
                    self.assertEqual(scrape.total(name), alone.total(name))

    def test_each_series_of_a_tree_is_there_once_and_each_of_a_rank_once_for_each(self) -> None:
        for layout, ranks in SERVERS:
            scrape = self._serve(layout, ranks).scrape()
            everyone = [str(rank) for rank in range(ranks)]
            for name in (OF_TREE | OF_RANK) - {"sglang:hicache_dropped_tokens_total"}:
                with self.subTest(layout=layout, ranks=ranks, name=name):
                    self.assertEqual(sorted(scrape.by_rank(name)), ["0"] if name in OF_TREE else everyone)
                    self.assertEqual(len(scrape.series[name]), 1 if name in OF_TREE else ranks)

    def test_what_a_rank_says_is_its_own(self) -> None:
        for layout, ranks in SERVERS:
            group = self._serve(layout, ranks)
            scrape = group.scrape()
            for rank in group.ranks:
                with self.subTest(layout=layout, rank=rank.number):
                    stats, own = rank.cache.stats, str(rank.number)
                    self.assertEqual(scrape.by_rank("sglang:hicache_backup_bytes_total")[own], stats.backed_up_bytes)
                    self.assertEqual(scrape.by_rank("sglang:load_back_bytes_total")[own], stats.loaded_bytes)
                    held = sum(len(node.metadata.host_pages) for node in rank.nodes() if node.metadata is not None)
                    self.assertGreater(held, 0)
                    self.assertEqual(
                        scrape.by_rank(f"{PREFIX}host_used_bytes")[own],
                        held * rank.controller.transfer.bytes_per_page,
                    )

    def test_what_write_back_drops_is_counted_once(self) -> None:
        for layout, ranks in SERVERS:
            with self.subTest(layout=layout, ranks=ranks):
                group = self._group(layout, ranks, policy="write_back")
                group.serve(chain(group.spec, *range(14)))
                group.evict_all()
                self.assertEqual(group.scrape().total("sglang:hicache_dropped_tokens_total"), 14 * 4)

    def _serve(self, layout: str, ranks: int) -> ReportingGroup:
        """Two chains are copied, evicted and loaded again; a third one is too long for the host."""
        group = self._group(layout, ranks)
        for _ in range(2):
            group.serve(chain(group.spec, *range(6)))
            group.serve(chain(group.spec, *range(10, 16)))
            group.evict_all()
        group.serve(chain(group.spec, *range(20, 34)))
        group.evict_all()
        return group

    def _group(self, layout: str, ranks: int, **fields: Any) -> ReportingGroup:  # noqa: ANN401  # of CacheSpec
        lanes = ranks if layout == "cp_shared" else 1
        spec = CacheSpec(
            layout=layout, ranks=ranks, device_pages=DEVICE_PAGES // lanes, host_pages=HOST_PAGES // lanes, **fields
        )
        return ReportingGroup(spec, Path(self.enterContext(tempfile.TemporaryDirectory())))


class TestWhoReports(CacheTestCase):
    def test_no_two_ranks_of_a_server_have_the_same_labels_and_one_rank_speaks_for_each_tree(self) -> None:
        # (data-parallel groups that are servers of their own, attention-DP, attention-CP, attention-TP, stages)
        for servers, attn_dp, attn_cp, attn_tp, stages in product((1, 2), repeat=5):
            grid = product(range(servers), range(attn_dp), range(attn_cp), range(attn_tp), range(stages))
            ranks = [
                ReportingRank.at(
                    place_of(
                        tp=(dp * attn_cp + cp) * attn_tp + tp,
                        attn_tp=tp,
                        attn_cp=cp,
                        pp=pp,
                        dp=server if servers > 1 else dp if attn_dp > 1 else None,
                    )
                )
                for server, dp, cp, tp, pp in grid
            ]
            self.assertEqual(len({tuple(rank.labels.items()) for rank in ranks}), len(ranks))
            self.assertEqual(sum(rank.speaks_for_tree for rank in ranks), servers * attn_dp)

    def test_a_rank_that_does_not_speak_for_its_tree_counts_no_tokens_in_any_way_that_sglang_has(self) -> None:
        ways = [name for name in dir(RadixCacheMetricsCollector) if "tokens" in name]
        self.assertGreater(len(ways), 3)
        silent = self._collector(tp=1, attn_tp=1)
        for name in ways:
            self.assertIsNot(getattr(type(silent), name), getattr(RadixCacheMetricsCollector, name), name)

    def test_a_collector_of_the_users_is_used_with_the_labels_of_the_rank(self) -> None:
        class Users(RadixCacheMetricsCollector):
            bytes_seen = 0

            @override
            def increment_backup_num_bytes(self, num_bytes: int) -> None:
                self.bytes_seen += num_bytes

        with mock.patch.object(metrics, "resolve_collector_class", lambda role, _: {"radix_cache": Users}[role]):
            for rank in range(2):
                collector = self._collector(tp=rank, attn_tp=rank)
                assert isinstance(collector, Users)
                collector.increment_backup_num_bytes(7)
                self.assertEqual(collector.bytes_seen, 7)
                self.assertEqual(collector.labels, {"cache_type": "X", "tp_rank": str(rank), "pp_rank": "0"})

    def test_sglangs_host_tokens_are_those_of_all_lanes(self) -> None:
        for layout, ranks in SERVERS:
            with self.subTest(layout=layout, ranks=ranks):
                lanes = ranks if layout == "cp_shared" else 1
                group = Group(CacheSpec(layout=layout, ranks=ranks, device_pages=24 // lanes, host_pages=12 // lanes))
                group.serve(chain(group.spec, *range(6)))
                for rank in group.ranks:
                    scheduler = SimpleNamespace(enable_hierarchical_cache=True, tree_cache=rank.cache)
                    reporter: Any = SimpleNamespace(scheduler=scheduler, stats=SchedulerStats())
                    SchedulerMetricsReporter._log_hicache_stats(reporter)  # noqa: SLF001  # what we hook into
                    report_host_tokens(None, reporter)
                    self.assertEqual(reporter.stats.hicache_host_used_tokens, 6 * 4)
                    self.assertEqual(reporter.stats.hicache_host_total_tokens, 12 * 4)

    def _collector(self, **place: int) -> RadixCacheMetricsCollector:
        with own_metrics(Path(self.enterContext(tempfile.TemporaryDirectory())), 0):
            return traffic_collector("X", ReportingRank.at(place_of(**place)))


if __name__ == "__main__":
    unittest.main()
