"""Replays a trace on real rank processes and turns their reports into results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlayouts.ranks.processes import PEER_SECONDS, run_job
from kvlayouts.replay.results import LayoutResult, page_imbalance

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvlayouts.common.trace import Trace
    from kvlayouts.ranks.job import RankOrder
    from kvlayouts.ranks.messages import Finished
    from kvlayouts.ranks.outbox import Outbox
    from kvlayouts.replay.config import ReplayConfig
    from kvlayouts.replay.messages import RankReport


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayJob:
    """A replay, for `run_job`."""

    config: ReplayConfig
    trace: Trace

    def run(self, order: RankOrder, outbox: Outbox) -> None:
        """The work of one rank."""
        from kvlayouts.replay.worker import replay_layouts

        replay_layouts(self.config, self.trace, order, outbox)


def run_replay(
    config: ReplayConfig,
    trace: Trace,
    on_progress: Callable[[str, int, int], None],
    *,
    peer_seconds: float = PEER_SECONDS,
) -> dict[str, LayoutResult]:
    """Replay `trace` with each of `config.layouts`, and return the results by layout.

    `on_progress` hears layout, requests done, requests in all. Raises `RankError`, naming the rank, if one fails,
    dies or lets its peers wait for `peer_seconds` within a collective; no process is left then.
    """
    finished = run_job(
        ReplayJob(config=config, trace=trace),
        ranks=config.cp_size,
        on_progress=lambda layout, done: on_progress(layout, done, len(trace.requests)),
        peer_seconds=peer_seconds,
    )
    return {
        layout: _combine(trace, [finished[rank][layout] for rank in range(config.cp_size)]) for layout in config.layouts
    }


def _combine(trace: Trace, finished: list[Finished]) -> LayoutResult:
    """One result out of the ranks' reports. Logical counts that differ between ranks count as disagreement."""
    reports: list[RankReport] = [message.report for message in finished]
    first = reports[0]
    logical = {
        (
            report.device_hit_tokens,
            report.host_hit_tokens,
            report.computed_tokens,
            report.device_pages_per_lane,
            report.host_pages_per_lane,
        )
        for report in reports
    }
    return LayoutResult(
        requests=first.requests,
        prompt_tokens=trace.prompt_tokens,
        device_hit_tokens=first.device_hit_tokens,
        host_hit_tokens=first.host_hit_tokens,
        computed_tokens=first.computed_tokens,
        logical_capacity_tokens=first.logical_capacity_tokens,
        device_bytes_per_rank=first.device_bytes,
        host_bytes_per_rank=first.host_bytes,
        d2h_bytes_per_rank=tuple(report.backed_up_bytes for report in reports),
        h2d_bytes_per_rank=tuple(report.loaded_bytes for report in reports),
        host_capacity_tokens=first.host_capacity_tokens,
        received_bytes_per_rank=tuple(report.received_bytes for report in reports),
        device_pages_per_rank=tuple(report.device_pages for report in reports),
        host_pages_per_rank=tuple(report.host_pages for report in reports),
        device_capacity_pages=first.device_capacity_pages,
        host_capacity_pages=first.host_capacity_pages,
        page_imbalance=page_imbalance(first.device_pages_per_lane, first.host_pages_per_lane),
        write_acks_per_rank=tuple(report.backups for report in reports),
        load_acks_per_rank=tuple(report.loads for report in reports),
        digests_equal=len(logical) == 1 and all(report.digests_equal for report in reports),
        tree_digest=first.tree_digest,
        verified_tokens=sum(report.verified_tokens for report in reports),
        mismatched_tokens=sum(report.mismatched_tokens for report in reports),
        seconds=max(message.seconds for message in finished),
        evicted_device_tokens=first.evicted_device_tokens,
        evicted_host_tokens=first.evicted_host_tokens,
        refused_backups=first.refused_backups,
        hit_series=first.hit_series,
    )
