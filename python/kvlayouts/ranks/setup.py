"""Sets up a rank's process: SGLang on the CPU, its globals, and the process group of the ranks."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from sglang.srt.mem_cache.hicache.cpu.support import install_cpu_support
from sglang.srt.mem_cache.hicache.runtime import standalone_runtime

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvlayouts.ranks.job import RankOrder


@contextmanager
def joined_group(order: RankOrder, *, page_size: int) -> Iterator[None]:
    """This process is rank ``order.rank`` of a gloo group, with SGLang's globals set for `page_size`, inside."""
    torch.set_num_threads(1)
    install_cpu_support()
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{order.rendezvous}",
        rank=order.rank,
        world_size=order.ranks,
        timeout=timedelta(seconds=order.peer_seconds),
    )
    try:
        with standalone_runtime(rank=order.rank, world_size=order.ranks, page_size=page_size):
            yield
    finally:
        dist.destroy_process_group()
