"""Backup and load bandwidth of SGLang's engine and of ours, beside the ceiling of the link, in one run.

Every round measures the ceiling each way, then every version twice in each direction: on an idle device, and on one
that is kept busy until the copy has been submitted. The table shows medians, in shares of the ceiling. "busy" and
"idle" take the device's own time, between the events of the transfer's acknowledgement; an idle device waits for the
calling thread now and then. "wall" is the time from the call to the end of the copy on an idle device, submission
included; "submit" is what the calling thread spends.
A load records an event after each layer, as a forward pass needs it.

    python3 benchmark/gpu_bandwidth.py [--rounds 7] [--pools mla_bf16,dsa_fp8,dsa_bf16] [--runs 1,4,16,64,0]
        [--pages 512] [--only hybrid] [--sweep]
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import sys
import time
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from gpu_common import (
    PAGE_SIZE,
    POISON,
    Link,
    PageContent,
    Results,
    keep_busy,
    make_device_pool,
    poison,
    run_beside_the_gpu,
    table,
)
from sglang.srt.managers.cache_controller import LayerLoadingEvent
from sglang.srt.mem_cache.l2_transfer import L2Transfer, TransferCompletion
from sglang.srt.mem_cache.pool_host import HostPoolGroup
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

from sglang.srt.mem_cache.hicache.copies.cuda.page_copier import CopyTuning, CudaPageCopier
from sglang.srt.mem_cache.hicache.copies.cuda.page_kernel import KernelShape
from sglang.srt.mem_cache.hicache.copies.cuda.page_maps import page_maps
from sglang.srt.mem_cache.hicache.copies.transfer import HostTransfer
from sglang.srt.mem_cache.hicache.host.pools import build_host_pool, release_host_pool
from sglang.srt.mem_cache.hicache.runtime import standalone_runtime
from sglang.srt.mem_cache.hicache.seam.sglang import submit_load
from sglang.srt.mem_cache.layouts.pages import tokens_of_pages
from sglang.srt.mem_cache.layouts.plans import CopyPlan

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.mem_cache.memory_pool import KVCache
    from sglang.srt.mem_cache.pool_host import HostKVCache

    from sglang.srt.mem_cache.hicache.copies.cuda.page_maps import PageMap
    from sglang.srt.mem_cache.hicache.host.pools import AnyHostPool

LAYERS = 16
MIXED_RUNS = (1, 2, 4, 8, 16, 32, 64)
WAYS = ("busy", "idle", "wall")


@dataclass(slots=True, kw_only=True)
class Version:
    """One way of copying. Each operation submits and returns the acknowledgement's events."""

    name: str
    mem_layout: str
    programs: str
    back_up: Callable[[CopyPlan], TransferCompletion]
    load: Callable[[CopyPlan], TransferCompletion]
    checked: set[str] = field(default_factory=set)
    failed: bool = False


def our_versions(host_pool: AnyHostPool, device_pool: KVCache, tunings: dict[str, CopyTuning]) -> list[Version]:
    """Our copier on this host pool, once for each tuning."""
    owner = HostTransfer(host_pool=host_pool, device_pool=device_pool, io_backend="direct", copier=False)
    maps = page_maps(owner.entries, page_size=PAGE_SIZE)
    if maps is None:
        raise RuntimeError(f"pages of {host_pool.layout} are scattered")
    return [_our_version(name, tuning, owner, maps, device_pool, host_pool) for name, tuning in tunings.items()]


def _our_version(
    name: str,
    tuning: CopyTuning,
    owner: HostTransfer,
    maps: list[PageMap],
    device_pool: KVCache,
    host_pool: AnyHostPool,
) -> Version:
    copier = CudaPageCopier(maps, device=torch.device("cuda"), tuning=tuning)
    producer = LayerLoadingEvent(device_pool.layer_num)

    def load(plan: CopyPlan) -> TransferCompletion:
        producer.start_event.record()
        return copier.load(plan, owner.engine, producer)

    shapes = (tuning.to_host.programs, tuning.to_device.programs)
    return Version(
        name=name,
        mem_layout=host_pool.layout,
        programs="0" if tuning.long_copy_bytes == 0 else f"{shapes[0]}/{shapes[1]}",
        back_up=lambda plan: copier.back_up(plan, owner.engine),
        load=load,
    )


def sglang_version(host_pool: AnyHostPool, device_pool: KVCache, io_backend: str) -> Version:
    """SGLang's engine, given its token indices ready made, on the device where it wants them there."""
    transfer = HostTransfer(host_pool=host_pool, device_pool=device_pool, io_backend=io_backend, copier=False)
    where = "cuda" if io_backend == "kernel" else "cpu"
    prepared: dict[tuple[int, bool], list[L2Transfer]] = {}
    producer = LayerLoadingEvent(device_pool.layer_num)

    def rows_for(pool: HostKVCache, rows: torch.Tensor, to_host: bool) -> torch.Tensor:
        staged = to_host and pool.layout == "page_first" and pool.can_use_write_back_jit
        return rows if staged else rows.to(where)

    def transfers(plan: CopyPlan, *, to_host: bool) -> list[L2Transfer]:
        key = (id(plan), to_host)
        if key not in prepared:
            host = tokens_of_pages(plan.host_pages(), PAGE_SIZE)
            device = tokens_of_pages(plan.device_pages(), PAGE_SIZE).to(where)
            prepared[key] = [
                L2Transfer(
                    entry.host_pool,
                    entry.device_pool,
                    rows_for(entry.host_pool, host, to_host),
                    device,
                    entry.layer_mapper,
                )
                for entry in transfer.entries
            ]
        return prepared[key]

    def load(plan: CopyPlan) -> TransferCompletion:
        producer.start_event.record()
        return submit_load(
            transfer.engine,
            transfers(plan, to_host=False),
            layers=device_pool.layer_num,
            start_event=producer.start_event,
            on_layer_done=producer.complete,
        )

    def back_up(plan: CopyPlan) -> TransferCompletion:
        return transfer.engine.submit_device_to_host(transfers(plan, to_host=True))

    return Version(
        name=f"SGLang {io_backend}",
        mem_layout=host_pool.layout,
        programs="2 if JIT" if io_backend == "kernel" else "0",
        back_up=back_up,
        load=load,
    )


class Sample(NamedTuple):
    """Milliseconds on an idle device: between the events, from the call to the end, and on this thread."""

    idle_ms: float
    wall_ms: float
    submit_ms: float


def timed(operation: Callable[[CopyPlan], TransferCompletion], plan: CopyPlan) -> Sample:
    """One copy."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    completion = operation(plan)
    submitted = time.perf_counter()
    torch.cuda.synchronize()
    ended = time.perf_counter()
    return Sample(
        idle_ms=completion.start_event.elapsed_time(completion.finish_event),
        wall_ms=(ended - started) * 1e3,
        submit_ms=(submitted - started) * 1e3,
    )


def timed_on_busy_device(
    operation: Callable[[CopyPlan], TransferCompletion], plan: CopyPlan, *, submit_ms: float
) -> float:
    """Milliseconds of a copy that begins when all of it has been submitted, which takes about `submit_ms`.

    NaN if submission waits for the device.
    """
    busy_ms = 2 * submit_ms + 1
    for _ in range(5):
        torch.cuda.synchronize()
        keep_busy(busy_ms)
        completion = operation(plan)
        begun = completion.start_event.query()
        torch.cuda.synchronize()
        if not begun:
            return float(completion.start_event.elapsed_time(completion.finish_event))
        busy_ms *= 2
    return math.nan


def check(version: Version, plan: CopyPlan, content: PageContent, device_pool: KVCache, host_pool: AnyHostPool) -> str:
    """Every byte of a backup and of a load: empty if right.

    The backup is read back by a plain copy of each page, the load by the content's own comparison.
    """
    rows, keys = torch.from_numpy(plan.device_pages()).cuda(), torch.arange(1, plan.pages + 1).cuda() * 1_000_003
    poison_host(host_pool)
    content.write(rows, keys)
    timed(version.back_up, plan)
    wrong_on_host = wrong_host_pages(host_pool, plan, content, keys)
    poison(device_pool)
    timed(version.load, plan)
    wrong = content.wrong_pages(rows, keys)
    outside = untouched_pages_changed(content, plan)
    if wrong_on_host or wrong or outside:
        return f"{wrong_on_host} pages wrong after backup, {wrong} after load, {outside} others overwritten"
    return ""


def host_pools(host_pool: AnyHostPool) -> list[HostKVCache]:
    """The KV pool and, with DSA, the index pool."""
    return [entry.host_pool for entry in host_pool.entries] if isinstance(host_pool, HostPoolGroup) else [host_pool]


def host_sides(pool: HostKVCache) -> list[torch.Tensor]:
    """Its buffers, keys and values apart."""
    if isinstance(pool, DSAIndexerPoolHost):
        return [pool.index_k_with_scale_buffer]
    buffers: Any = pool.kv_buffer
    return [buffers[0], buffers[1]] if isinstance(pool, MHATokenToKVPoolHost) else [buffers]


def poison_host(host_pool: AnyHostPool) -> None:
    """Overwrite the host pool."""
    for pool in host_pools(host_pool):
        for side in host_sides(pool):
            side.view(torch.uint8).fill_(0x5A)


def wrong_host_pages(host_pool: AnyHostPool, plan: CopyPlan, content: PageContent, keys: torch.Tensor) -> int:
    """Pages of the host pool, over all buffers, that differ from the content."""
    wrong, number = 0, 0
    for pool in host_pools(host_pool):
        by_page = isinstance(pool, DSAIndexerPoolHost) or pool.layout == "page_first_direct"
        rows = tokens_of_pages(plan.host_pages(), 1 if by_page else PAGE_SIZE)
        for side in host_sides(pool):
            for layer in range(content.layers):
                own = side[layer] if pool.layout == "layer_first" else side[:, layer]
                found = own[rows].reshape(plan.pages, -1).view(torch.uint8).cuda().view(torch.int64)
                wrong += int((found != content.expected(number, keys)).any(dim=1).sum())
                number += 1
    return wrong


def untouched_pages_changed(content: PageContent, plan: CopyPlan) -> int:
    """Device pages outside the plan that no longer hold the poison."""
    wrong = 0
    for view in content.views:
        outside = torch.ones(view.shape[0], dtype=torch.bool)
        outside[torch.from_numpy(plan.device_pages())] = False
        rest = view[outside.cuda()].view(torch.uint8)
        wrong += int((rest != POISON).any(dim=1).sum())
    return wrong


KERNEL_SHAPES = [(4, 32, 64), (8, 32, 64), (16, 32, 64), (16, 16, 32), (32, 16, 32), (32, 8, 16), (64, 8, 16)]
KERNEL_SHAPES += [(32, 4, 16), (132, 4, 8)]
"""Programs, warps, KiB of a chunk."""
THRESHOLDS_KIB = (64, 128, 256, 1024)


def tunings(sweep: bool) -> dict[str, CopyTuning]:
    """The versions of ours; with `sweep` other kernel shapes and thresholds as well."""
    found = {
        "copy engines": CopyTuning(long_copy_bytes=0),
        "kernel": CopyTuning(long_copy_bytes=None),
        "hybrid": CopyTuning(),
    }
    for programs, warps, kib in KERNEL_SHAPES if sweep else []:
        shape = KernelShape(programs=programs, warps=warps, chunk_bytes=kib << 10)
        found[f"kernel {programs}x{warps}w {kib}K"] = CopyTuning(long_copy_bytes=None, to_device=shape, to_host=shape)
    for kib in THRESHOLDS_KIB if sweep else ():
        found[f"hybrid from {kib}K"] = CopyTuning(long_copy_bytes=kib << 10)
    return found


def make_versions(
    device_pool: KVCache, sweep: bool
) -> tuple[list[tuple[Version, AnyHostPool]], dict[str, AnyHostPool]]:
    """All versions with their host pools; what cannot be made is reported and left out."""
    found: list[tuple[Version, AnyHostPool]] = []
    pools: dict[str, AnyHostPool] = {}
    for mem_layout, io_backend in (
        ("layer_first", "kernel"),
        ("page_first", "kernel"),
        ("page_first_direct", "direct"),
    ):
        try:
            pool = build_host_pool(device_pool, ratio=1.0, page_size=PAGE_SIZE, mem_layout=mem_layout)
            pools[mem_layout] = pool
            found.append((sglang_version(pool, device_pool, io_backend), pool))
            if mem_layout != "page_first":
                chosen = tunings(sweep and mem_layout == "layer_first")
                found += [(version, pool) for version in our_versions(pool, device_pool, chosen)]
        except Exception:
            print(f"cannot set up {mem_layout} {io_backend}:\n{traceback.format_exc()}")
    return found, pools


def make_plan(pages: int, run: int, rng: np.random.Generator) -> CopyPlan:
    """`pages` pages in runs of `run` neighbours, in random order; 0 means runs of mixed lengths, 1 to 64."""
    lengths = np.full(pages // run, run) if run else rng.choice(MIXED_RUNS, size=pages)
    lengths = lengths[: np.searchsorted(lengths.cumsum(), pages) + 1]
    lengths[-1] -= lengths.sum() - pages
    starts = []
    for first in (0, 1):  # host pages count from 0, device pages from 1
        order = rng.permutation(len(lengths))
        starts.append(np.empty(len(lengths), dtype=np.int64))
        starts[-1][order] = first + lengths[order].cumsum() - lengths[order]
    return CopyPlan(page_size=PAGE_SIZE, host_starts=starts[0], device_starts=starts[1], lengths=lengths)


def measure_pool(name: str, runs: list[int], arguments: argparse.Namespace, link: Link, results: Results) -> None:
    """All versions and page orders of one device pool."""
    device_pool = make_device_pool(name, pages=arguments.pages + 64, layers=LAYERS)
    content = PageContent(device_pool)
    rng = np.random.default_rng(7)
    versions, pools = make_versions(device_pool, arguments.sweep)
    versions = [pair for pair in versions if arguments.only in pair[0].name]
    page_bytes = sum(view.shape[1] * 8 for view in content.views)
    for run in runs:
        plan = make_plan(arguments.pages, run, rng)
        chosen = [pair for pair in versions if run == 1 or not pair[0].name.startswith("kernel ")]
        for version, pool in chosen:
            key = "random" if run == 1 else "runs"
            if version.failed or key in version.checked:
                continue
            try:
                problem = check(version, plan, content, device_pool, pool)
            except Exception:
                problem = traceback.format_exc()
            version.failed = bool(problem)
            version.checked.add(key)
            if problem:
                print(f"WRONG {name} {version.name} {version.mem_layout}, runs of {run}: {problem}")
                results.data.setdefault("wrong", []).append([name, version.name, version.mem_layout, run, problem])
        measure_order(name, run, [version for version, _ in chosen], plan, page_bytes, arguments, link, results)
    for pool in pools.values():
        release_host_pool(pool)


def measure_order(
    name: str,
    run: int,
    versions: list[Version],
    plan: CopyPlan,
    page_bytes: int,
    arguments: argparse.Namespace,
    link: Link,
    results: Results,
) -> None:
    """Rounds over all versions for one plan; prints and saves the table."""
    samples: dict[tuple[str, str, str], list[Sample]] = {}
    busy_samples: dict[tuple[str, str, str], list[float]] = {}
    ceilings: dict[str, list[float]] = {"backup": [], "load": []}
    for turn in range(arguments.rounds + 1):
        if turn:
            ceilings["backup"].append(link.measure(to_device=False))
            ceilings["load"].append(link.measure(to_device=True))
        for version in versions:
            operations = {"backup": version.back_up, "load": version.load}
            for what, operation in operations.items():
                if version.failed:
                    continue
                try:
                    sample = timed(operation, plan)
                    busy_ms = timed_on_busy_device(operation, plan, submit_ms=sample.submit_ms)
                except Exception:
                    version.failed = True
                    print(f"FAILED {name} {version.name} {what}:\n{traceback.format_exc()}")
                    results.data.setdefault("failed", []).append([name, version.name, version.mem_layout, run, what])
                    continue
                if turn:
                    key = (version.name, version.mem_layout, what)
                    samples.setdefault(key, []).append(sample)
                    busy_samples.setdefault(key, []).append(busy_ms)
    ceiling = {way: statistics.median(values) for way, values in ceilings.items()}
    moved = plan.pages * page_bytes
    programs = {(version.name, version.mem_layout): version.programs for version in versions}
    rows: list[list[str]] = []
    for (version_name, mem_layout, what), values in samples.items():
        all_busy = busy_samples[version_name, mem_layout, what]
        busy = math.nan if any(map(math.isnan, all_busy)) else statistics.median(all_busy)
        idle, wall, submit = (statistics.median(column) for column in zip(*values, strict=True))
        shares = {
            way: moved / time_ms / 1e6 / ceiling[what] for way, time_ms in zip(WAYS, (busy, idle, wall), strict=True)
        }
        record = {
            "pool": name,
            "run_pages": run,
            "version": version_name,
            "mem_layout": mem_layout,
            "what": what,
            "gb_per_s": moved / busy / 1e6,
            "ceiling_gb_per_s": ceiling[what],
            **{f"{way}_share": share for way, share in shares.items()},
            "submit_ms": submit,
            "worst_submit_ms": max(value.submit_ms for value in values),
            "programs": programs[version_name, mem_layout],
            "mib": moved / 2**20,
            "samples": [value._asdict() for value in values],
            "busy_ms": all_busy,
        }
        results.data.setdefault("measurements", []).append(record)
        rows.append(
            [version_name, mem_layout, what, f"{record['gb_per_s']:.1f}", *(f"{shares[way]:.1%}" for way in WAYS),
             f"{submit:.2f}", programs[version_name, mem_layout]]
        )  # fmt: skip
    results.data.setdefault("ceilings", []).append({"pool": name, "run_pages": run, **ceilings})
    results.save()
    title = (
        f"\n{name}, {moved / 2**20:.0f} MiB, {plan.pages} pages in runs of {run or 'mixed lengths'}; "
        f"ceiling D2H {ceiling['backup']:.1f}, H2D {ceiling['load']:.1f} GB/s"
    )
    columns = ["version", "host layout", "what", "GB/s", *WAYS, "submit ms", "SM blocks"]
    print(table(title, columns, sorted(rows, key=lambda row: (row[2], row[1], row[0]))), flush=True)


def main() -> int:
    """Parse flags, measure pool by pool; returns how many versions were wrong or failed, at most 99."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--pools", default="mla_bf16,dsa_fp8,dsa_bf16")
    parser.add_argument("--runs", default="1,4,16,64,0", help="pages of a run; 0 means runs of mixed lengths, 1 to 64")
    parser.add_argument("--pages", type=int, default=512)
    parser.add_argument("--only", default="", help="versions whose name contains this")
    parser.add_argument(
        "--sweep", action="store_true", help="also try other thresholds, and kernel shapes in random page order"
    )
    arguments = parser.parse_args()
    results = Results(f"gpu_bandwidth-{arguments.pools.replace(',', '-')}.json")
    run_beside_the_gpu()
    link = Link()
    with standalone_runtime(device="cuda", page_size=PAGE_SIZE):
        for name in arguments.pools.split(","):
            started = time.perf_counter()
            try:
                measure_pool(name, [int(run) for run in arguments.runs.split(",")], arguments, link, results)
            except Exception:
                print(f"FAILED {name}:\n{traceback.format_exc()}")
                results.data.setdefault("failed", []).append([name])
            gc.collect()
            torch.cuda.empty_cache()
            print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)
    results.save()
    return min(99, sum(len(results.data.get(what, [])) for what in ("wrong", "failed")))


if __name__ == "__main__":
    sys.exit(main())
