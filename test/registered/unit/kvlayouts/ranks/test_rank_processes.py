"""`run_job`: what ranks say is heard, and none is left behind, whoever interrupts and however often."""

from __future__ import annotations

import os
import signal
import threading
from multiprocessing.context import ForkServerProcess
from typing import TYPE_CHECKING

import pytest
from sglang.test.ci.ci_register import register_cpu_ci

from kvlayouts.common.endings import Terminated
from kvlayouts.common.errors import RankError
from kvlayouts.ranks import processes
from kvlayouts.ranks.processes import run_job
from support.rank_jobs import Vanishes, Waits, Warns
from support.replays import rank_processes

if TYPE_CHECKING:
    from collections.abc import Iterator

register_cpu_ci(est_time=30, suite="base-a-test-cpu")
pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(180),
    pytest.mark.usefixtures("fork_server", "ranks_end_with_the_test"),
]


@pytest.fixture
def _ctrl_c_interrupts() -> Iterator[None]:
    """Also where the tests run in the background of a shell, which makes them ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_ctrl_c_interrupts")
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM], ids=lambda signum: signum.name)
def test_a_second_interrupt_does_not_leave_a_stopped_rank_behind(
    second: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped rank does not end by itself: it has to be killed, and whoever waits for that presses Ctrl-C again."""
    monkeypatch.setattr(processes, "_END_SECONDS", 1.0)
    stopped: list[int] = []
    join = ForkServerProcess.join

    def stop_rank_1_and_interrupt(label: str, done: int) -> None:
        victim = next(process.pid for process in rank_processes() if process.name == "kvlayouts-rank-1")
        assert victim is not None
        os.kill(victim, signal.SIGSTOP)
        stopped.append(victim)
        monkeypatch.setattr(ForkServerProcess, "join", interrupt_again_and_join)
        os.kill(os.getpid(), signal.SIGINT)

    def interrupt_again_and_join(process: ForkServerProcess, timeout: float | None = None) -> None:
        os.kill(os.getpid(), second)
        join(process, timeout)

    with pytest.raises(KeyboardInterrupt):
        run_job(Waits(), ranks=2, on_progress=stop_rank_1_and_interrupt)
    assert rank_processes() == []
    assert not _is_there(stopped[0])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_stopped_rank_that_nobody_waits_for_is_noticed_by_its_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_BLAME_SECONDS", 2.0)
    monkeypatch.setattr(processes, "_END_SECONDS", 1.0)
    stopped: list[int] = []
    heard: list[str] = []

    def stop_rank_1(label: str, done: int) -> None:
        heard.append(label)  # once from each rank; one that has said nothing yet has two minutes to start
        if len(heard) == 2:
            victim = next(process.pid for process in rank_processes() if process.name == "kvlayouts-rank-1")
            assert victim is not None
            os.kill(victim, signal.SIGSTOP)
            stopped.append(victim)

    words = "^rank 1 of 2 failed: its process has said nothing for 8 s; it is stopped or stuck$"
    with pytest.raises(RankError, match=words):
        run_job(Waits(), ranks=2, on_progress=stop_rank_1, peer_seconds=6.0)
    assert rank_processes() == []
    assert not _is_there(stopped[0])


@pytest.mark.parametrize("ignored", [False, True], ids=["heard", "nohup"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda signum: signum.name)
def test_termination_and_a_terminal_that_closes_end_the_ranks_as_an_interrupt_does_unless_ignored(
    number: signal.Signals, ignored: bool
) -> None:
    class NotHeard(Exception):
        pass

    def send(label: str, done: int) -> None:
        os.kill(os.getpid(), number)
        raise NotHeard

    before = signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        with pytest.raises(NotHeard if ignored else KeyboardInterrupt) as raised:
            run_job(Waits(), ranks=2, on_progress=send)
        assert isinstance(raised.value, Terminated) is not ignored
        assert getattr(raised.value, "number", number) == number
        assert signal.getsignal(number) is (signal.SIG_IGN if ignored else signal.SIG_DFL)
    finally:
        signal.signal(number, before)
    assert rank_processes() == []


@pytest.mark.parametrize("error", [BrokenPipeError, ConnectionResetError, EOFError])
def test_a_rank_that_cannot_be_started_is_named(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """The server that forks them may be killed at any moment, by the kernel for want of memory for one."""

    def start(_process: ForkServerProcess) -> None:
        raise error

    monkeypatch.setattr(ForkServerProcess, "start", start)
    with pytest.raises(RankError, match=r"^rank 0 of 2 could not be started: the server that forks ranks has ended$"):
        run_job(Waits(), ranks=2, on_progress=lambda *_: None)
    assert rank_processes() == []


def test_a_rank_whose_process_just_ends_is_named_with_its_exit_code() -> None:
    with pytest.raises(RankError, match=r"^rank 1 of 2 failed: its process ended without a word \(exit code 7\)$"):
        run_job(Vanishes(), ranks=2, on_progress=lambda *_: None)
    assert rank_processes() == []


def test_a_job_off_the_main_thread_ends_its_ranks_and_leaves_the_signals_alone() -> None:
    found: list[object] = []

    def run() -> None:
        finished = run_job(Warns(), ranks=3, on_progress=lambda *_: None)
        found.append({rank: done["warns"].report for rank, done in finished.items()})

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [{0: 0, 1: 1, 2: 2}]
    assert rank_processes() == []
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_ranks_log_is_said_once_for_each_place_that_says_it(caplog: pytest.LogCaptureFixture) -> None:
    run_job(Warns(), ranks=2, on_progress=lambda *_: None)
    said = [record.getMessage() for record in caplog.records]
    assert [message[:8] in ("rank 0: ", "rank 1: ") for message in said] == [True] * 3, said
    for words in (": room is short: 0", ": RuntimeWarning: too warm", ": RuntimeWarning: too cold"):
        assert sum(words in message for message in said) == 1, said


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
