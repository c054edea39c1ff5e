"""One rank of a replay: the real tree, controller, allocator and pools, driven as a scheduler would.

For each request of the trace:

    match -> load back -> lock -> allocate -> check cached rows, write new ones -> insert -> unlock -> settle acks

The rank writes what it computes, and checks all that it stores, whoever loaded it. It learns its rows from the strategy
and never asks which strategy that is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from sglang.srt.mem_cache.radix_cache import RadixKey

from kvlayouts.common.trace import token_ids
from kvlayouts.ranks.cache import build_rank_cache
from kvlayouts.ranks.memory import LAYERS
from kvlayouts.ranks.rows import stored_rows
from kvlayouts.replay.content import KVContent, Words, prefix_sums
from kvlayouts.replay.geometries import GEOMETRIES
from kvlayouts.replay.messages import RankReport
from kvlayouts.replay.results import HitPoint, HitSeriesRecorder
from sglang.srt.mem_cache.hicache.check.digest import tree_digest
from sglang.srt.mem_cache.hicache.device.pools import bytes_of as device_bytes_of
from sglang.srt.mem_cache.hicache.host.pools import host_bytes_of
from sglang.srt.mem_cache.hicache.settings import HiCacheSettings
from sglang.srt.mem_cache.hicache.tree.calls import Insertion
from sglang.srt.mem_cache.layouts import LayoutConfig, PoolKind
from sglang.srt.mem_cache.layouts.errors import LayoutInvariantError
from sglang.srt.mem_cache.layouts.facts import host_lanes, page_rows
from sglang.srt.mem_cache.layouts.pages import PageArray, pages_of_tokens
from sglang.srt.mem_cache.layouts.rounding import ceil_div

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvlayouts.common.trace import Trace, TraceRequest
    from kvlayouts.replay.config import ReplayConfig

CHECKPOINTS = 16
SAMPLED_ONE_IN = 16


class RankReplay:
    """Replays a trace on one rank. SGLang's globals, CPU support and process group are the caller's."""

    def __init__(self, config: ReplayConfig, layout_name: str, rank: int) -> None:
        self._config = config
        built = build_rank_cache(
            LayoutConfig(
                name=layout_name,
                page_size=config.page_size,
                shard_size=config.cp_size,
                shard_rank=rank,
                options=config.layout_options,
            ),
            geometry=GEOMETRIES[PoolKind(config.pool)],
            rank_tokens=config.device_tokens,
            settings=HiCacheSettings(
                write_policy=config.policy,
                mem_layout=config.host_layout,
                host_ratio=config.host_ratio,
                ranks_on_machine=config.cp_size,
            ),
            eviction_policy=config.eviction_policy,
        )
        self.device_pool, self.layout = built.device_pool, built.layout
        self.allocator, self.cache = built.allocator, built.cache
        self._lane_pages = self.allocator.num_pages // self.layout.lane_count
        self._content = KVContent(self.device_pool, page_size=page_rows(self.layout), seed=config.seed)
        self._sampler = np.random.default_rng(config.seed)
        self._evicted = (0, 0)
        self._verified = 0
        self._mismatched = 0

    def run(self, trace: Trace, on_request: Callable[[int], None]) -> RankReport:
        """Replay every request and report; `on_request` hears the number of requests done."""
        requests = len(trace.requests)
        series = HitSeriesRecorder(requests)
        every = max(1, requests // CHECKPOINTS)
        digests_equal = True
        for done, request in enumerate(trace.requests, 1):
            series.add(self._point(done, *self._serve(request)))
            if done % every == 0 or done == requests:
                digests_equal &= self._digests_equal()
            on_request(done)
        return self._report(digests_equal, series.series())

    # One request.

    def _serve(self, request: TraceRequest) -> tuple[int, int, int]:
        """Returns the prompt's tokens from device, from host, and computed."""
        tokens = token_ids(request, self._config.block_tokens)
        sums = prefix_sums(np.frombuffer(tokens, dtype=np.int64), self._config.seed)
        # The last token of a prompt is always computed: its logits are the answer.
        match = self.cache.match(RadixKey(tokens[:-1]))
        loaded, node = match.slots[:0], match.device_node
        if match.host_tokens:
            loaded, node = self.cache.bring_back(match.host_node)
        self._wait_for_load()
        self.cache.inc_lock_ref(node)
        cached = torch.cat([match.slots, loaded])
        pages = self._allocate(tokens.tobytes(), len(tokens), pages_of_tokens(cached, self._config.page_size))
        cached_pages = len(cached) // self._config.page_size
        self._check(pages[:cached_pages], sums)
        self._compute(pages, cached_pages, sums)
        self._insert(RadixKey(tokens), pages, cached_pages)
        self.cache.dec_lock_ref(node)
        self.cache.check_hicache_events()
        return len(match.slots), len(loaded), len(tokens) - len(cached)

    def _wait_for_load(self) -> None:
        """Wait for each layer, as a forward pass does."""
        controller = self.cache.cache_controller
        counter = controller.layer_done_counter
        counter.set_consumer(self.cache.ready_to_load_host_cache())
        for layer in range(LAYERS):
            counter.wait_until(layer)

    def _allocate(self, token_bytes: bytes, tokens: int, cached: PageArray) -> PageArray:
        """The prompt's pages: the cached ones, then new ones in the lanes that follow."""
        page_size = self._config.page_size
        base = self.layout.chain_base(token_bytes[: page_size * 8], "")
        new_pages = ceil_div(tokens, page_size) - len(cached)
        fresh = self.cache.alloc_slots(self.layout.extend_lanes(base, len(cached), new_pages))
        if fresh is None:
            raise LayoutInvariantError(f"no room for {new_pages} pages though nothing but this prompt is locked")
        return np.concatenate([cached, fresh])

    def _insert(self, key: RadixKey, pages: PageArray, cached_pages: int) -> None:
        """Give the whole pages to the tree; free what it had already, and the partial page at the end."""
        whole = len(key) // self._config.page_size
        result = self.cache.put(Insertion(key=key, value=self.cache.slots.slots(pages[:whole])))
        known = result.known_tokens // self._config.page_size
        self.cache.slots.free_slot_pages(np.concatenate([pages[cached_pages:known], pages[whole:]]))

    # Rows.

    def _compute(self, pages: PageArray, cached_pages: int, sums: Words) -> None:
        """Write the rows of the prompt's new pages. A partial page at the end is padded with its last token's."""
        padded = np.pad(sums, (0, len(pages) * self._config.page_size - len(sums)), mode="edge")
        by_page = padded.reshape(len(pages), -1)[cached_pages:]
        self._content.write(*stored_rows(self.layout, pages[cached_pages:], by_page))

    def _check(self, pages: PageArray, sums: Words) -> None:
        """Compare the rows of cached pages with what their prompt says they are."""
        if self._config.verify == "off" or not len(pages):
            return
        by_page = sums[: len(pages) * self._config.page_size].reshape(len(pages), -1)
        chosen = np.arange(len(pages))
        if self._config.verify == "sample":
            count = ceil_div(len(pages), SAMPLED_ONE_IN)
            chosen = np.sort(self._sampler.choice(len(pages), size=count, replace=False))
        rows, expected = stored_rows(self.layout, pages[chosen], by_page[chosen])
        self._verified += expected.size
        self._mismatched += self._content.mismatched_tokens(rows, expected)

    # Reporting.

    def _digests_equal(self) -> bool:
        mine = torch.tensor([tree_digest(self.cache)], dtype=torch.int64)
        found = [torch.empty_like(mine) for _ in range(self._config.cp_size)]
        dist.all_gather(found, mine)
        return len({int(digest) for digest in found}) == 1

    def _point(self, done: int, device: int, host: int, computed: int) -> HitPoint:
        """The request that was just served, `done` of them so far, as a window of its own."""
        stats = self.cache.stats
        before, self._evicted = self._evicted, (stats.evicted_device_tokens, stats.evicted_host_tokens)
        return HitPoint(
            request_index=done,
            device_hit_tokens=device,
            host_hit_tokens=host,
            computed_tokens=computed,
            evicted_device_tokens=self._evicted[0] - before[0],
            evicted_host_tokens=self._evicted[1] - before[1],
            device_pages_per_lane=tuple((self._lane_pages - self.cache.slots.room_pages()).tolist()),
            host_pages_per_lane=self.cache.cache_controller.ledger.used_pages,
        )

    def _report(self, digests_equal: bool, series: tuple[HitPoint, ...]) -> RankReport:
        last = series[-1]
        stats, lanes = self.cache.stats, host_lanes(self.layout)
        host_pages = self.cache.cache_controller.ledger.capacity_pages
        return RankReport(
            requests=last.request_index,
            device_hit_tokens=sum(point.device_hit_tokens for point in series),
            host_hit_tokens=sum(point.host_hit_tokens for point in series),
            computed_tokens=sum(point.computed_tokens for point in series),
            logical_capacity_tokens=self.allocator.size,
            host_capacity_tokens=host_pages * self._config.page_size * lanes.count,
            device_bytes=device_bytes_of(self.device_pool),
            host_bytes=host_bytes_of(self.cache.token_to_kv_pool_host),
            device_pages=last.device_pages_per_lane[self.layout.lane],
            host_pages=0 if lanes.own is None else last.host_pages_per_lane[lanes.own],
            device_pages_per_lane=last.device_pages_per_lane,
            host_pages_per_lane=last.host_pages_per_lane,
            device_capacity_pages=self._lane_pages,
            host_capacity_pages=host_pages,
            backups=stats.backups,
            backed_up_bytes=stats.backed_up_bytes,
            refused_backups=stats.refused_backups,
            loads=stats.loads,
            loaded_bytes=stats.loaded_bytes,
            received_bytes=self.cache.cache_controller.transfer.received_bytes,
            evicted_device_tokens=stats.evicted_device_tokens,
            evicted_host_tokens=stats.evicted_host_tokens,
            digests_equal=digests_equal,
            tree_digest=f"{tree_digest(self.cache):016x}",
            verified_tokens=self._verified,
            mismatched_tokens=self._mismatched,
            hit_series=series,
        )
