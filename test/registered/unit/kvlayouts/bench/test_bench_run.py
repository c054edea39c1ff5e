"""`kvlayouts bench` as a user calls it: every benchmark runs on real caches, and the exit status follows the goals."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from sglang.test.ci.ci_register import register_cpu_ci

from kvlayouts import main as command
from kvlayouts.bench.config import BENCHES

if TYPE_CHECKING:
    from pathlib import Path

register_cpu_ci(est_time=60, suite="base-a-test-cpu")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_every_benchmark_gives_figures_and_a_missed_goal_is_exit_status_1(tmp_path: Path) -> None:
    """In a process of its own, since it makes a process group. Times are this machine's: no figure is asserted."""
    target = tmp_path / "bench.json"
    program = f"import sys; from {command.__name__} import main; sys.exit(main(sys.argv[1:]))"
    ended = subprocess.run(
        [sys.executable, "-c", program, "bench", "--quick", "--json", str(target)],
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert ended.returncode in (0, 1), ended.stderr[-2000:]
    found = json.loads(target.read_text(encoding="utf-8"))
    assert list(dict.fromkeys(figure["bench"] for figure in found["figures"])) == list(BENCHES)
    shown = [line.partition(": ")[0] for line in ended.stderr.splitlines() if line.endswith(" steps")]
    assert list(dict.fromkeys(shown)) == list(BENCHES)
    missed = [figure for figure in found["figures"] if figure["passed"] is False]
    assert ended.returncode == bool(missed)
    judged = [figure for figure in found["figures"] if figure["passed"] is not None]
    assert f"{len(judged) - len(missed)} of {len(judged)} goals reached" in " ".join(ended.stdout.split())
