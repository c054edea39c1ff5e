"""`TrafficReport`: what was copied, evicted and dropped, in the cache's own totals and in SGLang's metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .stats import CacheStats

if TYPE_CHECKING:
    from sglang.srt.managers.cache_controller import HiCacheAck
    from sglang.srt.observability.metrics_collector import RadixCacheMetricsCollector


class TrafficReport:
    """Counts into `stats` and, in a server with metrics, into `collector`."""

    def __init__(self, collector: RadixCacheMetricsCollector | None = None) -> None:
        self.stats = CacheStats()
        self.collector = collector

    def backed_up(self, ack: HiCacheAck) -> None:
        """The backups of an ack are settled."""
        stats, collector = self.stats, self.collector
        stats.backups += len(ack.node_ids)
        stats.backed_up_tokens += ack.num_tokens
        stats.backed_up_bytes += ack.num_bytes
        if collector is None:
            return
        for pool, tokens in (ack.num_tokens_by_pool or {}).items():
            collector.increment_backup_num_tokens(num_tokens=tokens, pool=pool)
        collector.increment_backup_num_bytes(ack.num_bytes)
        if ack.timing_enabled:
            collector.observe_backup_duration(_seconds(ack))

    def loaded(self, ack: HiCacheAck) -> None:
        """The loads of an ack are settled."""
        stats, collector = self.stats, self.collector
        stats.loads += len(ack.node_ids)
        stats.loaded_tokens += ack.num_tokens
        stats.loaded_bytes += ack.num_bytes
        if collector is None:
            return
        for pool, tokens in (ack.num_tokens_by_pool or {}).items():
            collector.increment_load_back_num_tokens(num_tokens=tokens, pool=pool)
        collector.increment_load_back_num_bytes(ack.num_bytes)
        if ack.timing_enabled:
            collector.observe_load_back_duration(_seconds(ack))

    def evicted_from_device(self, tokens: int, seconds: float) -> None:
        """Leaves of `tokens` left the device, which took so long."""
        self.stats.evicted_device_tokens += tokens
        if self.collector is not None and tokens:
            self.collector.observe_eviction_duration(seconds)
            self.collector.increment_eviction_num_tokens(tokens)

    def dropped(self, tokens: int) -> None:
        """A leaf was deleted under write_back because the host had no room for it."""
        self.stats.dropped_tokens += tokens
        if self.collector is not None:
            self.collector.increment_dropped_tokens(num_tokens=tokens, reason="host_pressure", pool="kv")


def _seconds(ack: HiCacheAck) -> float:
    """Time between the events of a finished ack."""
    return ack.start_event.elapsed_time(ack.finish_event) / 1000.0
