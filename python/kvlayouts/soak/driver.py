"""Runs a soak on real rank processes and joins what they found."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlayouts.ranks.processes import run_job
from kvlayouts.soak.config import SoakResult

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvlayouts.ranks.job import RankOrder
    from kvlayouts.ranks.outbox import Outbox
    from kvlayouts.soak.config import SoakConfig, SoakReport

PEER_SECONDS = 60.0
"""A rank that waits longer than this for another one within a collective fails."""

SUMMED_FAULTS = ("delay",)
"""Faults that each rank counts for itself; the others are the same event on every rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SoakJob:
    """A soak, for `run_job`."""

    config: SoakConfig

    def run(self, order: RankOrder, outbox: Outbox) -> None:
        """The work of one rank."""
        from kvlayouts.soak.worker import soak

        soak(self.config, order, outbox)


def run_soak(
    config: SoakConfig, on_progress: Callable[[str, int, int], None], *, peer_seconds: float = PEER_SECONDS
) -> SoakResult:
    """Soak until the events or minutes are over or a rank finds a violation.

    `on_progress` hears the layout, percent done, and 100. Raises `RankError`, naming the rank, if one dies
    or lets its peers wait for `peer_seconds`; no process is left then.
    """
    finished = run_job(
        SoakJob(config=config),
        ranks=config.ranks,
        on_progress=lambda label, done: on_progress(label, done, 100),
        peer_seconds=peer_seconds,
    )
    messages = [finished[rank][config.layout] for rank in range(config.ranks)]
    reports: list[SoakReport] = [message.report for message in messages]
    faults = Counter(reports[0].faults)
    for fault in set(SUMMED_FAULTS) & set(faults):
        faults[fault] = sum(report.faults[fault] for report in reports)
    violations = tuple(
        f"rank {rank}: {violation}" for rank, report in enumerate(reports) for violation in report.violations
    )
    broken = next((report for report in reports if report.violations), reports[0])
    return SoakResult(
        events=reports[0].events,
        faults={fault: faults[fault] for fault in config.faults},
        checks=reports[0].checks,
        verified_tokens=sum(report.verified_tokens for report in reports),
        violations=violations,
        last_events=broken.last_events,
        rss_start_bytes=sum(report.rss_start_bytes for report in reports),
        rss_end_bytes=sum(report.rss_end_bytes for report in reports),
        seconds=max(message.seconds for message in messages),
    )
