"""Files and streams of a command, where something is wrong with one of them."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from sglang.test.ci.ci_register import register_cpu_ci

from kvlayouts.common.errors import RunError
from kvlayouts.common.outputs import Output, deliver
from kvlayouts.common.trace import read_trace
from support.replays import conversations, write_trace

if TYPE_CHECKING:
    from pathlib import Path

register_cpu_ci(est_time=10, suite="base-a-test-cpu")


def _fails_half_way(path: Path) -> None:
    path.write_text("half", encoding="utf-8")
    raise OSError(28, "No space left on device")


def _writes_all(path: Path) -> None:
    path.write_text("all", encoding="utf-8")


def test_a_file_that_cannot_be_written_leaves_no_half_of_it_and_costs_none_of_the_others(tmp_path: Path) -> None:
    before, broken, whole, old = (tmp_path / name for name in ("before", "broken", "whole", "old"))
    old.write_text("before", encoding="utf-8")
    with pytest.raises(RunError, match=r"^--json .*broken: cannot be written: No space left on device$"):
        deliver(
            lambda _console: None,
            Output(flag="--plot", path=before, write=_writes_all),
            Output(flag="--json", path=broken, write=_fails_half_way),
            Output(flag="--report", path=whole, write=_writes_all),
        )
    assert (before.read_text(encoding="utf-8"), whole.read_text(encoding="utf-8")) == ("all", "all")
    assert not broken.exists()
    with pytest.raises(RunError):
        deliver(lambda _console: None, Output(flag="--json", path=old, write=_fails_half_way))
    assert old.exists(), "what was there before is not ours to remove"


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_lead_nowhere_and_files_are_written(closed: str, tmp_path: Path) -> None:
    file = tmp_path / "story.json"
    program = "from kvlayouts.main import main; raise SystemExit(main())"
    command = [sys.executable, "-c", program, "explain", "--tokens", "256", "--json", str(file)]
    found = subprocess.run(
        ["sh", "-c", f'"$@" {closed}', "sh", *command], capture_output=True, text=True, check=False, timeout=60
    )
    assert (found.returncode, found.stderr) == (0, "")
    assert file.read_text(encoding="utf-8").startswith("{")


def test_a_trace_whose_name_is_not_utf_8_has_a_name_that_can_be_drawn(tmp_path: Path) -> None:
    path = write_trace(tmp_path / os.fsdecode(b"tr\xff.jsonl"), conversations(requests=2))
    trace = read_trace(path)
    assert (trace.name, trace.path) == ("tr\ufffd.jsonl", path)
