from typing import type_check_only

from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
from sglang.srt.observability.metrics_collector import SchedulerStats

@type_check_only
class _Scheduler:
    tree_cache: BasePrefixCache

class SchedulerMetricsReporter:
    scheduler: _Scheduler
    stats: SchedulerStats
    def _log_hicache_stats(self) -> None: ...
