"""How long the runs of copies are once a trace has churned the pools, for backups and for loads.

A *run* is a stretch of pages that are neighbours on the host and on the device: one copy. The first half of the trace
only churns; the plans of the second half are counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvlayouts.bench.figures import Figure
from kvlayouts.bench.subjects import OurSubject, PoolSizes, subjects_runtime
from kvlayouts.common.trace import default_device_tokens, read_trace
from sglang.srt.mem_cache.layouts.exchange import NO_EXCHANGE
from sglang.srt.mem_cache.layouts.pages import NO_PAGES

if TYPE_CHECKING:
    from sglang.srt.managers.cache_controller import LayerLoadingEvent
    from sglang.srt.mem_cache.l2_transfer import L2TransferEngine, TransferCompletion

    from kvlayouts.bench.config import BenchConfig
    from kvlayouts.bench.figures import OnStep
    from kvlayouts.common.trace import Trace
    from sglang.srt.mem_cache.hicache.copies.transfer import Transfer
    from sglang.srt.mem_cache.layouts import CopyPlan, PageExchange
    from sglang.srt.mem_cache.layouts.pages import PageArray

AT_LEAST = (1, 4, 16, 64)
PAGE_SIZE = 64
RANKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """Pools of one rank, larger where a prompt needs it, and how far the trace's 512-token blocks are scaled down."""

    name: str
    rank_tokens: int
    block_tokens: int


class PlanRecorder:
    """A transfer that notes the lengths of runs, in pages, and hands on."""

    def __init__(self, inner: Transfer) -> None:
        self._inner = inner
        self.engine: L2TransferEngine = inner.engine
        self.lengths: dict[str, list[PageArray]] = {"backup": [], "load": []}

    @property
    def bytes_per_page(self) -> int:
        """The inner transfer's."""
        return self._inner.bytes_per_page

    @property
    def received_bytes(self) -> int:
        """The inner transfer's."""
        return self._inner.received_bytes

    def back_up(self, copies: CopyPlan) -> TransferCompletion:
        """See `Transfer.back_up`."""
        self.lengths["backup"].append(copies.lengths)
        return self._inner.back_up(copies)

    def load(
        self, copies: CopyPlan, producer: LayerLoadingEvent, exchange: PageExchange = NO_EXCHANGE
    ) -> TransferCompletion:
        """See `Transfer.load`."""
        self.lengths["load"].append(copies.lengths)
        return self._inner.load(copies, producer, exchange)


def bench_runs(config: BenchConfig, trace: Trace, on_step: OnStep) -> list[Figure]:
    """Share of the copied pages that lie in runs of at least so many pages, for both layouts and two pressures."""
    pressures = (
        Pressure(name="64 tokens a block", rank_tokens=65_536, block_tokens=64),
        Pressure(name="512 tokens a block", rank_tokens=262_144, block_tokens=512),
    )
    figures = []
    total = 2 * len(pressures)
    for number, (pressure, ranks) in enumerate((p, r) for p in pressures for r in (1, RANKS)):
        figures += _churn(config, pressure, ranks)
        on_step("runs", number + 1, total)
    return figures


def _churn(config: BenchConfig, pressure: Pressure, ranks: int) -> list[Figure]:
    requests = len(read_trace(config.trace).requests)
    trace = read_trace(config.trace, block_tokens=pressure.block_tokens, max_requests=min(config.requests, requests))
    rank_tokens = max(pressure.rank_tokens, default_device_tokens(trace, PAGE_SIZE))
    sizes = PoolSizes(page_size=PAGE_SIZE, device_tokens=rank_tokens * ranks)
    with subjects_runtime(sizes):
        subject = OurSubject("identity" if ranks == 1 else "cp_shared", ranks, sizes)
        half = len(trace.requests) // 2
        for request in trace.requests[:half]:
            subject.serve(trace.token_ids(request))
        recorder = PlanRecorder(subject.cache.cache_controller.transfer)
        subject.cache.cache_controller.transfer = recorder
        for request in trace.requests[half:]:
            subject.serve(trace.token_ids(request))
        subject.close()
    return [
        _figure(f"{subject.name}, {pressure.name}: {direction}s", least, lengths)
        for direction, lengths in recorder.lengths.items()
        for least in AT_LEAST
    ]


def _figure(what: str, least: int, lengths: list[PageArray]) -> Figure:
    """Beside the share, the greatest that could be: with all pages of each copy in one run. None without copies."""
    whole = [runs.sum(keepdims=True) for runs in lengths]
    return Figure(
        bench="runs",
        case=f"{what}, in runs >= {least}",
        value=run_share(lengths, least),
        unit="%",
        baseline=run_share(whole, least),
        baseline_name="one run a copy",
    )


def run_share(lengths: list[PageArray], least: int) -> float | None:
    """Share of all pages that lie in runs of at least `least` pages, in percent; None without pages."""
    runs = np.concatenate([NO_PAGES, *lengths])
    pages = int(runs.sum())
    return 100 * float(runs[runs >= least].sum()) / pages if pages else None
