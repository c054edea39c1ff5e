"""Time of this thread, not of the wall: other work on the machine is not counted, though it still slows caches down."""

from __future__ import annotations

import gc
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

thread_seconds = time.thread_time
wall_seconds = time.perf_counter


def seconds_of(work: Callable[[], object], repeats: int = 1, *, clock: Callable[[], float] = thread_seconds) -> float:
    """Seconds of one call of `work`, averaged over `repeats`."""
    started = clock()
    for _ in range(repeats):
        work()
    return (clock() - started) / repeats


def alternating(
    work: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    repeats: int,
    clock: Callable[[], float] = thread_seconds,
    after: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Seconds of one call of each, one a round; all are called in turn in each round.

    `after` follows the `repeats` calls of each and is not counted.
    """
    for each in work.values():
        each()  # what is made at the first call is made now
        after()
    seconds: dict[str, list[float]] = {name: [] for name in work}
    with no_collection():
        for _ in range(rounds):
            for name, each in work.items():
                seconds[name].append(seconds_of(each, repeats, clock=clock))
                after()
    return seconds


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage collection inside: it would be charged to whoever happens to run. May be nested."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
