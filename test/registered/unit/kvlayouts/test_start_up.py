"""What a command loads before it answers: nothing heavy for help and mistakes, and never what it does not use.

Processes of their own say which of the heavy packages they hold after a command. A time would tell another thing on
every machine.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvlayouts.main import cli

HEAVY = ("sglang", "transformers", "torch", "numpy", "rich", "matplotlib", "jinja2")

RUNS = """
import sys
from kvlayouts.main import main

for line in sys.argv[2:]:
    status = main(line.split())
    loaded = sorted(set(sys.argv[1].split(",")) & set(sys.modules))
    print("ended", status, *loaded, "after", line)
"""

MISTAKES = (
    "nonesuch",
    "replay nowhere.jsonl",
    "replay --layout nonesuch",
    "replay --layout identity --layout identity",
    "replay --layout identity --layout-config {",
    "replay --pool gqa",
    "replay --page-size 32 --pool dsa",
    "replay --host-ratio nan",
    "replay --requests 5000",
    "replay --device-tokens 1000",
    "replay --plot out.pdf",
    "plan",
    "plan --layout nonesuch",
    "plan --kv-bytes-per-token 1000 --host-gb 1 --host-ratio 2",
    "plan --kv-bytes-per-token 1000 --cp-size 3 --gpus 8",
    "plan --kv-bytes-per-token 1000 --device-tokens 7",
    "explain --layout nonesuch",
    "explain --tokens 1",
    "explain --split 7",
    "explain --svg out.png",
    "soak --layout nonesuch",
    "soak --events 0",
    "soak --faults nonesuch",
    "bench --only nonesuch",
    "bench --rounds 1",
)


def _python(program: str, *arguments: str) -> list[str]:
    """The lines that begin with `ended`."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("ended ")]


def _loaded(*commands: str) -> list[str]:
    return _python(RUNS, ",".join(HEAVY), *commands)


def test_help_and_mistyped_options_load_nothing_heavy() -> None:
    helps = ["--help", *(f"{name} --help" for name in cli.commands)]
    mistyped = ["--hepl", *(f"{name} --nonesuch" for name in cli.commands)]
    assert _loaded("--version", *helps, *mistyped) == [
        *(f"ended 0 after {line}" for line in ("--version", *helps)),
        *(f"ended 2 after {line}" for line in mistyped),
    ]


def test_a_mistake_is_told_before_anything_heavy_is_loaded() -> None:
    assert _loaded(*MISTAKES) == [f"ended 2 after {line}" for line in MISTAKES]


def test_a_picture_of_a_strategy_needs_no_sglang() -> None:
    (line,) = _loaded("explain --tokens 640")
    assert line == "ended 0 numpy rich torch after explain --tokens 640"


@pytest.mark.processes
def test_a_replay_leaves_sglang_to_its_ranks() -> None:
    command = "replay --cp-size 1 --requests 1 --block-tokens 1 --page-size 4"
    (line,) = _loaded(command)
    assert line == f"ended 0 numpy rich torch after {command}"


def test_what_was_loaded_without_sglang_is_the_same_with_it_whatever_path_leads_there() -> None:
    program = """
import sys
from kvlayouts.common.alone import rejoin
from kvlayouts.common.strategies import check_known, load_layouts

check_known("cp_shared")
load_layouts()
from sglang.srt.mem_cache.layouts.registry import create_layout
assert "sglang" not in sys.modules
rejoin()
import sglang.srt.mem_cache.hicache.radix_cache
import sglang.srt.mem_cache.layouts
assert sglang.srt.mem_cache.layouts.registry.create_layout is create_layout
assert sglang.srt.mem_cache.layouts.LayoutConfigError is sglang.srt.mem_cache.layouts.errors.LayoutConfigError
assert sglang.srt.mem_cache.hicache.radix_cache.HiRadixCache.__module__ in sys.modules
print("ended with", sys.modules["sglang"].__file__ is not None)
"""
    assert _python(program) == ["ended with True"]
