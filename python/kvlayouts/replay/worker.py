"""The work of one rank's process in a replay: layout by layout."""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING

import torch.distributed as dist

from kvlayouts.ranks.messages import Finished, Progress
from kvlayouts.ranks.setup import joined_group
from kvlayouts.replay.rank import RankReplay

if TYPE_CHECKING:
    from kvlayouts.common.trace import Trace
    from kvlayouts.ranks.job import RankOrder
    from kvlayouts.ranks.outbox import Outbox
    from kvlayouts.replay.config import ReplayConfig

PROGRESS_INTERVAL_SECONDS = 0.2


def replay_layouts(config: ReplayConfig, trace: Trace, order: RankOrder, outbox: Outbox) -> None:
    """Replay the trace with every layout; rank 0 tells its progress, each rank its findings."""
    with joined_group(order, page_size=config.page_size):
        for layout in config.layouts:
            _replay_layout(config, trace, order.rank, layout, outbox)
            gc.collect()  # the pools of one layout are gone before those of the next are made


def _replay_layout(config: ReplayConfig, trace: Trace, rank: int, layout: str, outbox: Outbox) -> None:
    requests = len(trace.requests)
    done = 0
    told = time.perf_counter()

    def on_request(number: int) -> None:
        nonlocal done, told
        done = number
        now = time.perf_counter()
        if rank == 0 and (now - told > PROGRESS_INTERVAL_SECONDS or done == requests):
            told = now
            outbox.send(Progress(label=layout, done=done))

    try:
        replay = RankReplay(config, layout, rank)
        dist.barrier()
        started = time.perf_counter()
        report = replay.run(trace, on_request)
        dist.barrier()
        outbox.send(Finished(label=layout, seconds=time.perf_counter() - started, report=report))
        replay.cache.release_host_resources()
    except Exception as error:
        error.add_note(
            f"{layout}, {f'request {done + 1} of {requests}' if done < requests else 'after the last request'}"
        )
        raise
