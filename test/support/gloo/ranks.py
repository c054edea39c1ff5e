"""Real processes, one a rank, that stay up and run one scenario after the other over gloo.

    with GlooRanks(4) as ranks:
        reports = ranks.run(2, scenario, spec, ...)      scenario(world, spec, ...) in ranks 0 and 1 at once

A scenario is a function of an importable module. An exception in any rank fails the test with that rank's traceback.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

import torch
import torch.distributed as dist

from support.fork_server import forking_context_for_tests

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from types import TracebackType

P = ParamSpec("P")
ResultT = TypeVar("ResultT")

PEER_SECONDS = 60.0
ANSWER_SECONDS = 150.0
LAST_WORD_SECONDS = 5.0  # for the other ranks, once one has failed
GRID_COLUMNS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What a rank knows of its peers: `number` of `size`, and the process groups that it is in.

    `row` and `column` are the two groups of a 2 x 2 grid of all four ranks: 0 1 over 2 3.
    """

    number: int
    size: int
    group: dist.ProcessGroup
    row: dist.ProcessGroup | None = None
    column: dist.ProcessGroup | None = None

    def collectives(self) -> tuple[int, ...]:
        """Collectives of any kind so far in each group that this rank is in, as the groups themselves count them."""
        groups = (self.group, self.row, self.column)
        return tuple(_count(group) for group in groups if group is not None)


def _count(group: dist.ProcessGroup) -> int:
    return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]  # noqa: SLF001  # not in torch's stub


class GlooRanks:
    """Starts and ends the processes; see above. SGLang's process-wide settings are in place in each.

    After a failure new processes are started, since ranks that were left alone in a collective are of no more use.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._context = forking_context_for_tests()
        self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def run(
        self, ranks: int, scenario: Callable[Concatenate[World, P], ResultT], *args: P.args, **kwargs: P.kwargs
    ) -> list[ResultT]:
        """`scenario(world, *args, **kwargs)` in the first `ranks` ranks at once; their results in order of rank."""
        for pipe in self._pipes[:ranks]:
            pipe.send((ranks, scenario, args, kwargs))
        answers: dict[int, tuple[str, Any]] = {}
        deadline = time.monotonic() + ANSWER_SECONDS
        while len(answers) < ranks and (left := deadline - time.monotonic()) > 0:
            missing = [number for number in range(ranks) if number not in answers]
            ready = wait([self._pipes[number] for number in missing], left)
            for number in missing:
                if self._pipes[number] in ready:
                    answers[number] = self._receive(number)
                    if answers[number][0]:
                        deadline = min(deadline, time.monotonic() + LAST_WORD_SECONDS)
        failed = [f"rank {number} of {ranks}:\n{trace}" for number, (trace, _) in sorted(answers.items()) if trace]
        if failed or len(answers) < ranks:
            self._end()
            self._start()
            silent = [f"rank {number} of {ranks}: no answer" for number in range(ranks) if number not in answers]
            raise AssertionError("\n".join(failed + silent))
        return [answers[number][1] for number in range(ranks)]

    def _receive(self, number: int) -> tuple[str, Any]:
        try:
            answer: tuple[str, Any] = self._pipes[number].recv()
        except EOFError:
            return "the process ended", None
        return answer

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        their_line, self._lifeline = self._context.Pipe(duplex=False)
        self._pipes: list[Connection] = []
        self._processes = []
        for number in range(self._size):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(
                target=_serve,
                args=(number, self._size, str(Path(self._folder.name) / "rendezvous"), theirs, their_line),
                name=f"gloo-rank-{number}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        their_line.close()

    def _end(self) -> None:
        self._lifeline.close()
        for process in self._processes:
            process.join(10)
            process.kill()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()


def _serve(number: int, size: int, rendezvous: str, pipe: Connection, lifeline: Connection) -> None:
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    timeout = timedelta(seconds=PEER_SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=number, world_size=size, timeout=timeout)
    from sglang.srt.mem_cache.hicache.cpu.support import install_cpu_support
    from sglang.srt.mem_cache.hicache.runtime import standalone_runtime

    install_cpu_support()
    worlds = _worlds(number, size)
    with standalone_runtime(rank=number, world_size=size, page_size=4):
        while True:
            ranks, scenario, args, kwargs = pipe.recv()
            try:
                answer = ("", scenario(worlds[ranks], *args, **kwargs))
            except Exception:
                answer = (traceback.format_exc(), None)
            pipe.send(answer)


def _end_with(lifeline: Connection) -> None:
    with suppress(EOFError, OSError):
        lifeline.recv_bytes()
    os._exit(0)


def _worlds(number: int, size: int) -> dict[int, World]:
    """This rank's world among the first 2 and among all ranks. Every rank must make every group."""
    pair = _group([[0, 1]], number)
    rows = [list(range(start, start + GRID_COLUMNS)) for start in range(0, size, GRID_COLUMNS)]
    row = _group(rows, number)
    column = _group([list(ranks) for ranks in zip(*rows, strict=True)], number)
    everyone = _group([list(range(size))], number)
    assert everyone is not None
    worlds = {size: World(number=number, size=size, group=everyone, row=row, column=column)}
    if pair is not None:
        worlds[2] = World(number=number, size=2, group=pair)
    return worlds


def _group(partition: list[list[int]], number: int) -> dist.ProcessGroup | None:
    """The group of `partition` that this rank is in."""
    own = None
    for ranks in partition:
        group = dist.new_group(ranks, timeout=timedelta(seconds=PEER_SECONDS))
        if number in ranks:
            own = group
    return own
