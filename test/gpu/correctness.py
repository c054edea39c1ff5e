"""Bytes on a real GPU: real pools, controller and tree, with several ranks in processes of their own.

Each case serves chains of pages whose bytes depend on the whole chain: write them, back them up while the copy stream
is held busy, split a node meanwhile, evict everything, overwrite the device, and load back while a consumer on
another stream reads each layer as soon as its event allows. Page order is random on both sides. Submissions run with
``torch.cuda.set_sync_debug_mode("error")``. Before them, each rank sees that a case without waits for layers has wrong
bytes. One line a case; the exit code is the number of failed cases (at most 99).

    python3 test/gpu/correctness.py [--only cp_shared] [--ranks 1,2,4]
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
import traceback
from array import array
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from typing_extensions import override

from kvlayouts.replay.content import prefix_sums
from sglang.srt.mem_cache.hicache.assemble import assemble_cache
from sglang.srt.mem_cache.hicache.check.digest import tree_digest
from sglang.srt.mem_cache.hicache.check.invariants import violations
from sglang.srt.mem_cache.hicache.copies.cuda import driver
from sglang.srt.mem_cache.hicache.copies.cuda.page_copier import CopyTuning, page_copier
from sglang.srt.mem_cache.hicache.copies.cuda.page_kernel import KernelShape
from sglang.srt.mem_cache.hicache.copies.exchange import PageExchanger
from sglang.srt.mem_cache.hicache.copies.transfer import HostTransfer
from sglang.srt.mem_cache.hicache.runtime import standalone_runtime
from sglang.srt.mem_cache.hicache.settings import HiCacheSettings, ShardGroup
from sglang.srt.mem_cache.hicache.slots.allocator import LaneSlotAllocator
from sglang.srt.mem_cache.hicache.tree.calls import Insertion
from sglang.srt.mem_cache.layouts import GroupKind, LayoutConfig, create_layout
from sglang.srt.mem_cache.layouts.facts import exchanges_pages
from sglang.srt.mem_cache.layouts.pages import pages_of_tokens

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark"))  # what it shares with the measurements
from gpu_common import (
    GEOMETRIES,
    PAGE_SIZE,
    PageContent,
    Results,
    keep_busy,
    make_device_pool,
    poison,
    scatter,
    synchronisation_forbidden,
)
from gpu_ipc_gather import IpcGather

if TYPE_CHECKING:
    from sglang.srt.mem_cache.l2_transfer import L2TransferEngine

    from sglang.srt.mem_cache.hicache.radix_cache import HiRadixCache
    from sglang.srt.mem_cache.layouts.pages import PageArray

LAYERS = 4
DEVICE_PAGES = 96
HOLD_MS = 200
SLOW = CopyTuning(long_copy_bytes=None, to_device=KernelShape(warps=4, chunk_bytes=1024))
"""The kernel alone, so slow that whoever reads a layer too early finds some of its bytes missing."""
WORLD = 4
STREAMS_SHARE_A_QUEUE = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
"""Then what computes the next chain waits for a held stream as well, and no backup is still held after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One combination; ranks 0 .. `ranks` - 1 take part."""

    layout: str
    ranks: int
    pool: str
    io_backend: str
    mem_layout: str

    @property
    def short_runs_by_kernel(self) -> bool:
        """Whether the kernel has a part in every copy but those of long runs."""
        return (self.io_backend, self.mem_layout) == ("kernel", "layer_first")

    @override
    def __str__(self) -> str:
        return f"{self.layout} x{self.ranks} {self.pool} {self.io_backend} {self.mem_layout}"


def all_cases() -> list[Case]:
    """Layouts and ranks with every pool, over both backends and the host layouts; `page_first` by SGLang's engine."""
    ways = [("kernel", "layer_first"), ("direct", "page_first_direct"), ("direct", "layer_first"),
            ("kernel", "page_first_direct"), ("kernel", "page_first")]  # fmt: skip
    cases = [
        Case(layout=layout, ranks=ranks, pool=pool, io_backend=io_backend, mem_layout=mem_layout)
        for layout, ranks, count in (
            ("identity", 1, 5),
            ("cp_shared", 2, 5),
            ("cp_shared", 4, 4),
            ("identity", 2, 1),
            ("host_shared", 2, 5),
            ("host_shared", 4, 2),
            ("host_shared", 1, 1),
        )
        for pool in GEOMETRIES
        for io_backend, mem_layout in ways[:count]
    ]
    return cases


class Problems(list[str]):
    """What a case found wrong."""

    def expect(self, holds: bool, what: str) -> None:
        """Note `what` unless it holds."""
        if not holds:
            self.append(what)


class Rank:
    """One rank of a case."""

    def __init__(self, case: Case, number: int, group: dist.ProcessGroup) -> None:
        self.case = case
        self.group = group
        self.problems = Problems()
        self.rng = np.random.default_rng(11)  # the same on all ranks
        self.device_pool = make_device_pool(case.pool, pages=DEVICE_PAGES, layers=LAYERS)
        self.content = PageContent(self.device_pool)
        self.layout = create_layout(
            LayoutConfig(name=case.layout, page_size=PAGE_SIZE, shard_size=case.ranks, shard_rank=number)
        )
        self.allocator = LaneSlotAllocator(
            layout=self.layout,
            physical_size=DEVICE_PAGES * PAGE_SIZE,
            dtype=self.device_pool.dtype,
            device="cuda",
            kvcache=self.device_pool,
        )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=self.allocator,
            page_size=PAGE_SIZE,
            tp_cache_group=group,
            eviction_policy="lru",
        )
        peers = IpcGather(group) if exchanges_pages(self.layout) and case.ranks > 1 else None
        self.cache: HiRadixCache[Any] = assemble_cache(
            params,
            layout=self.layout,
            settings=HiCacheSettings(io_backend=case.io_backend, mem_layout=case.mem_layout, host_ratio=2.0),
            group=ShardGroup(kind=GroupKind.ATTENTION_CP, size=case.ranks, rank=number),
            peers=peers,
        )
        self.controller = self.cache.cache_controller
        self.exchanger = None if peers is None else PageExchanger(self.device_pool, peers)
        if case.short_runs_by_kernel:
            self.use_copier(CopyTuning(few_copies=0))  # however few they are
        stream_type: Any = torch.cuda.Stream  # torch leaves it untyped
        self.consumer = stream_type()
        self.checked_pages = 0

    @property
    def engine(self) -> L2TransferEngine:
        """The streams of the copies."""
        return self.controller.transfer.engine

    def use_copier(self, tuning: CopyTuning) -> None:
        """From now on copies go as `tuning` says. None may be under way."""
        pools: dict[str, Any] = {
            "host_pool": self.controller.mem_pool_host,
            "device_pool": self.device_pool,
            "io_backend": "kernel",
            "exchanger": self.exchanger,
        }
        copier = page_copier(
            HostTransfer(**pools, copier=False).entries,
            page_size=PAGE_SIZE,
            device="cuda",
            io_backend="kernel",
            tuning=tuning,
        )
        self.controller.transfer = HostTransfer(**pools, copier=copier)

    # What requests do.

    def compute(self, tokens: array[int]) -> PageArray:
        """Pages of a chain: cached ones on the device, then new ones, whose rows are written. Returns all pages."""
        match = self.cache.match(RadixKey(array("q", tokens)))
        cached = pages_of_tokens(match.slots, PAGE_SIZE)
        base = self.layout.chain_base(tokens[:PAGE_SIZE].tobytes(), "")
        count = len(tokens) // PAGE_SIZE - len(cached)
        fresh = self.cache.alloc_slots(self.layout.extend_lanes(base, len(cached), count))
        if fresh is None:
            raise RuntimeError(f"no room for {count} pages")
        pages = np.concatenate([cached, fresh])
        rows, keys = self.own(pages[len(cached) :], self.keys(tokens)[len(cached) :])
        self.content.write(rows, keys)
        return pages

    def insert(self, tokens: array[int], pages: PageArray) -> None:
        """Give a chain to the tree, which backs it up; nothing of it may wait for the device."""
        value = self.cache.slots.slots(pages)
        key = RadixKey(array("q", tokens))
        with synchronisation_forbidden():
            self.cache.put(Insertion(key=key, value=value, slot_pages=pages))
            self.cache.parts.transfers.submit_backups()

    def load_and_read(self, tokens: array[int], what: str) -> None:
        """Load a chain back and read each layer on another stream as soon as its event allows."""
        match = self.cache.match(RadixKey(array("q", tokens)))
        self.problems.expect(match.host_tokens > 0, f"{what}: nothing on the host")
        hold(self.engine.host_to_device_stream)
        with synchronisation_forbidden():
            loaded, _ = self.cache.bring_back(match.host_node)
        slots = torch.cat([match.slots, loaded])
        self.problems.expect(len(slots) == len(tokens), f"{what}: {len(slots)} slots for {len(tokens)} tokens")
        pages = pages_of_tokens(slots, PAGE_SIZE)
        rows, keys = self.own(pages, self.keys(tokens)[: len(pages)])
        with synchronisation_forbidden():
            index = self.cache.ready_to_load_host_cache()
            counter = self.controller.layer_done_counter
            counter.set_consumer(index)
            with torch.cuda.stream(self.consumer):
                seen = [self._read_layer(counter, layer, rows) for layer in range(LAYERS)]
        held = not self.controller.ack_load_queue[-1].finish_event.query()
        self.problems.expect(held, f"{what}: the load was not held back")
        self.cache.evict(EvictParams(num_tokens=self.allocator.size))  # must not touch what is being loaded
        self.cache.check_hicache_events()
        self.problems.expect(bool(self.cache.ongoing_load_back), f"{what}: a load was settled before its copy")
        torch.cuda.synchronize()
        wrong = sum(
            int((words != self.content.expected(buffer, keys)).any(dim=1).sum())
            for layer in seen
            for buffer, words in layer.items()
        )
        wrong += self.content.wrong_pages(rows, keys)
        self.checked_pages += len(rows)
        self.problems.expect(wrong == 0, f"{what}: {wrong} pages with wrong bytes")
        self.settle()

    def _read_layer(self, counter: Any, layer: int, rows: torch.Tensor) -> dict[int, torch.Tensor]:  # noqa: ANN401
        counter.wait_until(layer)
        views = self.content.views
        return {buffer: views[buffer].index_select(0, rows) for buffer in range(layer, len(views), LAYERS)}

    # Helpers.

    def keys(self, tokens: array[int]) -> torch.Tensor:
        """One key a page, from all tokens up to its end."""
        sums = prefix_sums(np.frombuffer(tokens, dtype=np.int64), 3)
        return torch.from_numpy(sums[PAGE_SIZE - 1 :: PAGE_SIZE].view(np.int64).copy())

    def own(self, pages: PageArray, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Row pages and keys, on the device, of the pages that this rank stores."""
        stored = self.layout.local_rows(torch.from_numpy(pages * PAGE_SIZE)) // PAGE_SIZE
        owned = stored > 0
        rows, own_keys = stored[owned].cuda(), keys[owned].cuda()
        torch.cuda.current_stream().synchronize()
        return rows, own_keys

    def settle(self) -> None:
        """Wait for all copies and settle every ack; the same number of rounds on all ranks."""
        torch.cuda.synchronize()
        while self.cache.ongoing_write_through or self.cache.ongoing_load_back:
            self.cache.check_hicache_events()

    def run(self) -> None:
        """The whole case."""
        unit = self.layout.lane_count
        trunk = random_tokens(self.rng, 24 * unit)
        branch = trunk[: 10 * unit * PAGE_SIZE] + random_tokens(self.rng, 12 * unit)
        single = random_tokens(self.rng, 1)
        scatter(self.cache, self.rng, (1, 1, 2, 5, 20))
        pages = self.compute(trunk)
        single_pages = self.compute(single)
        hold(self.engine.device_to_host_stream)
        self.insert(trunk, pages)
        self.insert(single, single_pages)
        self.insert(branch, self.compute(branch))  # splits the trunk while its backup is under way
        if not STREAMS_SHARE_A_QUEUE:
            self.expect_held_backups(3)
        self.settle()
        self.check_state("after backup")
        self.evict_all()
        for what, tokens in (("branch", branch), ("trunk", trunk), ("single", single)):
            self.load_and_read(tokens, what)
        self.check_state("after load")
        self.evict_all()
        if self.case.short_runs_by_kernel:
            self.use_copier(SLOW)
        self.load_and_read(trunk, "trunk again")
        self.problems.expect(self.cache.stats.loads == 4, f"{self.cache.stats.loads} loads acknowledged, not 4")

    def expect_held_backups(self, count: int) -> None:
        """As long as copies are under way nothing is settled, and nothing that they read is evicted."""
        held = not self.controller.ack_write_queue[0].finish_event.query()
        self.problems.expect(held, "the backup was not held back")
        self.cache.check_hicache_events()
        self.problems.expect(len(self.cache.ongoing_write_through) == count, "a backup was settled before its copy")
        evicted = self.cache.evict(EvictParams(num_tokens=self.allocator.size)).num_tokens_evicted
        self.problems.expect(evicted == 0, f"{evicted} tokens evicted during their backup")

    def evict_all(self) -> None:
        """Everything leaves the device, which is overwritten; new pages come in another order."""
        self.cache.evict(EvictParams(num_tokens=self.allocator.size))
        self.problems.expect(self.cache.total_size() == 0, "not everything left the device")
        poison(self.device_pool)
        torch.cuda.synchronize()

    def check_state(self, when: str) -> None:
        """Invariants on this rank, one tree on all."""
        self.problems += [f"{when}: {line}" for line in violations(self.cache)]
        mine = torch.tensor([tree_digest(self.cache)], dtype=torch.int64)
        found = [torch.empty_like(mine) for _ in range(self.case.ranks)]
        dist.all_gather(found, mine, group=self.group)
        self.problems.expect(len({int(digest) for digest in found}) == 1, f"{when}: trees differ between ranks")


def random_tokens(rng: np.random.Generator, pages: int) -> array[int]:
    """Tokens of `pages` pages."""
    return array("q", rng.integers(0, 150_000, size=pages * PAGE_SIZE).tolist())


def hold(stream: Any) -> None:  # noqa: ANN401  # torch leaves its streams untyped
    """Keep a stream busy for a while."""
    with torch.cuda.stream(stream):
        keep_busy(HOLD_MS)


def rehearse(number: int) -> str:
    """Cases of its own on every rank: kernels are loaded at their first use, which can wait for a held stream.

    The last is broken, and its wrong bytes have to be seen, unless streams share a queue, where they come in order.
    Returns what is wrong with that.
    """
    groups = [dist.new_group([rank]) for rank in range(WORLD)]
    for pool, mem_layout in product(GEOMETRIES, ("layer_first", "page_first")):
        case = Case(layout="identity", ranks=1, pool=pool, io_backend="kernel", mem_layout=mem_layout)
        wrong, _ = run_case(case, 0, groups[number])
        if wrong and number == 0:
            print("rehearsal: " + "; ".join(line[-600:] for line in wrong), flush=True)
        gc.collect()
    if STREAMS_SHARE_A_QUEUE:
        return ""
    case = Case(layout="identity", ranks=1, pool="mla_bf16", io_backend="kernel", mem_layout="layer_first")
    with patch.object(driver, "wait_for_count"):
        wrong, _ = run_case(case, 0, groups[number])
    return "" if any("wrong bytes" in line for line in wrong) else f"no layer was read too early: {wrong}"


def run_case(case: Case, number: int, group: dist.ProcessGroup) -> tuple[list[str], int]:
    """What this rank found wrong, and the pages whose bytes it compared."""
    found: list[str] = []
    checked = 0
    rank = None
    try:
        with standalone_runtime(
            rank=number,
            world_size=case.ranks,
            device="cuda",
            page_size=PAGE_SIZE,
            hicache_io_backend=case.io_backend,
            hicache_mem_layout=case.mem_layout,
        ):
            rank = Rank(case, number, group)
            rank.run()
    except Exception:
        found.append(traceback.format_exc())
    if rank is not None:
        found = [*rank.problems, *found]
        checked = rank.checked_pages
        try:
            torch.cuda.synchronize()
            rank.cache.release_host_resources()
        except Exception:
            found.append(traceback.format_exc())
    return found, checked


def worker(number: int, rendezvous: str, cases: list[Case], failures: Any) -> None:  # noqa: ANN401  # a shared value
    """Every case, in step with the other ranks."""
    torch.set_num_threads(2)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=number, world_size=WORLD, timeout=timedelta(seconds=240)
    )
    unnoticed = [""] * WORLD
    dist.all_gather_object(unnoticed, rehearse(number))
    results = Results("gpu_correctness.json") if number == 0 else None
    if results is not None and not STREAMS_SHARE_A_QUEUE:
        failures.value += any(unnoticed)
        print(f"{'FAIL' if any(unnoticed) else 'ok  '} without waits wrong bytes are seen", *filter(None, unnoticed))
    for case in cases:
        started = time.perf_counter()
        group = dist.new_group(list(range(case.ranks)), timeout=timedelta(seconds=40))
        mine = run_case(case, number, group) if number < case.ranks else ([], 0)
        gc.collect()
        torch.cuda.empty_cache()
        everyone: list[tuple[list[str], int]] = [([], 0)] * WORLD
        dist.all_gather_object(everyone, mine)
        if results is None:
            continue
        wrong = [f"rank {at}: {line}" for at, (lines, _) in enumerate(everyone) for line in lines]
        failures.value += bool(wrong)
        pages = [checked for _, checked in everyone[: case.ranks]]
        print(f"{'FAIL' if wrong else 'ok  '} {case}  {time.perf_counter() - started:.1f} s, pages compared {pages}")
        for line in wrong:
            print("     " + line.replace("\n", "\n     "), flush=True)
        results.data.setdefault("cases", []).append({**asdict(case), "wrong": wrong, "pages_compared": pages})
        results.save()
    dist.destroy_process_group()


def main() -> int:
    """Run the cases that the flags leave; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run cases whose name contains this")
    parser.add_argument("--ranks", default="1,2,4")
    arguments = parser.parse_args()
    ranks = [int(count) for count in arguments.ranks.split(",")]
    cases = [case for case in all_cases() if case.ranks in ranks and arguments.only in str(case)]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    spawn: Any = mp
    failures = spawn.get_context("spawn").Value("i", 0)
    with tempfile.TemporaryDirectory() as folder:
        spawn.spawn(worker, args=(f"{folder}/rendezvous", cases, failures), nprocs=WORLD)
    print(f"{len(cases)} cases, {failures.value} failed")
    return min(int(failures.value), 99)


if __name__ == "__main__":
    sys.exit(main())
