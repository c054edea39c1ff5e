"""What a layout adds to SGLang's ``/metrics``, one series a rank of the shard group.

SGLang itself counts backed-up, loaded and evicted tokens and bytes of the cache; the names below begin with
``sglang:kv_layout_``. Tokens are logical, equal on all ranks; bytes are this rank's.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from sglang.srt.runtime_context import get_observability

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..radix_cache import HiRadixCache
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
    "page_reads": "Times that page numbers were read from the device, which waits for it; expected to stay 0.",
}


class LayoutMetrics:
    """Publishes a cache's state, at most once in `INTERVAL_SECONDS`. Needs prometheus_client."""

    def __init__(self, cache: HiRadixCache[Any], allocator: ServingSlotAllocator) -> None:
        # SGLang sets PROMETHEUS_MULTIPROC_DIR before this runs; the import must come after it.
        from prometheus_client import Counter, Gauge

        self._cache = cache
        self._allocator = allocator
        labels = {"layout": cache.layout.name, "rank": str(cache.layout.lane)}
        labels.update(get_observability().extra_metric_labels or {})
        names = list(labels)
        self._gauges = {
            name: Gauge(PREFIX + name, text, names, multiprocess_mode="mostrecent").labels(**labels)
            for name, text in GAUGES.items()
        }
        self._counters = {name: Counter(PREFIX + name, text, names).labels(**labels) for name, text in COUNTERS.items()}
        self._counted = dict.fromkeys(COUNTERS, 0)
        self._next = 0.0

    def publish(self) -> None:
        """Publish if it is time."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + INTERVAL_SECONDS
        for name, value in self.gauge_values().items():
            self._gauges[name].set(value)
        for name, value in self.counter_values().items():
            self._counters[name].inc(value - self._counted[name])
            self._counted[name] = value

    def gauge_values(self) -> dict[str, int]:
        """Values of `GAUGES` now."""
        layout, ledger = self._cache.layout, self._cache.cache_controller.ledger
        used, room = ledger.used_pages, self._allocator.room_pages()
        own = used[layout.lane] * layout.page_size
        return {
            "device_used_tokens": self._allocator.size - self._allocator.available_size(),
            "device_capacity_tokens": self._allocator.size,
            "device_page_imbalance": int(room.max() - room.min()),
            "host_used_tokens": sum(used) * layout.page_size,
            "host_capacity_tokens": ledger.capacity_pages * layout.page_size * layout.lane_count,
            "host_used_bytes": own * self._cache.cache_controller.transfer.bytes_per_token,
            "host_page_imbalance": max(used) - min(used),
        }

    def counter_values(self) -> dict[str, int]:
        """Values of `COUNTERS` since the start."""
        stats = self._cache.stats
        return {
            "zero_owned_backups": stats.zero_owned_backups,
            "refused_backups": stats.refused_backups,
            "refused_loads": stats.refused_loads,
            "off_lane_pages": self._allocator.off_lane_pages,
            "page_reads": 0 if self._cache.request_pages is None else self._cache.request_pages.reads,
        }


def metrics_as_markdown() -> str:
    """The metrics as the documentation lists them."""
    lines = ["| Metric | Kind | Meaning |", "|---|---|---|"]
    lines += [f"| `{PREFIX}{name}` | gauge | {text} |" for name, text in GAUGES.items()]
    lines += [f"| `{PREFIX}{name}_total` | counter | {text} |" for name, text in COUNTERS.items()]
    return "\n".join(lines) + "\n"
