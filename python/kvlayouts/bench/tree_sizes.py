"""What one operation costs in trees of a thousand to a million leaves, ours and SGLang's.

The trees are flat: every leaf is one page below the root, which is the worst case for whoever looks at all leaves.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from kvlayouts.bench.figures import Figure, bounded
from kvlayouts.bench.sglang_subjects import SGLANG_TREES
from kvlayouts.bench.subjects import (
    OurSubject,
    PoolSizes,
    Subject,
    leaf_tokens,
    subjects_runtime,
)
from kvlayouts.bench.timing import no_collection, seconds_of
from sglang.srt.mem_cache.hicache.seam.trees import HIRADIX, UNIFIED

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from sglang.srt.server_args import ServerArgs

    from kvlayouts.bench.config import BenchConfig
    from kvlayouts.bench.figures import OnStep
    from kvlayouts.common.trace import Trace
    from sglang.srt.mem_cache.hicache.tree.node import LayoutTreeNode

PAGE_SIZE = 4
SPARE_PAGES = 4_096
OUR_SAMPLES, THEIR_SAMPLES = 100, 5
_MOST_LEAVES = {HIRADIX: 100_000, UNIFIED: 10_000}
SGLANG: Mapping[str, tuple[Callable[[PoolSizes, ServerArgs], Subject], int]] = {
    name: (make, _MOST_LEAVES[name]) for name, make in SGLANG_TREES.items()
}
"""How each of SGLang's trees is made, and the most leaves with which one eviction ends in a reasonable time."""
FLAT, EVICT_MS, GROWTH = 2.0, 0.1, 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeTimes:
    """Median microseconds of each operation, by name, in a tree of `leaves`."""

    leaves: int
    micros: dict[str, float]


@dataclass(slots=True, kw_only=True)
class Growth:
    """How many leaves all trees of `bench` have so far, of `total`."""

    bench: str
    total: int
    on_step: OnStep
    done: int = 0

    def add(self, leaves: int = 1) -> None:
        """So many more; says so now and then, and at the end."""
        self.done += leaves
        if self.done % 1_000 == 0 or self.done == self.total:
            self.on_step(self.bench, self.done, self.total)


_measured: dict[BenchConfig, list[TreeTimes]] = {}


def bench_evict(config: BenchConfig, trace: Trace, on_step: OnStep) -> list[Figure]:
    """Eviction of one page from the device and from the host, beside SGLang's trees where those finish."""
    their_sizes = {name: [size for size in config.tree_sizes if size <= most] for name, (_, most) in SGLANG.items()}
    total = sum(config.tree_sizes) + sum(sum(sizes) for sizes in their_sizes.values())
    growth = Growth(bench="evict", total=total, on_step=on_step)
    ours = our_times(config, growth)
    theirs = {name: _their_times(name, sizes, growth) for name, sizes in their_sizes.items()}
    figures: list[Figure] = []
    for tier in ("device", "host"):
        for times in ours:
            value = times.micros[f"evict {tier}"] / 1e3
            beside = {
                name: found[times.leaves, tier] for name, found in theirs.items() if (times.leaves, tier) in found
            }
            own = bounded("evict", f"{tier}, {times.leaves:,} leaves", value, unit="ms", at_most=EVICT_MS)
            figures += [
                replace(own, baseline=baseline, baseline_name=name, ratio=value / baseline)
                for name, baseline in beside.items()
            ] or [own]
        figures.append(_flatness("evict", f"evict {tier}", ours))
    return figures


def bench_scale(config: BenchConfig, trace: Trace, on_step: OnStep) -> list[Figure]:
    """How each operation of ours grows with the tree: the exponent of a power law fitted to the medians."""
    ours = our_times(config, Growth(bench="scale", total=sum(config.tree_sizes), on_step=on_step))
    figures: list[Figure] = []
    for operation in ours[0].micros:
        figures.extend(
            Figure(
                bench="scale",
                case=f"{operation}, {times.leaves:,} nodes",
                value=times.micros[operation],
                unit="us",
            )
            for times in ours
        )
        exponent = growth_exponent([t.leaves for t in ours], [t.micros[operation] for t in ours])
        figures.append(
            bounded("scale", f"{operation}: grows as nodes to the power of", exponent, unit="", at_most=GROWTH)
        )
    return figures


def growth_exponent(sizes: list[int], times: list[float]) -> float:
    """Slope of the times over the sizes, both as logarithms: 0 is constant, 1 linear; log n gives about 0.1 here."""
    return float(np.polyfit(np.log(sizes), np.log(times), 1)[0])


def our_times(config: BenchConfig, growth: Growth) -> list[TreeTimes]:
    """Grow our tree to each size and time its operations.

    Done once for a configuration: a later benchmark gets the same times, and its trees have grown at once.
    """
    if config not in _measured:
        _measured[config] = _grow_ours(config, growth)
    else:
        growth.add(sum(config.tree_sizes))
    return _measured[config]


def _flatness(bench: str, operation: str, ours: list[TreeTimes]) -> Figure:
    values = [times.micros[operation] for times in ours]
    case = f"{operation.removeprefix('evict ')}: slowest size over fastest"
    return bounded(bench, case, max(values) / min(values), unit="x", at_most=FLAT)


def _sizes(leaves: int) -> PoolSizes:
    return PoolSizes(page_size=PAGE_SIZE, device_tokens=(leaves + SPARE_PAGES) * PAGE_SIZE, host_ratio=1.25)


def _grow_ours(config: BenchConfig, growth: Growth) -> list[TreeTimes]:
    subjects: list[OurSubject] = []
    for leaves in config.tree_sizes:
        sizes = _sizes(leaves)
        with subjects_runtime(sizes), no_collection():
            subject = OurSubject("identity", 1, sizes)
            _grow(subject, leaves, growth)
        subjects.append(subject)
    found = _time_ours(subjects, config.tree_sizes)
    for subject in subjects:
        subject.close()
    return found


def _grow(subject: Subject | OurSubject, leaves: int, growth: Growth) -> None:
    for number in range(leaves):
        subject.serve(leaf_tokens(number, PAGE_SIZE))
        growth.add()


def _time_ours(subjects: list[OurSubject], sizes: tuple[int, ...]) -> list[TreeTimes]:
    rng = random.Random(0)
    numbers = iter(range(sizes[-1], 2 * sizes[-1]))
    waiting: dict[int, LayoutTreeNode[Any]] = {}

    def match(subject: OurSubject, leaves: int) -> None:
        tokens = leaf_tokens(rng.randrange(leaves), PAGE_SIZE)
        subject.cache.match(RadixKey(tokens))

    def insert(subject: OurSubject, leaves: int) -> None:
        waiting[leaves] = subject.insert_leaf(leaf_tokens(next(numbers), PAGE_SIZE), chunked=True)

    def back_up(subject: OurSubject, leaves: int) -> None:
        subject.cache.write_backup(waiting[leaves])

    operations = {"match": match, "insert": insert, "backup": back_up, **_EVICTIONS}
    times: dict[int, dict[str, float]] = {leaves: {} for leaves in sizes}
    everyone = list(zip(subjects, sizes, strict=True))
    for group in (("match",), ("insert", "backup"), ("evict device",), ("evict host",)):
        if group == ("evict host",):
            for subject, leaves in everyone:
                subject.cache.evict(EvictParams(num_tokens=2 * leaves * PAGE_SIZE))
        for (name, leaves), seconds in _take_turns(everyone, {n: operations[n] for n in group}, OUR_SAMPLES).items():
            times[leaves][name] = 1e6 * seconds
    return [TreeTimes(leaves=leaves, micros=micros) for leaves, micros in times.items()]


def _evict_device(subject: Any, leaves: int) -> None:  # noqa: ANN401  # ours or SGLang's
    subject.cache.evict(EvictParams(num_tokens=PAGE_SIZE))


def _evict_host(subject: Any, leaves: int) -> None:  # noqa: ANN401  # ours or SGLang's
    subject.cache.evict_host(PAGE_SIZE)


_EVICTIONS: dict[str, Callable[[Any, int], None]] = {"evict device": _evict_device, "evict host": _evict_host}


def _take_turns(
    everyone: list[tuple[Any, int]], operations: Mapping[str, Callable[[Any, int], None]], samples: int
) -> dict[tuple[str, int], float]:
    """Median seconds of each operation in each tree. Trees take turns, so what slows one sample slows all sizes."""
    found: dict[tuple[str, int], list[float]] = {}
    with no_collection():
        for _ in range(samples):
            for subject, leaves in everyone:
                for name, operation in operations.items():
                    seconds = seconds_of(partial(operation, subject, leaves))
                    found.setdefault((name, leaves), []).append(seconds)
                subject.cache.check_hicache_events()
    return {key: median(values) for key, values in found.items()}


def _their_times(name: str, tree_sizes: Sequence[int], growth: Growth) -> dict[tuple[int, str], float]:
    """Milliseconds of one eviction from one of SGLang's trees, by (leaves, tier)."""
    found: dict[tuple[int, str], float] = {}
    for leaves in tree_sizes:
        sizes = _sizes(leaves)
        with subjects_runtime(sizes) as server_args, no_collection():
            make, _ = SGLANG[name]
            subject = make(sizes, server_args)
            _grow(subject, leaves, growth)
            for operation, evict in _EVICTIONS.items():
                (seconds,) = _take_turns([(subject, leaves)], {operation: evict}, THEIR_SAMPLES).values()
                found[leaves, operation.removeprefix("evict ")] = 1e3 * seconds
                subject.cache.evict(EvictParams(num_tokens=2 * leaves * PAGE_SIZE))
            subject.close()
    return found
