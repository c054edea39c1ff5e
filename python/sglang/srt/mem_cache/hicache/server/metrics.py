"""What a server with a layout strategy tells ``/metrics``: SGLang's series of the cache, and ours.

A scrape adds up what all processes say under the same labels. So each series carries the labels that SGLang gives its
scheduler's (``tp_rank``, ``pp_rank``, ``dp_rank``), and what all ranks of a tree know alike, such as logical tokens,
is said by its first rank only: whoever sums over ranks counts it once. Bytes and seconds are each rank's own::

    tokens, refusals, imbalance   the first rank of each tree
    bytes, seconds, device reads  every rank
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from sglang.srt.observability.metrics_collector import (
    STAT_LOGGER_ROLE_RADIX_CACHE,
    RadixCacheMetricsCollector,
    resolve_collector_class,
)
from sglang.srt.runtime_context import get_observability
from typing_extensions import override

from sglang.srt.mem_cache.layouts.facts import host_lanes

from ..radix_cache import HiRadixCache

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sglang.srt.managers.scheduler_components.metrics_reporter import SchedulerMetricsReporter

    from sglang.srt.mem_cache.layouts.protocol import AnyKVLayoutStrategy

    from ..seam.records import Place
    from .allocator import ServingSlotAllocator

PREFIX: Final = "sglang:kv_layout_"
INTERVAL_SECONDS: Final = 1.0

GAUGES: Final[Mapping[str, str]] = {
    "device_used_tokens": "Slots in use on the device, by requests and the cache, over all ranks.",
    "device_capacity_tokens": "Slots of the device pools of all ranks together.",
    "device_page_imbalance": "Device pages in use in the fullest lane less those in the emptiest.",
    "host_used_tokens": "Logical tokens that the host tier holds, over all ranks.",
    "host_capacity_tokens": "Logical tokens that the host tiers of all ranks can hold together.",
    "host_used_bytes": "Host bytes in use on this rank.",
    "host_page_imbalance": "Host pages in use in the fullest lane less those in the emptiest.",
}
COUNTERS: Final[Mapping[str, str]] = {
    "zero_owned_backups": "Backups of which this rank copied nothing, because others own every page.",
    "refused_backups": "Nodes that left the device without a host copy, since no room could be made for one.",
    "refused_loads": "Load-backs that found no device room even after eviction; the tokens were recomputed.",
    "off_lane_pages": "Pages of requests that went to another lane than their chain's, because that one was full.",
    "received_bytes": "KV bytes that other ranks gave this one after loads, because they have them on their hosts.",
    "page_reads": "Times that this rank read page numbers from its device, which waits for it; expected to stay 0.",
}
# The others are a tree's.
PER_RANK: Final = frozenset({"host_used_bytes", "zero_owned_backups", "received_bytes", "page_reads"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportingRank:
    """A process of a server as ``/metrics`` knows it.

    `labels` differ between any two ranks of a server. `speaks_for_tree` is true for one of the ranks that hold the
    same tree: those of an attention group and of all pipeline stages.
    """

    labels: Mapping[str, str]
    speaks_for_tree: bool

    @classmethod
    def at(cls, place: Place) -> ReportingRank:
        """The rank at `place`, with the labels that the user adds to all metrics."""
        labels = {"tp_rank": str(place.tp_rank), "pp_rank": str(place.pp_rank)}
        if place.dp_rank is not None:
            labels["dp_rank"] = str(place.dp_rank)
        return cls(
            labels={**labels, **(get_observability().extra_metric_labels or {})},
            speaks_for_tree=place.attn_tp_rank == place.attn_cp_rank == place.pp_rank == 0,
        )


def traffic_collector(cache_type: str, rank: ReportingRank) -> RadixCacheMetricsCollector:
    """SGLang's collector for copies and evictions, or the user's, as `rank` uses it. Made once in a process."""
    found = resolve_collector_class(STAT_LOGGER_ROLE_RADIX_CACHE, RadixCacheMetricsCollector)
    if not rank.speaks_for_tree:
        found = type(found.__name__, (_NoTokens, found), {})
    return found(labels={"cache_type": cache_type, **rank.labels})


class _NoTokens(RadixCacheMetricsCollector):
    """The collector of a rank whose tokens another one counts."""

    @override
    def increment_backup_num_tokens(self, num_tokens: int, pool: str) -> None:
        pass

    @override
    def increment_load_back_num_tokens(self, num_tokens: int, pool: str) -> None:
        pass

    @override
    def increment_eviction_num_tokens(self, num_tokens: int) -> None:
        pass

    @override
    def increment_dropped_tokens(self, num_tokens: int, reason: str, pool: str) -> None:
        pass


def report_host_tokens(_result: None, reporter: SchedulerMetricsReporter) -> None:
    """After `_log_hicache_stats`, which counts the rows of one rank's host pool as tokens."""
    cache = reporter.scheduler.tree_cache
    if isinstance(cache, HiRadixCache):
        reporter.stats.hicache_host_used_tokens = _host_used_tokens(cache)
        reporter.stats.hicache_host_total_tokens = _host_capacity_tokens(cache)


class LayoutMetrics:
    """Publishes a cache's state, at most once in `INTERVAL_SECONDS`. Needs prometheus_client."""

    def __init__(self, layout: AnyKVLayoutStrategy, allocator: ServingSlotAllocator, rank: ReportingRank) -> None:
        # SGLang sets PROMETHEUS_MULTIPROC_DIR before this runs; the import must come after it.
        from prometheus_client import Counter, Gauge

        self._allocator = allocator
        labels = {"layout": layout.name, **rank.labels}
        names = list(labels)
        self._gauges = {
            name: Gauge(PREFIX + name, text, names, multiprocess_mode="mostrecent").labels(**labels)
            for name, text in GAUGES.items()
            if rank.speaks_for_tree or name in PER_RANK
        }
        self._counters = {
            name: Counter(PREFIX + name, text, names).labels(**labels)
            for name, text in COUNTERS.items()
            if rank.speaks_for_tree or name in PER_RANK
        }
        self._counted = dict.fromkeys(self._counters, 0)
        self._next = 0.0

    def publish(self, cache: HiRadixCache[Any]) -> None:
        """Publish if it is time."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + INTERVAL_SECONDS
        gauges, counts = self.gauge_values(cache), self.counter_values(cache)
        for name, gauge in self._gauges.items():
            gauge.set(gauges[name])
        for name, counter in self._counters.items():
            counter.inc(counts[name] - self._counted[name])
            self._counted[name] = counts[name]

    def gauge_values(self, cache: HiRadixCache[Any]) -> dict[str, int]:
        """Values of `GAUGES` now."""
        layout, ledger = cache.layout, cache.cache_controller.ledger
        used, room, own = ledger.used_pages, self._allocator.room_pages(), host_lanes(layout).own
        own_pages = 0 if own is None else used[own]
        return {
            "device_used_tokens": self._allocator.size - self._allocator.available_size(),
            "device_capacity_tokens": self._allocator.size,
            "device_page_imbalance": int(room.max() - room.min()),
            "host_used_tokens": _host_used_tokens(cache),
            "host_capacity_tokens": _host_capacity_tokens(cache),
            "host_used_bytes": own_pages * cache.cache_controller.transfer.bytes_per_page,
            "host_page_imbalance": max(used) - min(used),
        }

    def counter_values(self, cache: HiRadixCache[Any]) -> dict[str, int]:
        """Values of `COUNTERS` since the start."""
        stats = cache.stats
        return {
            "zero_owned_backups": stats.zero_owned_backups,
            "refused_backups": stats.refused_backups,
            "refused_loads": stats.refused_loads,
            "off_lane_pages": self._allocator.off_lane_pages,
            "received_bytes": cache.cache_controller.transfer.received_bytes,
            "page_reads": 0 if cache.request_pages is None else cache.request_pages.reads,
        }


def _host_used_tokens(cache: HiRadixCache[Any]) -> int:
    return sum(cache.cache_controller.ledger.used_pages) * cache.layout.page_size


def _host_capacity_tokens(cache: HiRadixCache[Any]) -> int:
    return cache.cache_controller.ledger.capacity_pages * cache.layout.page_size * host_lanes(cache.layout).count


def metrics_as_markdown() -> str:
    """The metrics as the documentation lists them."""
    named = [(f"{PREFIX}{name}", "gauge", name, text) for name, text in GAUGES.items()]
    named += [(f"{PREFIX}{name}_total", "counter", name, text) for name, text in COUNTERS.items()]
    return "".join(
        f"- `{metric}` ({kind}, {'rank' if name in PER_RANK else 'tree'}): {text}\n"
        for metric, kind, name, text in named
    )
