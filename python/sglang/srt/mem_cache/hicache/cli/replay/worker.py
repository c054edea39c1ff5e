"""The work of one rank's process: set up SGLang on the CPU and the process group, then replay layout by layout."""

from __future__ import annotations

import gc
import os
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from sglang.srt.mem_cache.hicache.cli.replay.messages import Finished, Progress
from sglang.srt.mem_cache.hicache.cli.replay.rank import RankReplay
from sglang.srt.mem_cache.hicache.cpu.support import install_cpu_support
from sglang.srt.mem_cache.hicache.runtime import standalone_runtime

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache.cli.replay.launch import Outbox
    from sglang.srt.mem_cache.hicache.cli.replay.messages import RankOrder

PROGRESS_INTERVAL_SECONDS = 0.2


def replay_layouts(order: RankOrder, outbox: Outbox) -> None:
    """Replay the trace with every layout; rank 0 tells its progress, each rank its findings."""
    config = order.config
    torch.set_num_threads(1)
    install_cpu_support()
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{order.rendezvous}",
        rank=order.rank,
        world_size=config.cp_size,
        timeout=timedelta(seconds=order.peer_seconds),
    )
    try:
        with standalone_runtime(rank=order.rank, world_size=config.cp_size, page_size=config.page_size):
            for layout in config.layouts:
                _replay_layout(order, layout, outbox)
                gc.collect()  # the pools of one layout are gone before those of the next are made
    finally:
        dist.destroy_process_group()


def _replay_layout(order: RankOrder, layout: str, outbox: Outbox) -> None:
    requests = len(order.trace.requests)
    done = 0
    told = time.perf_counter()

    def on_request(number: int) -> None:
        nonlocal done, told
        done = number
        now = time.perf_counter()
        if order.rank == 0 and (now - told > PROGRESS_INTERVAL_SECONDS or done == requests):
            told = now
            outbox.send(Progress(layout=layout, done=done))

    try:
        replay = RankReplay(order.config, layout, order.rank)
        dist.barrier()
        started = time.perf_counter()
        report = replay.run(order.trace, on_request)
        dist.barrier()
        outbox.send(Finished(layout=layout, seconds=time.perf_counter() - started, report=report))
        replay.cache.release_host_resources()
    except Exception as error:
        error.add_note(
            f"{layout}, {f'request {done + 1} of {requests}' if done < requests else 'after the last request'}"
        )
        raise
