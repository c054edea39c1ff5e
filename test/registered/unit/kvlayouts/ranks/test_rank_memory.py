"""Ranks of `replay` and `soak` that the machine has no room for are refused before one of them is started."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from sglang.test.ci.ci_register import register_cpu_ci

from kvlayouts import main as command
from kvlayouts.ranks import processes
from sglang.srt.mem_cache.hicache.host import memory as host_memory
from sglang.srt.mem_cache.hicache.host.memory import CPU_RESERVE_BYTES

if TYPE_CHECKING:
    from pathlib import Path

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

SLOT = 576 * 2 * 2  # an MLA row of bfloat16 in two layers
# A rank of the replay below: 10 device pages and 20 host pages of 64 tokens, and the page that SGLang adds to each.
REPLAY_RANK = (10 + 1 + 20 + 1) * 64 * SLOT
SOAK_RANK = (24 + 1 + 48 + 1) * 4 * 32 * 2 * 2  # cp_shared: a quarter of 96 pages, rows of 32


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    path = tmp_path / "requests.jsonl"
    path.write_text(
        json.dumps({"timestamp": 0, "input_length": 100, "output_length": 1, "hash_ids": [1]}) + "\n", encoding="utf-8"
    )
    return path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """Notes that a rank would be started, and fails there."""
    start = mock.Mock(side_effect=OSError("this would start ranks"))
    monkeypatch.setattr(processes, "forking_context", start)
    return start


def run(free_bytes: int, *arguments: Any) -> int:  # noqa: ANN401  # words
    """The command on a machine that has `free_bytes` beyond what stays free."""
    with mock.patch.object(host_memory, "available_bytes", return_value=free_bytes + CPU_RESERVE_BYTES):
        return command.main([str(argument) for argument in arguments])


@pytest.mark.parametrize(("free_bytes", "fits"), [(4 * REPLAY_RANK, True), (4 * REPLAY_RANK - 1, False)])
def test_a_replay_counts_device_and_host_pools_of_all_ranks(
    free_bytes: int, fits: bool, trace_file: Path, started: mock.Mock, capsys: pytest.CaptureFixture[str]
) -> None:
    status = run(free_bytes, "replay", trace_file, "--cp-size", 4, "--device-tokens", 640)
    error = capsys.readouterr().err
    assert started.called is fits
    if not fits:
        assert status == command.EXIT_BAD_INPUT
        assert error == (
            "kvlayouts: error: --cp-size 4 with --device-tokens 640 and --host-ratio 2: 4 ranks on this machine need "
            "0.01887 GB of host memory for device and host pools (0.004719 GB a rank); must be at most the 0.01887 GB "
            "that are left, with 1.074 GB kept free\n"
        )


@pytest.mark.parametrize(("free_bytes", "fits"), [(4 * SOAK_RANK, True), (4 * SOAK_RANK - 1, False)])
def test_a_soak_counts_them_too(
    free_bytes: int, fits: bool, started: mock.Mock, capsys: pytest.CaptureFixture[str]
) -> None:
    status = run(free_bytes, "soak", "--events", 10)
    error = capsys.readouterr().err
    assert started.called is fits
    if not fits:
        assert status == command.EXIT_BAD_INPUT
        assert error.startswith("kvlayouts: error: --ranks 4 with --layout cp_shared and --page-size 4: 4 ranks on")
        assert error.count("\n") == 1
