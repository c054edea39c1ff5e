"""What the cache tells SGLang's own metrics: logical tokens, this rank's bytes, seconds of copies, tokens dropped."""

from __future__ import annotations

import functools
import unittest
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.l2_transfer import TransferCompletion
from sglang.srt.observability.metrics_collector import RadixCacheMetricsCollector
from sglang.test.ci.ci_register import register_cpu_ci
from typing_extensions import override

from support.caches import CacheSpec, CacheTestCase, Rank, SlowEngine, chain, page_views
from support.faults import each_layout, fault_spec
from support.groups import Group

if TYPE_CHECKING:
    from collections.abc import Callable

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

LABELS = {"cache_type": "HiRadixCache"}


class Metrics:
    """SGLang's collector with a registry of its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        own = {
            "_counter_cls": staticmethod(functools.partial(Counter, registry=self._registry)),
            "_histogram_cls": staticmethod(functools.partial(Histogram, registry=self._registry)),
        }
        collector = type("OwnCollector", (RadixCacheMetricsCollector,), own)
        self.collector: RadixCacheMetricsCollector = collector(labels=LABELS)

    def value(self, name: str, **labels: str) -> float:
        """The value of one series, 0 if nobody has counted it."""
        return self._registry.get_sample_value(f"sglang:{name}", {**LABELS, **labels}) or 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _TimedEvent:
    """An event as a GPU has it; those of a CPU know no time."""

    milliseconds: float

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: _TimedEvent) -> float:
        return later.milliseconds - self.milliseconds


class _TimedEngine(SlowEngine):
    """Each copy takes a quarter of a second."""

    @override
    def _submit(self, events: list[Any], submit: Callable[[], TransferCompletion]) -> TransferCompletion:
        super()._submit(events, submit)
        return TransferCompletion(_TimedEvent(milliseconds=1_000), _TimedEvent(milliseconds=1_250), True)


class TestSGLangsMetrics(CacheTestCase):
    @each_layout
    def test_backups_and_loads_count_logical_tokens_and_the_bytes_of_this_rank(self, layout: str) -> None:
        group = Group(fault_spec(layout))
        metrics = [self._observe(rank) for rank in group.ranks]
        group.serve(chain(group.spec, *range(6)))
        group.evict_all()
        group.serve(chain(group.spec, *range(6)))
        for rank, seen in zip(group.ranks, metrics, strict=True):
            (node,) = rank.nodes()
            assert node.metadata is not None
            own_bytes = len(node.metadata.host_pages) * sum(pages.shape[1] for pages in page_views(rank.device_pool))
            self.assertGreater(own_bytes, 0)
            self.assertEqual(seen.value("hicache_backup_tokens_total", pool="kv"), 24)
            self.assertEqual(seen.value("load_back_tokens_total", pool="kv"), 24)
            self.assertEqual(seen.value("hicache_backup_bytes_total"), own_bytes)
            self.assertEqual(seen.value("load_back_bytes_total"), own_bytes)
            self.assertEqual(seen.value("evicted_tokens_total"), 24)
            self.assertEqual(seen.value("hicache_backup_duration_seconds_count"), 0, "a CPU's events know no time")
            self.assertEqual(seen.value("load_back_duration_seconds_count"), 0)

    def test_a_copy_takes_the_time_between_its_events_in_seconds(self) -> None:
        group = Group(CacheSpec())
        rank = group.ranks[0]
        rank.engine = _TimedEngine()
        rank.controller.transfer.engine = rank.engine
        seen = self._observe(rank)
        group.serve(chain(group.spec, 1, 2))
        group.serve(chain(group.spec, 3, 4))
        group.evict_all()
        group.serve(chain(group.spec, 1, 2))
        self.assertEqual(seen.value("hicache_backup_duration_seconds_count"), 2)
        self.assertEqual(seen.value("hicache_backup_duration_seconds_sum"), 0.5)
        self.assertEqual(seen.value("load_back_duration_seconds_count"), 1)
        self.assertEqual(seen.value("load_back_duration_seconds_sum"), 0.25)

    def test_only_what_write_back_could_not_keep_is_counted_as_dropped(self) -> None:
        for policy, dropped in (("write_back", 48), ("write_through", 0)):
            with self.subTest(policy=policy):
                group = Group(CacheSpec(policy=policy, host_pages=2))  # type: ignore[arg-type]  # one of WritePolicy
                seen = self._observe(group.ranks[2])
                group.serve(chain(group.spec, *range(12)))
                group.each(lambda rank: rank.cache.evict(EvictParams(num_tokens=24)))
                self.assertEqual(seen.value("evicted_tokens_total"), 48)
                self.assertEqual(seen.value("hicache_dropped_tokens_total", reason="host_pressure", pool="kv"), dropped)
                self.assertEqual(group.agreed(lambda rank: rank.cache.stats.dropped_tokens), dropped)

    def _observe(self, rank: Rank) -> Metrics:
        metrics = Metrics()
        rank.cache.parts.report.collector = metrics.collector
        return metrics


if __name__ == "__main__":
    unittest.main()
