"""The first design's deferred performance list, item by item: the form that is used against the naive one."""

from __future__ import annotations

import heapq
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.l2_transfer import L2TransferEngine, TransferCompletion

from sglang.srt.mem_cache.hicache.agreement import RankAgreement
from sglang.srt.mem_cache.hicache.cli.bench.figures import Figure, compared
from sglang.srt.mem_cache.hicache.cli.bench.subjects import OurSubject, PoolSizes, leaf_tokens, subjects_runtime
from sglang.srt.mem_cache.hicache.cli.bench.timing import alternating, thread_seconds, wall_seconds
from sglang.srt.mem_cache.hicache.eviction import EvictionOrder
from sglang.srt.mem_cache.layouts.errors import LayoutInvariantError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from sglang.srt.mem_cache.l2_transfer import L2Transfer

    from sglang.srt.mem_cache.hicache.cli.bench.config import BenchConfig
    from sglang.srt.mem_cache.hicache.cli.bench.figures import OnStep
    from sglang.srt.mem_cache.hicache.cli.replay.trace import Trace

DEPTH, LEAVES, BACKUPS = 64, 10_000, 32
COPY_SECONDS = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
    """Two ways to do one thing. `clock` is the wall's where waiting is the cost, else this thread's."""

    case: str
    naive_name: str
    make: Callable[[], AbstractContextManager[tuple[Callable[[], object], Callable[[], object]]]]
    repeats: int
    clock: Callable[[], float] = thread_seconds


def bench_deferred(config: BenchConfig, trace: Trace, on_step: OnStep) -> list[Figure]:
    """Cost of each item a call, in microseconds, in both forms."""
    items = (
        _Item(
            case=f"one tick for a path of {DEPTH} nodes", naive_name="a clock call a node", make=_clocks, repeats=1_000
        ),
        _Item(
            case=f"evict one of {LEAVES:,} leaves, add it again",
            naive_name="a heap built at each eviction",
            make=_orders,
            repeats=5,
        ),
        _Item(
            case="one reduction, its tensor kept", naive_name="a new tensor each time", make=_reductions, repeats=500
        ),
        _Item(
            case=f"{BACKUPS} backups of {1e3 * COPY_SECONDS:g} ms each, acks polled",
            naive_name="waiting for each copy",
            make=_acknowledgements,
            repeats=1,
            clock=wall_seconds,
        ),
    )
    figures = []
    for number, item in enumerate(items, 1):
        with item.make() as (ours, naive):
            seconds = alternating(
                {"ours": ours, "naive": naive}, rounds=config.rounds, repeats=item.repeats, clock=item.clock
            )
        mine, theirs = ([1e6 * value for value in seconds[side]] for side in ("ours", "naive"))
        figures.append(
            compared("deferred", item.case, mine, theirs, unit="us", baseline_name=item.naive_name, at_most=1.0)
        )
        on_step("deferred", number, len(items))
    return figures


class _Node:
    """What an eviction order and a walk touch of a node."""

    def __init__(self, number: int) -> None:
        self.id = number
        self.last_access_time: float = number


@contextmanager
def _clocks() -> Iterator[tuple[Callable[[], object], Callable[[], object]]]:
    path = [_Node(number) for number in range(DEPTH)]
    ticks = 0

    def ours() -> None:
        nonlocal ticks
        ticks += 1
        for node in path:
            node.last_access_time = ticks

    def naive() -> None:
        for node in path:
            node.last_access_time = time.monotonic()

    yield ours, naive


@contextmanager
def _orders() -> Iterator[tuple[Callable[[], object], Callable[[], object]]]:
    order: EvictionOrder[_Node] = EvictionOrder(lambda node: node.last_access_time)
    leaves = {_Node(number) for number in range(LEAVES)}
    for leaf in leaves:
        order.add(leaf)

    def ours() -> None:
        first = order.pop_first()
        if first is not None:
            first.last_access_time += LEAVES
            order.add(first)

    def naive() -> None:
        heap = [(leaf.last_access_time, leaf.id, leaf) for leaf in leaves]
        heapq.heapify(heap)
        heapq.heappop(heap)[2].last_access_time += LEAVES

    yield ours, naive


@contextmanager
def _reductions() -> Iterator[tuple[Callable[[], object], Callable[[], object]]]:
    group = dist.group.WORLD
    if group is None:
        raise LayoutInvariantError("the benchmark needs a process group")
    kept = RankAgreement([group])

    def naive() -> list[int]:
        ready = []
        for count in (3, 5):  # as a cache that settles writes and loads one after the other
            tensor = torch.tensor([count], dtype=torch.int64)
            dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=group)
            ready.append(int(tensor.item()))
        return ready

    yield (lambda: kept.minimum([3, 5])), naive


class _LateEvent:
    """Complete at a given time, as the event of a copy that a device performs."""

    def __init__(self, seconds: float) -> None:
        self._due = time.perf_counter() + seconds

    def query(self) -> bool:
        return time.perf_counter() >= self._due

    def synchronize(self) -> None:
        while not self.query():
            time.sleep(COPY_SECONDS / 20)


class _LateEngine(L2TransferEngine):
    """Backups end `COPY_SECONDS` after they were submitted."""

    def submit_device_to_host(self, transfers: list[L2Transfer]) -> TransferCompletion:
        event = _LateEvent(COPY_SECONDS)
        return TransferCompletion(event, event, False)


@contextmanager
def _acknowledgements() -> Iterator[tuple[Callable[[], object], Callable[[], object]]]:
    sizes = PoolSizes(page_size=4, device_tokens=16_384, host_ratio=2.0)
    with subjects_runtime(sizes):
        subject = OurSubject("identity", 1, sizes)
        cache = subject.cache
        cache.cache_controller.transfer.engine = _LateEngine("direct")
        numbers = iter(range(1_000_000))

        def back_up(settle: Callable[[], None]) -> None:
            before = cache.stats.backups
            for _ in range(BACKUPS):
                subject.insert_leaf(leaf_tokens(next(numbers), sizes.page_size), chunked=False)
                settle()
            cache.writing_check(write_back=True)
            if cache.stats.backups - before != BACKUPS:
                raise LayoutInvariantError(f"{BACKUPS} backups had {cache.stats.backups - before} acks")
            cache.evict(EvictParams(num_tokens=BACKUPS * sizes.page_size))

        yield (
            lambda: back_up(cache.check_hicache_events),
            lambda: back_up(lambda: cache.writing_check(write_back=True)),
        )
        subject.close()
