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
from typing_extensions import override

from kvlayouts.bench.figures import Figure, compared
from kvlayouts.bench.subjects import OurSubject, PoolSizes, leaf_tokens, subjects_runtime
from kvlayouts.bench.timing import alternating, thread_seconds, wall_seconds
from sglang.srt.mem_cache.hicache.agreement import RankAgreement
from sglang.srt.mem_cache.hicache.tree.leaf_heap import EvictionOrder
from sglang.srt.mem_cache.hicache.waits import EVENTS, BoundedReduction
from sglang.srt.mem_cache.layouts.errors import LayoutInvariantError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from sglang.srt.mem_cache.l2_transfer import L2Transfer

    from kvlayouts.bench.config import BenchConfig
    from kvlayouts.bench.figures import OnStep
    from kvlayouts.common.trace import Trace

DEPTH, LEAVES, BACKUPS = 64, 10_000, 32
COPY_SECONDS = 0.001
COUNTS = (3, 5)  # finished acks of the two queues, writes and loads


@dataclass(frozen=True, slots=True, kw_only=True)
class Forms:
    """Two ways to do one thing. `after` follows each of them, outside of the time that is measured."""

    ours: Callable[[], object]
    naive: Callable[[], object]
    after: Callable[[], object] = lambda: None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
    """One line. `clock` is the wall's where waiting is the cost, else this thread's."""

    case: str
    naive_name: str
    make: Callable[[], AbstractContextManager[Forms]]
    repeats: int
    clock: Callable[[], float] = thread_seconds


def bench_deferred(config: BenchConfig, trace: Trace, on_step: OnStep) -> list[Figure]:
    """Cost of each item a call, in microseconds, in both forms."""
    figures = []
    items = _items()
    for number, item in enumerate(items, 1):
        figures.append(_measured(item, config.rounds))
        on_step("deferred", number, len(items))
    return figures


def _measured(item: _Item, rounds: int) -> Figure:
    with item.make() as forms:
        seconds = alternating(
            {"ours": forms.ours, "naive": forms.naive},
            rounds=rounds,
            repeats=item.repeats,
            clock=item.clock,
            after=forms.after,
        )
    ours, naive = ([1e6 * value for value in seconds[side]] for side in ("ours", "naive"))
    return compared("deferred", item.case, ours, naive, unit="us", baseline_name=item.naive_name, at_most=1.0)


def _items() -> list[_Item]:
    return [
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
            case="one reduction of two counts, its tensor kept",
            naive_name="a new tensor each time",
            make=kept_tensors,
            repeats=500,
        ),
        _Item(
            case="both queues in one reduction",
            naive_name="one reduction after the other",
            make=joint_reductions,
            repeats=500,
        ),
        _Item(
            case=f"{BACKUPS} backups of {1e3 * COPY_SECONDS:g} ms each submitted, acks polled",
            naive_name="waiting for each copy",
            make=acknowledgements,
            repeats=1,
            clock=wall_seconds,
        ),
    ]


class _Node:
    """What an eviction order and a walk touch of a node."""

    def __init__(self, number: int) -> None:
        self.id = number
        self.last_access_time: float = number


@contextmanager
def _clocks() -> Iterator[Forms]:
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

    yield Forms(ours=ours, naive=naive)


@contextmanager
def _orders() -> Iterator[Forms]:
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

    yield Forms(ours=ours, naive=naive)


@contextmanager
def kept_tensors() -> Iterator[Forms]:
    """One reduction of both counts: with the tensor that `RankAgreement` keeps, and with a new one."""
    group = _one_rank_group()
    kept = RankAgreement([group])
    minimum = BoundedReduction(group, op=dist.ReduceOp.MIN, meeting=EVENTS, seconds=None)

    def naive() -> tuple[int, ...]:
        tensor = torch.tensor(COUNTS, dtype=torch.int64)
        minimum(tensor)
        return tuple(tensor.tolist())

    yield Forms(ours=lambda: kept.minimum(COUNTS), naive=naive)


@contextmanager
def joint_reductions() -> Iterator[Forms]:
    """Both counts in one reduction, and in one after the other; `RankAgreement` keeps all tensors."""
    kept = RankAgreement([_one_rank_group()])
    yield Forms(ours=lambda: kept.minimum(COUNTS), naive=lambda: kept.minimum(COUNTS[:1]) + kept.minimum(COUNTS[1:]))


def _one_rank_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    if group is None:
        raise LayoutInvariantError("the benchmark needs a process group")
    return group


class _LateEvent:
    """Complete at a given time of `time.perf_counter`, as the event of a copy that a device performs."""

    def __init__(self, due: float) -> None:
        self._due = due

    def query(self) -> bool:
        return time.perf_counter() >= self._due

    def synchronize(self) -> None:
        while not self.query():
            time.sleep(COPY_SECONDS / 20)


class _LateEngine(L2TransferEngine):
    """Backups take `COPY_SECONDS` each, one after the other, as on a stream."""

    _end = 0.0

    @override
    def submit_device_to_host(self, transfers: list[L2Transfer]) -> TransferCompletion:
        self._end = max(time.perf_counter(), self._end) + COPY_SECONDS
        event = _LateEvent(self._end)
        return TransferCompletion(event, event, False)


class _Backups:
    """Backs leaves up, `BACKUPS` at a time, by copies that take their time."""

    def __init__(self, subject: OurSubject, page_size: int) -> None:
        self._subject, self._page_size = subject, page_size
        self._cache = subject.cache
        self._cache.cache_controller.transfer.engine = _LateEngine("direct")
        self._leaves, self._acks = 0, self._cache.stats.backups

    def submit(self, settle: Callable[[], object]) -> None:
        """`settle` follows each backup."""
        for _ in range(BACKUPS):
            self._leaves += 1
            self._subject.insert_leaf(leaf_tokens(self._leaves, self._page_size), chunked=False)
            settle()

    def wait(self) -> None:
        self._cache.writing_check(write_back=True)

    def finish(self) -> None:
        """Wait for the copies under way, and evict. `LayoutInvariantError` unless each backup has had an ack."""
        self.wait()
        acks = self._cache.stats.backups - self._acks
        if acks != BACKUPS:
            raise LayoutInvariantError(f"{BACKUPS} backups had {acks} acks")
        self._acks += acks
        self._cache.evict(EvictParams(num_tokens=BACKUPS * self._page_size))


@contextmanager
def acknowledgements() -> Iterator[Forms]:
    """Until all backups are submitted and the caller may go on: acks polled, and each copy waited for."""
    sizes = PoolSizes(page_size=4, device_tokens=16_384, host_ratio=2.0)
    with subjects_runtime(sizes):
        subject = OurSubject("identity", 1, sizes)
        backups = _Backups(subject, sizes.page_size)
        yield Forms(
            ours=lambda: backups.submit(subject.cache.check_hicache_events),
            naive=lambda: backups.submit(backups.wait),
            after=backups.finish,
        )
        subject.close()
