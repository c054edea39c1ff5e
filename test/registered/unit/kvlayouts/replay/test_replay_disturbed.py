"""Replays that are disturbed: ranks that are killed or stopped, and the end of the process that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sglang.test.ci.ci_register import register_cpu_ci

from kvlayouts import main as command
from kvlayouts.common.errors import RunError
from kvlayouts.replay.driver import run_replay
from support.replays import conversations, make_trace, rank_processes, small_config, without_progress, write_trace

if TYPE_CHECKING:
    from collections.abc import Callable

register_cpu_ci(est_time=90, suite="base-a-test-cpu")
pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(180),
    pytest.mark.usefixtures("fork_server", "ranks_end_with_the_test"),
]


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_that_is_killed_is_named_within_seconds_and_no_process_is_left(victim: int, tmp_path: Path) -> None:
    times: list[float] = []
    with pytest.raises(RunError, match=f"^rank {victim} of 3 failed: its process was killed by signal 9 .SIGKILL"):
        _disturb(tmp_path, victim, signal.SIGKILL, peer_seconds=60.0, times=times)
    assert time.monotonic() - times[0] < 30
    assert rank_processes() == []


def test_a_rank_that_stops_answering_is_named_by_the_others_after_the_stated_time(tmp_path: Path) -> None:
    pids: list[int] = []
    times: list[float] = []
    with pytest.raises(
        RunError,
        match=r"^rank 1 of 3 does not answer; rank [02] of 3 waited for its peers in \w+: identity, request \d+ of ",
    ):
        _disturb(tmp_path, 1, signal.SIGSTOP, peer_seconds=10.0, pids=pids, times=times)
    assert 9 < time.monotonic() - times[0] < 60
    assert rank_processes() == []
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_an_exception_in_the_caller_leaves_no_process(tmp_path: Path) -> None:
    config = small_config(cp_size=3)

    def interrupt(layout: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_replay(config, make_trace(tmp_path, requests=60, block_tokens=config.block_tokens), interrupt)
    assert rank_processes() == []


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for left processes in /proc")
@pytest.mark.parametrize(
    ("signum", "moment"),
    [
        (signal.SIGINT, "while SGLang is imported"),
        (signal.SIGINT, "while requests are replayed"),
        (signal.SIGKILL, "while requests are replayed"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_ctrl_c_or_the_end_of_the_command_leaves_no_process_behind(
    signum: signal.Signals, moment: str, tmp_path: Path
) -> None:
    """Ctrl-C reaches every process of the terminal's foreground group; SIGKILL only the command itself."""
    trace = write_trace(tmp_path / "long.jsonl", conversations(requests=2_000))
    program = (
        f"import sys; from {command.__name__} import main; sys.exit(main(['replay', {str(trace)!r}, *sys.argv[1:]]))"
    )
    options = ("--cp-size", "2", "--block-tokens", "32", "--page-size", "16", "--device-tokens", "384")
    with subprocess.Popen(
        [sys.executable, "-c", program, *options], stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as running:
        assert running.stderr is not None
        if moment == "while requests are replayed":
            first = running.stderr.readline()
            assert first.startswith("identity: "), first + running.stderr.read()
            assert len(_group_members(running.pid)) >= 4
        else:
            _wait_until(lambda: len(_group_members(running.pid)) >= 3, seconds=60)
        if signum == signal.SIGINT:
            os.killpg(running.pid, signum)
        else:
            running.kill()
        _, error = running.communicate(timeout=20)
    _wait_until(lambda: not _group_members(running.pid), seconds=10)
    if signum == signal.SIGINT:
        assert running.returncode == 130
        assert without_progress(error) == ["kvlayouts: error: interrupted"]


def _disturb(
    folder: Path,
    victim: int,
    signum: signal.Signals,
    *,
    peer_seconds: float,
    times: list[float],
    pids: list[int] | None = None,
) -> None:
    """Replay a trace of minutes on three ranks, and send `victim` a signal at the first progress; `times` says when."""
    config = small_config(cp_size=3)
    trace = make_trace(folder, requests=2_000, block_tokens=config.block_tokens)
    sent: list[int] = []

    def on_progress(layout: str, done: int, total: int) -> None:
        assert 0 < done < total
        if not sent:
            ranks = {process.name: process.pid for process in rank_processes() if process.pid is not None}
            assert len(ranks) == 3
            sent.extend(ranks.values())
            times.append(time.monotonic())
            os.kill(ranks[f"kvlayouts-rank-{victim}"], signum)

    try:
        run_replay(config, trace, on_progress, peer_seconds=peer_seconds)
    finally:
        if pids is not None:
            pids.extend(sent)


def _group_members(group: int) -> list[int]:
    """Processes of a process group that have not ended, from /proc."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(its_group) == group and state not in "ZX":
            found.append(int(stat.parent.name))
    return found


def _wait_until(condition: Callable[[], bool], *, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not so within {seconds} s"
        time.sleep(0.02)
