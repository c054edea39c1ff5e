"""Commands that run on the CPU do so on a machine that has CUDA: neither they nor what they start touch it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sglang.test.ci.ci_register import register_cpu_ci

import support

register_cpu_ci(est_time=40, suite="base-a-test-cpu")

CUDA_SEEN = Path(support.__file__).with_name("cuda_seen")

COMMANDS = (
    "soak --ranks 2 --events 400 --check-every 200",
    "replay --cp-size 2 --requests 4 --block-tokens 1 --page-size 4",
    "bench --only metadata --quick",
)
RUNS = """
import sys
import torch
from kvlayouts.main import main

assert torch.cuda.is_available()
for line in sys.argv[1:]:
    print("ended", main(line.split()), line)
"""


@pytest.mark.processes
@pytest.mark.slow
def test_neither_the_command_nor_a_rank_initialises_cuda() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUNS, *COMMANDS],
        env={name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        | {"PYTHONPATH": os.pathsep.join(filter(None, (str(CUDA_SEEN), os.environ.get("PYTHONPATH"))))},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    ended = [line for line in done.stdout.splitlines() if line.startswith("ended ")]
    assert ended == [f"ended 0 {line}" for line in COMMANDS], done.stderr[-3000:]
