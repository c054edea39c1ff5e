"""The process of one rank: sets up SGLang on the CPU and the process group, then replays layout by layout."""

from __future__ import annotations

import gc
import os
import sys
import time
import traceback
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from sglang.srt.mem_cache.hicache.cli.replay.messages import Done, Failed, Finished, Progress
from sglang.srt.mem_cache.hicache.cli.replay.rank import RankReplay
from sglang.srt.mem_cache.hicache.cpu.support import install_cpu_support
from sglang.srt.mem_cache.hicache.runtime import standalone_runtime

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from sglang.srt.mem_cache.hicache.cli.replay.results import ReplayConfig
    from sglang.srt.mem_cache.hicache.cli.replay.trace import Trace

PROGRESS_INTERVAL_SECONDS = 0.2


def serve_rank(config: ReplayConfig, trace: Trace, rank: int, rendezvous: str, peer_seconds: float, pipe: Connection) -> None:
    """Entry point of a rank's process. Everything it has to say goes through `pipe`.

    `rendezvous` is a file that the ranks meet at. A rank that hears nothing from its peers for `peer_seconds`
    within a collective fails instead of waiting for ever.
    """
    try:
        _replay_layouts(config, trace, rank, rendezvous, peer_seconds, pipe)
        pipe.send(Done())
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        pipe.send(Failed(error=f"{type(error).__name__}: {error}", details=traceback.format_exc()))
        sys.exit(1)


def _replay_layouts(
    config: ReplayConfig, trace: Trace, rank: int, rendezvous: str, peer_seconds: float, pipe: Connection
) -> None:
    torch.set_num_threads(1)
    install_cpu_support()
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=config.cp_size,
        timeout=timedelta(seconds=peer_seconds),
    )
    try:
        with standalone_runtime(rank=rank, world_size=config.cp_size, page_size=config.page_size):
            for layout in config.layouts:
                _replay_layout(config, trace, rank, layout, pipe)
                gc.collect()  # the pools of one layout are gone before those of the next are made
    finally:
        dist.destroy_process_group()


def _replay_layout(config: ReplayConfig, trace: Trace, rank: int, layout: str, pipe: Connection) -> None:
    replay = RankReplay(config, layout, rank)
    dist.barrier()
    started = told = time.perf_counter()

    def on_request(done: int) -> None:
        nonlocal told
        now = time.perf_counter()
        if rank == 0 and (now - told > PROGRESS_INTERVAL_SECONDS or done == len(trace.requests)):
            told = now
            pipe.send(Progress(layout=layout, done=done))

    report = replay.run(trace, on_request)
    dist.barrier()
    pipe.send(Finished(layout=layout, seconds=time.perf_counter() - started, report=report))
    replay.cache.release_host_resources()
