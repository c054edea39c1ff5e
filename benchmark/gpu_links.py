"""Two GPUs, two links: does each rank restore its half as fast when its peer does the same at the same time?

Rank r of a `cp_shared` group of two keeps half of a long prefix of a GLM-5-like model (see `gpu_restore`) on GPU r.
Every round loads it back three times: rank 0 alone, rank 1 alone, both at once; and measures plain pinned copies of
1 GiB the same way. Ranks agree over a process group as in a server, so that the trees stay in step. The first load
compares all bytes. Beside it, what readers of a sharded pool need: pages gathered over NCCL.

    python3 benchmark/gpu_links.py [--rounds 5] [--layers 78]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from gpu_common import PAGE_SIZE, Link, Results, table
from gpu_restore import BYTES_PER_TOKEN_AND_LAYER, PREFIX_PAGES, Restore, grow_memory

from sglang.srt.mem_cache.hicache.agreement import RankAgreement
from sglang.srt.mem_cache.hicache.device.page_reader import SharedPages, group_sum
from sglang.srt.mem_cache.hicache.runtime import standalone_runtime

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WORLD = 2
GATHERED_PAGES = 2048


class Ranks:
    """Both ranks' meeting points."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.cpu = dist.new_group(backend="gloo", timeout=timedelta(seconds=300))
        self.nccl = dist.new_group(backend="nccl", timeout=timedelta(seconds=300))

    @contextmanager
    def alone(self) -> Iterator[None]:
        """One rank after the other."""
        for turn in range(WORLD):
            dist.barrier(group=self.cpu)
            if turn == self.number:
                yield
        dist.barrier(group=self.cpu)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Both at once."""
        dist.barrier(group=self.cpu)
        yield
        dist.barrier(group=self.cpu)

    def both(self, mine: float) -> list[float]:
        """What each rank measured."""
        found: list[float] = [0.0] * WORLD
        dist.all_gather_object(found, mine, group=self.cpu)
        return found


def gather_rate(restore: Restore, ranks: Ranks, rounds: int) -> float:
    """GB/s of whole pages that a reader gets: one layer's pages, half of them the peer's."""
    layout: Any = restore.layout  # cp_shared can say which row a slot has
    reader = SharedPages(layout, page_size=PAGE_SIZE, lane_count=WORLD, reduce=group_sum(ranks.nccl))
    pool: Any = restore.device_pool
    buffer = pool.kv_buffer[0]
    pages = torch.arange(1, GATHERED_PAGES + 1, device="cuda")
    seconds: list[float] = []
    for _ in range(rounds + 2):
        reader.begin_batch(lambda: pages)
        torch.cuda.synchronize()
        dist.barrier(group=ranks.cpu)
        started = time.perf_counter()
        reader.readable("kv", 0, buffer, PAGE_SIZE)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    page_bytes = buffer[:PAGE_SIZE].nbytes
    rate: float = GATHERED_PAGES * page_bytes / statistics.median(seconds[2:]) / 1e9
    return rate


def worker(number: int, rendezvous: str, arguments: argparse.Namespace) -> None:
    """One rank on its own GPU."""
    torch.cuda.set_device(number)
    torch.set_num_threads(2)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=number, world_size=WORLD)
    ranks = Ranks(number)
    with standalone_runtime(
        rank=number, world_size=WORLD, device="cuda", page_size=PAGE_SIZE, hicache_io_backend="kernel"
    ):
        link = Link()
        restore = Restore(
            shards=WORLD,
            layers=arguments.layers,
            scattered=False,
            rank=number,
            agreement=RankAgreement([ranks.cpu], pp_group=None, pp_rank=0, pp_size=1),
        )
        try:
            measure(restore, link, ranks, arguments)
        finally:
            restore.cache.release_host_resources()
    dist.destroy_process_group()


def measure(restore: Restore, link: Link, ranks: Ranks, arguments: argparse.Namespace) -> None:
    """All rounds; rank 0 prints and saves the table."""
    restore.back_up()
    restore.load(verify=True, in_turn=ranks.together)
    samples: dict[tuple[str, str], list[list[float]]] = {}
    for _ in range(arguments.rounds):
        for how, turn in (("alone", ranks.alone), ("together", ranks.together)):
            for what, rate in rates(restore, link, turn).items():
                samples.setdefault((what, how), []).append(ranks.both(rate()))
    gather = gather_rate(restore, ranks, arguments.rounds)
    if ranks.number:
        return
    results = Results("gpu_links.json")
    results.data["samples"] = {f"{what}, {how}": values for (what, how), values in samples.items()}
    results.data["gather_gb_per_s"] = gather
    results.save()
    rows = []
    for (what, how), values in samples.items():
        each = [statistics.median(value[rank] for value in values) for rank in range(WORLD)]
        total = statistics.median(sum(value) for value in values)
        rows.append([what, how, *(f"{rate:.1f}" for rate in each), f"{total:.1f}" if how == "together" else "-"])
    gib = PREFIX_PAGES * PAGE_SIZE * BYTES_PER_TOKEN_AND_LAYER * arguments.layers / WORLD / 2**30
    print(table(f"GB/s; {gib:.1f} GiB a rank", ["what", "how", "rank 0", "rank 1", "both"], rows))
    print(f"gather of {GATHERED_PAGES} pages of a layer over NCCL: {gather:.1f} GB/s of whole pages", flush=True)


def rates(restore: Restore, link: Link, turn: Callable[[], Any]) -> dict[str, Callable[[], float]]:
    """What is measured, in GB/s, each within `turn`."""

    def restored() -> float:
        one = restore.load(verify=False, in_turn=turn)
        return one["bytes"] / one["copy_s"] / 1e9

    def plain(to_device: bool) -> float:
        with turn():
            return link.measure(to_device=to_device)

    return {
        "restore": restored,
        "pinned copy, host to device": lambda: plain(True),
        "pinned copy, device to host": lambda: plain(False),
    }


def main() -> None:
    """Start both ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=78)
    arguments = parser.parse_args()
    if torch.cuda.device_count() < WORLD:
        raise SystemExit(f"{WORLD} GPUs are needed, {torch.cuda.device_count()} found")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    grow_memory(PREFIX_PAGES * PAGE_SIZE * BYTES_PER_TOKEN_AND_LAYER * arguments.layers / 2**30 + 4)
    spawn: Any = mp
    with tempfile.TemporaryDirectory() as folder:
        spawn.spawn(worker, args=(f"{folder}/rendezvous", arguments), nprocs=WORLD)


if __name__ == "__main__":
    main()
