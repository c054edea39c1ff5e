"""Starts one process a rank and listens to them.

The ranks are forked from a server process that has imported SGLang once, since that import takes longer than
many a job. If one rank fails or dies, the others are ended at once; none outlives `run_job`, and none the
process that called it, however that ends.
"""

from __future__ import annotations

import logging
import multiprocessing as mp
import os
import signal
import tempfile
import threading
import time
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

from kvlayouts.common.endings import termination_as_interrupt
from kvlayouts.common.errors import RankError
from kvlayouts.ranks.job import RankOrder
from kvlayouts.ranks.launch import start_rank
from kvlayouts.ranks.messages import Alive, Done, Failed, Finished, Logged, Message, Progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerContext, ForkServerProcess

    from kvlayouts.ranks.job import Job

_PRELOAD_FOLDER, _PRELOAD_MODULE = Path(__file__).parent / "fork_server", "kvlayouts_preload"
PEER_SECONDS = 120.0
"""A rank that waits longer than this for another one within a collective fails."""

_END_SECONDS = 5.0
_LISTEN_SECONDS = 1.0
_START_SECONDS = 120.0  # SGLang's import, before a rank can say anything
_BLAME_SECONDS = 5.0  # after a rank has waited for its peers in vain: time for the others to say why

logger = logging.getLogger(__name__)


class RankTraceback(Exception):
    """The cause of a `RankError`: the traceback of the rank that failed, as text."""


def run_job(
    job: Job, *, ranks: int, on_progress: Callable[[str, int], None], peer_seconds: float = PEER_SECONDS
) -> dict[int, dict[str, Finished]]:
    """Do `job` on `ranks` processes, and return what each rank finished, by rank and label.

    `on_progress` hears what ranks say of it. What ranks log is logged here, once. Raises `RankError`, naming the
    rank, if one fails, dies or lets its peers wait for `peer_seconds` within a collective. No rank is left after
    an error, an interrupt included.
    """
    with (
        termination_as_interrupt(),
        tempfile.TemporaryDirectory(prefix="kvlayouts-") as folder,
        _ranks(job, ranks, Path(folder), peer_seconds) as processes,
    ):
        return _Listener(processes, on_progress, peer_seconds).listen()


class _Rank:
    def __init__(self, number: int, process: ForkServerProcess, pipe: Connection) -> None:
        self.number = number
        self.process = process
        self.pipe = pipe

    def receive(self) -> Message:
        """The next message; a `Failed` if the process has ended and there is none."""
        try:
            message: Message = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(_END_SECONDS)
            return Failed(error=f"its process {_how_it_ended(self.process.exitcode)}", details="")
        return message


def _how_it_ended(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    return f"ended without a word (exit code {code})"


@contextmanager
def _ranks(job: Job, count: int, folder: Path, peer_seconds: float) -> Iterator[list[_Rank]]:
    """The rank processes; ended when the context is left, however that happens."""
    context = forking_context()
    ranks: list[_Rank] = []
    their_line, lifeline = context.Pipe(duplex=False)
    try:
        for number in range(count):
            ours, theirs = context.Pipe(duplex=False)
            order = RankOrder(
                job=job,
                rank=number,
                ranks=count,
                rendezvous=str(folder / "rendezvous"),
                peer_seconds=peer_seconds,
            )
            process = context.Process(
                target=start_rank, args=(order, theirs, their_line), name=f"kvlayouts-rank-{number}", daemon=True
            )
            try:
                process.start()
            except (OSError, EOFError) as error:
                reason = "the server that forks ranks has ended"
                raise RankError(f"rank {number} of {count} could not be started: {reason}") from error
            theirs.close()
            ranks.append(_Rank(number, process, ours))
        yield ranks
    finally:
        with _interrupts_ignored():
            lifeline.close()
            their_line.close()
            _end(ranks)


def forking_context(*modules: str) -> ForkServerContext:
    """Start the fork server, unless it runs, and return its context. It imports what ranks need, and `modules`.

    Ctrl-C is blocked in it and in all that it forks: it is the starting process's to handle.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores; inherited by the fork server
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([_PRELOAD_MODULE, *modules])
    resource_tracker.ensure_running()  # unblocks the signal
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    search_path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_PRELOAD_FOLDER), search_path)))
    try:
        forkserver.ensure_running()
    finally:
        if search_path is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = search_path
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    return context


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Another interrupt asks for what is being done. Off the main thread there is none to ignore."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # Blocking the signals would not do: another thread would take them, and Python raises in this one.
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in signals}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _end(ranks: list[_Rank]) -> None:
    """Ranks end with the lifeline; those that cannot, since they are stopped or stuck, are killed."""
    deadline = time.monotonic() + _END_SECONDS
    for rank in ranks:
        rank.process.join(max(0.0, deadline - time.monotonic()))
        if rank.process.is_alive():
            rank.process.kill()
            rank.process.join()
        rank.pipe.close()


class _Listener:
    """Collects what the ranks say."""

    def __init__(self, ranks: list[_Rank], on_progress: Callable[[str, int], None], peer_seconds: float) -> None:
        self._ranks = ranks
        self._silence_seconds = peer_seconds + _BLAME_SECONDS  # peers that wait in a collective speak up before
        self._silent_from = {rank.number: time.monotonic() + _START_SECONDS for rank in ranks}
        self._on_progress = on_progress
        self._listening = {rank.pipe: rank for rank in ranks}
        self._finished: dict[int, dict[str, Finished]] = {rank.number: {} for rank in ranks}
        self._failed: dict[int, Failed] = {}
        self._log_origins: set[str] = set()

    def listen(self) -> dict[int, dict[str, Finished]]:
        """Every rank's reports by layout, once all ranks are done. Raises `RankError` if one fails."""
        while self._listening and not self._failed:
            self._hear(_LISTEN_SECONDS)
            self._notice_silence()
        if not self._failed:
            return self._finished
        deadline = time.monotonic() + _BLAME_SECONDS
        while self._listening and self._culprit() is None and (left := deadline - time.monotonic()) > 0:
            self._hear(left)
        raise self._error()

    def _hear(self, timeout: float | None) -> None:
        for ready in wait(list(self._listening), timeout):
            rank = next(rank for pipe, rank in self._listening.items() if pipe is ready)
            message = rank.receive()
            self._silent_from[rank.number] = time.monotonic()
            match message:
                case Progress():
                    self._on_progress(message.label, message.done)
                case Logged():
                    self._log(rank, message)
                case Alive():
                    pass
                case Finished():
                    self._finished[rank.number][message.label] = message
                case Failed():
                    del self._listening[rank.pipe]
                    self._failed[rank.number] = message
                case Done():
                    del self._listening[rank.pipe]
                case _:
                    assert_never(message)

    def _notice_silence(self) -> None:
        for rank in self._listening.values():
            if time.monotonic() - self._silent_from[rank.number] > self._silence_seconds:
                error = f"its process has said nothing for {self._silence_seconds:.0f} s; it is stopped or stuck"
                self._failed[rank.number] = Failed(error=error, details="")

    def _log(self, rank: _Rank, message: Logged) -> None:
        """All ranks come to the same places again and again: say it once."""
        if message.origin not in self._log_origins:
            self._log_origins.add(message.origin)
            logger.warning("rank %d: %s", rank.number, message.text)

    def _culprit(self) -> int | None:
        """The first rank that failed for a reason of its own, if any."""
        return next((rank for rank, failed in self._failed.items() if failed.waiting_in is None), None)

    def _error(self) -> RankError:
        of = f"of {len(self._ranks)}"
        culprit = self._culprit()
        if culprit is not None:
            failed = self._failed[culprit]
            return _with_traceback(RankError(f"rank {culprit} {of} failed: {failed.error}"), failed)
        waiting, failed = next(iter(self._failed.items()))
        silent = sorted(rank.number for rank in self._listening.values())
        named = f"rank {' and '.join(str(rank) for rank in silent)} {of} does not answer; " if silent else ""
        return _with_traceback(
            RankError(f"{named}rank {waiting} {of} waited for its peers in {failed.waiting_in}: {failed.error}"),
            failed,
        )


def _with_traceback(error: RankError, failed: Failed) -> RankError:
    if failed.details:
        error.__cause__ = RankTraceback(failed.details)
    return error
