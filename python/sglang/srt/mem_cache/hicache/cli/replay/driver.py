"""Starts one process a rank, listens to them, and turns their reports into results.

The ranks are forked from a server process that has imported SGLang once, since that import takes longer than
many a replay. If one rank fails or dies, the others are ended at once; none outlives `run_replay`.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.hicache.cli.replay.messages import Done, Failed, Finished, Message, Progress
from sglang.srt.mem_cache.hicache.cli.replay.results import LayoutResult, ReplayError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerProcess

    from sglang.srt.mem_cache.hicache.cli.replay.results import ReplayConfig
    from sglang.srt.mem_cache.hicache.cli.replay.trace import Trace

_WORKER_MODULE = "sglang.srt.mem_cache.hicache.cli.replay.worker"
PEER_SECONDS = 120.0
"""A rank that waits longer than this for another one within a collective fails."""

_END_SECONDS = 5.0


def run_replay(
    config: ReplayConfig, trace: Trace, on_progress: Callable[[str, int, int], None]
) -> dict[str, LayoutResult]:
    """Replay `trace` with each of `config.layouts`, and return the results by layout.

    `on_progress` hears layout, requests done, requests in all. Raises `ReplayError`, naming the rank, if one
    fails, dies or hears nothing from its peers for `PEER_SECONDS`; no process is left then, or ever.
    """
    with tempfile.TemporaryDirectory(prefix="kvlayouts-") as folder, _ranks(config, trace, Path(folder)) as ranks:
        finished = _listen(config, ranks, lambda layout, done: on_progress(layout, done, len(trace.requests)))
    return {
        layout: _combine(trace, [finished[rank][layout] for rank in range(config.cp_size)])
        for layout in config.layouts
    }


class _Rank:
    def __init__(self, number: int, process: ForkServerProcess, pipe: Connection) -> None:
        self.number = number
        self.process = process
        self.pipe = pipe


@contextmanager
def _ranks(config: ReplayConfig, trace: Trace, folder: Path) -> Iterator[list[_Rank]]:
    """The rank processes; ended when the context is left, however that happens."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores; inherited by the fork server
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([_WORKER_MODULE])
    from sglang.srt.mem_cache.hicache.cli.replay.launch import start_rank

    ranks: list[_Rank] = []
    try:
        for number in range(config.cp_size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=start_rank,
                args=(config, trace, number, str(folder / "rendezvous"), PEER_SECONDS, theirs),
                name=f"kvlayouts-rank-{number}",
                daemon=True,
            )
            process.start()
            theirs.close()
            ranks.append(_Rank(number, process, ours))
        yield ranks
    finally:
        _end(ranks)


def _end(ranks: list[_Rank]) -> None:
    for rank in ranks:
        if rank.process.is_alive():
            rank.process.terminate()
    for rank in ranks:
        rank.process.join(_END_SECONDS)
        if rank.process.is_alive():
            rank.process.kill()
            rank.process.join()
        rank.pipe.close()


def _listen(
    config: ReplayConfig, ranks: list[_Rank], on_progress: Callable[[str, int], None]
) -> dict[int, dict[str, Finished]]:
    """Collect every rank's reports until all are done. Raises `ReplayError` for the first rank that fails."""
    finished: dict[int, dict[str, Finished]] = {rank.number: {} for rank in ranks}
    listening = {rank.pipe: rank for rank in ranks}
    while listening:
        for ready in wait(list(listening)):
            rank = next(rank for pipe, rank in listening.items() if pipe is ready)
            message = _receive(rank)
            if isinstance(message, Progress):
                on_progress(message.layout, message.done)
            elif isinstance(message, Finished):
                finished[rank.number][message.layout] = message
            elif isinstance(message, Done):
                del listening[rank.pipe]
            else:
                raise ReplayError(f"rank {rank.number} of {config.cp_size} failed: {message.error}\n{message.details}")
    return finished


def _receive(rank: _Rank) -> Message:
    try:
        message: Message = rank.pipe.recv()
    except EOFError:
        rank.process.join(_END_SECONDS)
        code = rank.process.exitcode
        return Failed(error=f"its process ended without a word (exit code {code})", details="")
    return message


def _combine(trace: Trace, finished: list[Finished]) -> LayoutResult:
    """One result out of the ranks' reports. Logical counts that differ between ranks count as disagreement."""
    reports = [message.report for message in finished]
    first = reports[0]
    logical = {
        (report.device_hit_tokens, report.host_hit_tokens, report.computed_tokens, report.used_pages_per_rank)
        for report in reports
    }
    used = first.used_pages_per_rank
    return LayoutResult(
        requests=first.requests,
        prompt_tokens=trace.prompt_tokens,
        device_hit_tokens=first.device_hit_tokens,
        host_hit_tokens=first.host_hit_tokens,
        computed_tokens=first.computed_tokens,
        logical_capacity_tokens=first.logical_capacity_tokens,
        device_bytes_per_rank=first.device_bytes,
        host_bytes_per_rank=first.host_bytes,
        d2h_bytes_per_rank=tuple(report.stats.backed_up_bytes for report in reports),
        h2d_bytes_per_rank=tuple(report.stats.loaded_bytes for report in reports),
        page_imbalance=max(used) * len(used) / sum(used) if sum(used) else 1.0,
        write_acks_per_rank=tuple(report.stats.backups for report in reports),
        load_acks_per_rank=tuple(report.stats.loads for report in reports),
        digests_equal=len(logical) == 1 and all(report.digests_equal for report in reports),
        verified_tokens=sum(report.verified_tokens for report in reports),
        mismatched_tokens=sum(report.mismatched_tokens for report in reports),
        seconds=max(message.seconds for message in finished),
        evicted_device_tokens=first.stats.evicted_device_tokens,
        evicted_host_tokens=first.stats.evicted_host_tokens,
        refused_backups=first.stats.refused_backups,
        hit_series=first.hit_series,
    )
