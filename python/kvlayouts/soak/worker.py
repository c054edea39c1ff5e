"""The work of one rank's process in a soak: steps, checks at an interval, and one comparison of all ranks a check."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import psutil
import torch
import torch.distributed as dist

from kvlayouts.ranks.cache import build_rank_cache
from kvlayouts.ranks.messages import Finished, Progress
from kvlayouts.ranks.setup import joined_group
from kvlayouts.replay.content import KVContent
from kvlayouts.soak.config import SoakReport, repeat_command
from kvlayouts.soak.events import SoakRank, drain
from kvlayouts.soak.geometries import GEOMETRIES
from sglang.srt.mem_cache.hicache.check.digest import tree_digest
from sglang.srt.mem_cache.hicache.settings import HiCacheSettings
from sglang.srt.mem_cache.layouts import LayoutConfig, PoolKind, create_layout
from sglang.srt.mem_cache.layouts.facts import host_lanes, page_rows

if TYPE_CHECKING:
    from kvlayouts.ranks.job import RankOrder
    from kvlayouts.ranks.outbox import Outbox
    from kvlayouts.soak.config import SoakConfig
    from sglang.srt.mem_cache.hicache.radix_cache import HiRadixCache

WARM_UP_CHECKS = 5
"""Checks after which memory counts as warm: the start of `rss_growth`."""


def soak(config: SoakConfig, order: RankOrder, outbox: Outbox) -> None:
    """Soak one rank and send its report. Ends early, on all ranks, at the first violation on any of them."""
    logging.getLogger("sglang.srt.mem_cache.hicache").setLevel(logging.ERROR)  # refusals are what a soak provokes
    with joined_group(order, page_size=config.page_size):
        run = _Soak(config, order.rank)
        started = time.perf_counter()
        while not run.ended:
            run.advance(time.perf_counter() - started)
            if order.rank == 0:
                outbox.send(Progress(label=config.layout, done=run.progress(time.perf_counter() - started)))
        outbox.send(Finished(label=config.layout, seconds=time.perf_counter() - started, report=run.report()))


class _Soak:
    def __init__(self, config: SoakConfig, rank: int) -> None:
        self._config = config
        self._rank = rank
        cache, content = _build(config, rank)
        self._soak = SoakRank(config, cache, content, rank)
        self._process = psutil.Process()
        self._checks = 0
        self._violations: list[str] = []
        self._rss_start = self._rss_end = 0
        self.ended = False

    def advance(self, seconds: float) -> None:
        """Run to the next check, check, and compare with the other ranks."""
        until = self._soak.events + self._config.check_every
        if self._config.events is not None:
            until = min(until, self._config.events)
        try:
            while self._soak.events < until:
                self._soak.step()
        except Exception as error:
            # The ranks are out of step now and cannot compare any more: this one fails, and says how to repeat it.
            recent = "; ".join(list(self._soak.last_events)[-3:])
            again = repeat_command(self._config, self._soak.events + 1)
            error.add_note(f"soak at event {self._soak.events}, after {recent}; again with: {again}")
            raise
        self._violations += self._soak.check()
        over = seconds >= self._config.minutes * 60 if self._config.events is None else until == self._config.events
        self._compare(over)

    def _compare(self, over: bool) -> None:
        self._checks += 1
        mine = torch.tensor([tree_digest(self._soak.cache), len(self._violations), int(over)])
        found = [torch.empty_like(mine) for _ in range(self._config.ranks)]
        dist.all_gather(found, mine)
        digests = [int(values[0]) for values in found]
        if len(set(digests)) > 1:
            self._violations.append(f"tree digests of the ranks differ: {digests}")
        broken = any(int(values[1]) for values in found) or len(set(digests)) > 1
        rss = self._process.memory_info().rss
        if self._checks <= WARM_UP_CHECKS:
            self._rss_start = rss
        self._rss_end = rss
        # Rank 0's clock decides, so that all ranks stop at the same event.
        if broken or bool(found[0][2]):
            self.ended = True
            if not broken:
                self._violations += drain(self._soak)

    def progress(self, seconds: float) -> int:
        """Percent of the way."""
        whole = self._config.events or self._config.minutes * 60
        part = self._soak.events if self._config.events is not None else seconds
        return min(100, int(100 * part / whole))

    def report(self) -> SoakReport:
        """What this rank found."""
        return SoakReport(
            events=self._soak.events,
            faults=dict(self._soak.faults),
            checks=self._checks,
            verified_tokens=self._soak.requests.verified_tokens,
            violations=tuple(self._violations),
            last_events=tuple(self._soak.last_events),
            rss_start_bytes=self._rss_start,
            rss_end_bytes=self._rss_end,
        )


def _build(config: SoakConfig, rank: int) -> tuple[HiRadixCache[Any], KVContent]:
    choice = LayoutConfig(
        name=config.layout,
        page_size=config.page_size,
        shard_size=config.ranks,
        shard_rank=rank,
        options=config.layout_options,
    )
    layout = create_layout(choice)
    rank_pages = config.device_pages(layout.lane_count)
    built = build_rank_cache(
        choice,
        geometry=GEOMETRIES[PoolKind(config.pool)],
        rank_tokens=rank_pages * page_rows(layout),
        settings=HiCacheSettings(
            write_policy=config.policy,
            mem_layout=config.host_layout,
            host_ratio=config.host_ratio * layout.lane_count / host_lanes(layout).count,  # as tight for every layout
            ranks_on_machine=config.ranks,
        ),
        eviction_policy=config.eviction_policy,
    )
    return built.cache, KVContent(built.device_pool, page_size=page_rows(layout), seed=config.seed)
