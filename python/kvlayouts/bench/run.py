"""Runs the chosen benchmarks one after the other in this process."""

from __future__ import annotations

import logging
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from kvlayouts.bench.deferred import bench_deferred
from kvlayouts.bench.plans import bench_metadata, bench_plan
from kvlayouts.bench.requests import bench_requests
from kvlayouts.bench.runs import bench_runs
from kvlayouts.bench.tree_sizes import bench_evict, bench_scale
from sglang.srt.mem_cache.hicache.cpu.support import install_cpu_support

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from kvlayouts.bench.config import BenchConfig
    from kvlayouts.bench.figures import Figure, OnStep
    from kvlayouts.common.trace import Trace

RUNNERS: Mapping[str, Callable[[BenchConfig, Trace, OnStep], list[Figure]]] = {
    "requests": bench_requests,
    "evict": bench_evict,
    "plan": bench_plan,
    "metadata": bench_metadata,
    "deferred": bench_deferred,
    "scale": bench_scale,
    "runs": bench_runs,
}


def run_benches(config: BenchConfig, trace: Trace, on_step: OnStep, figures: list[Figure]) -> None:
    """Add every figure of the benchmarks in ``config.only`` to `figures`, one benchmark after the other."""
    with _one_rank():
        for name, run in RUNNERS.items():
            if name in config.only:
                figures += run(config, trace, on_step)


@contextmanager
def _one_rank() -> Iterator[None]:
    """A process group of this process alone, which SGLang's caches ask for; one thread, and no chatter of SGLang's."""
    torch.set_num_threads(1)
    install_cpu_support()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = Path(folder) / "rendezvous"
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()
            logging.disable(logging.NOTSET)
