"""Whole replays: real rank processes, real trees, controllers and pools, on a made-up trace that needs both tiers."""

from __future__ import annotations

import importlib
import json
import multiprocessing as mp
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from _fork_server import tests_forking_context
from _replays import FAULTY_LAYOUTS, conversations, make_trace, write_trace
from sglang.test.ci.ci_register import register_cpu_ci

from sglang.srt.mem_cache.hicache.cli import main as command
from sglang.srt.mem_cache.hicache.cli.ranks.processes import RankTraceback
from sglang.srt.mem_cache.hicache.cli.replay.config import ReplayConfig, ReplayError
from sglang.srt.mem_cache.hicache.cli.replay.driver import run_replay

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.mem_cache.hicache.cli.replay.results import LayoutResult
    from sglang.srt.mem_cache.hicache.cli.replay.trace import Trace

register_cpu_ci(est_time=90, suite="base-a-test-cpu")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

BOTH = ("identity", "cp_shared")
REQUESTS = 60
ISSUE_KEYS = {
    "requests",
    "prompt_tokens",
    "device_hit_tokens",
    "host_hit_tokens",
    "computed_tokens",
    "hit_share",
    "logical_capacity_tokens",
    "device_bytes_per_rank",
    "host_bytes_per_rank",
    "d2h_bytes_per_rank",
    "h2d_bytes_per_rank",
    "page_imbalance",
    "write_acks_per_rank",
    "load_acks_per_rank",
    "digests_equal",
    "verified_tokens",
    "mismatched_tokens",
    "seconds",
}


@pytest.fixture(scope="module", autouse=True)
def _fork_server() -> None:
    tests_forking_context()


def _config(**options: Any) -> ReplayConfig:  # noqa: ANN401  # fields of ReplayConfig
    """Two ranks whose device pools hold the longest prompt and little more: 8 blocks of 32 tokens, pages of 16."""
    fields: dict[str, Any] = {
        "layouts": BOTH,
        "cp_size": 2,
        "page_size": 16,
        "block_tokens": 32,
        "device_tokens": 384,
        "host_ratio": 2.0,
        **options,
    }
    return ReplayConfig(**fields)


def _dsa_config(**options: Any) -> ReplayConfig:  # noqa: ANN401  # fields of ReplayConfig
    """The same four times as large: SGLang's DSA pages have 64 tokens."""
    return _config(**{"pool": "dsa", "page_size": 64, "block_tokens": 128, "device_tokens": 1536, **options})


CONFIGS = {
    "mla on one rank": _config(cp_size=1),
    "mla on two ranks, write_through_selective": _config(
        policy="write_through_selective", eviction_policy="slru", verify="sample"
    ),
    "mla on three ranks, write_back": _config(cp_size=3, policy="write_back", host_layout="page_first_direct"),
    "dsa on one rank, write_back": _dsa_config(cp_size=1, policy="write_back"),
    "dsa on two ranks, page_first_direct": _dsa_config(host_layout="page_first_direct"),
    "dsa on three ranks, unverified": _dsa_config(cp_size=3, verify="off", eviction_policy="lfu"),
    "mha on one rank, page_first_direct": _config(pool="mha", cp_size=1, host_layout="page_first_direct"),
    "mha on two ranks, fifo": _config(pool="mha", eviction_policy="fifo"),
    "mha on three ranks, write_back": _config(pool="mha", cp_size=3, policy="write_back"),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
def test_every_pool_layout_group_size_and_policy_replays_with_all_bytes_right(
    config: ReplayConfig, tmp_path: Path
) -> None:
    trace = _trace(tmp_path, config)
    for name, result in _replay(config, trace).items():
        assert (result.requests, result.prompt_tokens) == (REQUESTS, trace.prompt_tokens), name
        hits = result.device_hit_tokens + result.host_hit_tokens
        assert hits + result.computed_tokens == trace.prompt_tokens, name
        assert result.host_hit_tokens > 0, f"{name}: the trace was meant to need the host"
        assert result.passed, name
        assert result.digests_equal
        assert result.mismatched_tokens == 0
        copies = 1 if name == "cp_shared" else config.cp_size
        assert result.logical_capacity_tokens == config.device_tokens * config.cp_size // copies
        assert len(result.d2h_bytes_per_rank) == config.cp_size
        assert sum(result.h2d_bytes_per_rank) > 0
        assert result.load_acks_per_rank[0] > 0
        # Every hit is verified, on each rank that holds the page.
        expected = {"all": hits * copies, "off": 0}.get(config.verify)
        if expected is None:
            assert 0 < result.verified_tokens < hits * copies, name
        else:
            assert result.verified_tokens == expected, name


def test_with_ample_memory_both_layouts_hit_alike_and_the_ranks_share_the_bytes_that_identity_copies(
    tmp_path: Path,
) -> None:
    config = _config(cp_size=3, device_tokens=16 * 1024)
    trace = _trace(tmp_path, config)
    results = _replay(config, trace)
    identity, shared = results["identity"], results["cp_shared"]
    assert identity.device_hit_tokens == shared.device_hit_tokens > 0
    assert identity.host_hit_tokens == shared.host_hit_tokens == 0
    assert identity.write_acks_per_rank == shared.write_acks_per_rank
    assert len(set(identity.d2h_bytes_per_rank)) == 1
    assert sum(shared.d2h_bytes_per_rank) == identity.d2h_bytes_per_rank[0] > 0
    assert min(shared.d2h_bytes_per_rank) > 0
    assert identity.device_bytes_per_rank == shared.device_bytes_per_rank
    assert identity.host_bytes_per_rank == shared.host_bytes_per_rank
    assert shared.logical_capacity_tokens == 3 * identity.logical_capacity_tokens
    assert identity.page_imbalance == 1.0
    assert 1.0 <= shared.page_imbalance < 1.2
    for result in (identity, shared):
        pages = result.evicted_device_tokens + result.evicted_host_tokens + result.refused_backups
        assert pages == 0


def test_on_one_rank_both_layouts_do_the_same(tmp_path: Path) -> None:
    config = _config(cp_size=1, pool="mha")
    identity, shared = _replay(config, _trace(tmp_path, config)).values()
    assert replace(identity, seconds=1.0) == replace(shared, seconds=1.0)


def test_the_command_writes_table_json_and_picture_of_a_real_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    status = _run_command(tmp_path, "--json", str(out), "--plot", str(picture))
    captured = capsys.readouterr()
    assert status == 0
    assert "ranks agree" in captured.out.splitlines()[-1]
    assert _without_progress(captured.err) == []
    assert picture.read_bytes().startswith(b"\x89PNG")
    found = json.loads(out.read_text(encoding="utf-8"))
    assert {"trace", "layouts"} <= set(found)
    assert list(found["layouts"]) == list(BOTH)
    for layout in found["layouts"].values():
        assert set(layout) >= ISSUE_KEYS
        parts = layout["device_hit_tokens"] + layout["host_hit_tokens"] + layout["computed_tokens"]
        assert parts == layout["prompt_tokens"] == found["trace"]["prompt_tokens"]
        assert layout["hit_share"] == pytest.approx(1 - layout["computed_tokens"] / parts)
        assert (layout["digests_equal"], layout["mismatched_tokens"]) == (True, 0)
        for key in ("d2h_bytes_per_rank", "h2d_bytes_per_rank", "write_acks_per_rank", "load_acks_per_rank"):
            assert len(layout[key]) == 2
        assert layout["seconds"] > 0


def test_progress_of_each_layout_grows_to_the_number_of_requests(tmp_path: Path) -> None:
    config = _config(cp_size=1)
    heard: list[tuple[str, int, int]] = []
    run_replay(config, _trace(tmp_path, config), lambda *told: heard.append(told))
    for layout in BOTH:
        done = [told for name, told, total in heard if name == layout and total == REQUESTS]
        assert done == sorted(done)
        assert done[-1] == REQUESTS
    assert [name for name, _, _ in heard] == sorted((name for name, _, _ in heard), key=BOTH.index)


# A layout that is wrong.


@pytest.fixture
def faulty_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another distribution is installed, whose layout strategies have one fault each."""
    monkeypatch.syspath_prepend(str(FAULTY_LAYOUTS))
    importlib.invalidate_caches()


@pytest.mark.usefixtures("faulty_layouts")
@pytest.mark.parametrize("layout", ["swaps_pages", "forgets_a_page"])
def test_a_load_that_misplaces_or_forgets_pages_is_seen_and_exits_with_1(
    layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    assert _run_command(tmp_path, "--layout", layout, "--json", str(out)) == 1
    found = json.loads(out.read_text(encoding="utf-8"))["layouts"][layout]
    assert found["mismatched_tokens"] > 0
    assert found["mismatched_tokens"] % 16 == 0
    assert found["digests_equal"]
    assert f"FAILED: {layout}: " in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.usefixtures("faulty_layouts")
def test_a_wrong_byte_goes_unseen_without_verification_and_seen_in_a_sample(tmp_path: Path) -> None:
    config = _config(layouts=("swaps_pages",), verify="off")
    trace = _trace(tmp_path, config)
    assert _replay(config, trace)["swaps_pages"].mismatched_tokens == 0
    sampled = _replay(replace(config, verify="sample"), trace)["swaps_pages"]
    assert (
        0 < sampled.mismatched_tokens < _replay(replace(config, verify="all"), trace)["swaps_pages"].mismatched_tokens
    )


@pytest.mark.usefixtures("faulty_layouts")
def test_ranks_that_place_pages_differently_disagree_and_exit_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    arguments = ("--layout", "deals_by_rank", "--device-tokens", str(16 * 1024), "--json", str(out))
    assert _run_command(tmp_path, *arguments) == 1
    assert json.loads(out.read_text(encoding="utf-8"))["layouts"]["deals_by_rank"]["digests_equal"] is False
    assert "FAILED: deals_by_rank: " in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.usefixtures("faulty_layouts")
def test_a_rank_that_raises_is_named_on_one_line_and_its_traceback_is_shown_on_request(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert _run_command(tmp_path, "--layout", "breaks_on_rank_1") == 1
    (line,) = _without_progress(capfd.readouterr().err)
    assert re.fullmatch(
        r"kvlayouts: error: rank 1 of 2 failed: breaks_on_rank_1, request \d+ of 60: "
        "ZeroDivisionError: three backups are enough",
        line,
    )
    assert _run_command(tmp_path, "--layout", "breaks_on_rank_1", "--traceback") == 1
    shown = _without_progress(capfd.readouterr().err)
    assert shown[0].startswith("Traceback")
    assert any("faulty_layouts.py" in said for said in shown)
    assert shown[-1] == line
    assert _rank_processes() == []
    config = _config(layouts=("breaks_on_rank_1",))
    with pytest.raises(ReplayError, match="rank 1 of 2 failed") as caught:
        _replay(config, _trace(tmp_path, config))
    assert isinstance(caught.value.__cause__, RankTraceback)


@pytest.mark.usefixtures("faulty_layouts")
def test_what_the_ranks_log_is_logged_once_by_the_process_that_started_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    config = _config(layouts=("talks",), cp_size=3)
    assert _replay(config, _trace(tmp_path, config))["talks"].passed
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert all(text.startswith("rank ") for text in said)
    assert any("pages" in text for text in said)
    assert any("RuntimeWarning: this layout talks too much" in text for text in said)
    assert capfd.readouterr().err == ""


# A run that is disturbed. `on_progress` runs in the process that started the ranks, while they run.


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_that_is_killed_is_named_within_seconds_and_no_process_is_left(victim: int, tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(ReplayError, match=f"^rank {victim} of 3 failed: its process was killed by signal 9 .SIGKILL"):
        _disturb(tmp_path, victim, signal.SIGKILL, peer_seconds=60.0)
    assert time.monotonic() - started < 30
    assert _rank_processes() == []


def test_a_rank_that_stops_answering_is_named_by_the_others_after_the_stated_time(tmp_path: Path) -> None:
    pids: list[int] = []
    started = time.monotonic()
    with pytest.raises(
        ReplayError,
        match=r"^rank 1 of 3 does not answer; rank [02] of 3 waited for its peers in \w+: identity, request \d+ of ",
    ):
        _disturb(tmp_path, 1, signal.SIGSTOP, peer_seconds=10.0, pids=pids)
    assert 10 < time.monotonic() - started < 60
    assert _rank_processes() == []
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_an_exception_in_the_caller_leaves_no_process(tmp_path: Path) -> None:
    config = _config(cp_size=3)

    def interrupt(layout: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_replay(config, _trace(tmp_path, config), interrupt)
    assert _rank_processes() == []


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
        assert _without_progress(error) == ["kvlayouts: error: interrupted"]


def test_the_process_that_starts_the_ranks_loads_none_of_what_they_load() -> None:
    """Measured beside an empty `sglang`: SGLang's own `__init__` loads PyTorch, whatever we do."""
    root = Path(command.__file__).parents[3]
    program = f"""
import pickle, sys, types
for name, path in (("sglang", {str(root.parent)!r}), ("sglang.srt", {str(root)!r}),
                   ("sglang.srt.mem_cache", {str(root / "mem_cache")!r})):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
import sglang.srt.mem_cache.hicache.cli.replay.driver
from sglang.srt.mem_cache.hicache.cli.ranks.messages import Finished
from sglang.srt.mem_cache.hicache.cli.replay.messages import RankReport
from sglang.srt.mem_cache.hicache.stats import CacheStats
pickle.loads(pickle.dumps([Finished, RankReport, CacheStats()]))
loaded = {{"torch", "matplotlib", "transformers"}} & set(sys.modules)
assert not loaded, loaded
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr


def _trace(folder: Path, config: ReplayConfig) -> Trace:
    """More conversations the more ranks, so that no device tier holds them all."""
    return make_trace(folder, requests=REQUESTS, block_tokens=config.block_tokens, talks=5 * config.cp_size)


def _replay(config: ReplayConfig, trace: Trace) -> dict[str, LayoutResult]:
    return run_replay(config, trace, lambda *_: None)


def _run_command(folder: Path, *arguments: str) -> int:
    trace = write_trace(folder / "requests.jsonl", conversations(requests=REQUESTS))
    options = {
        key: value for key, value in asdict(_config()).items() if key in ("cp_size", "page_size", "block_tokens")
    }
    given = [part for key, value in options.items() for part in (f"--{key.replace('_', '-')}", str(value))]
    if "--device-tokens" not in arguments:
        given += ["--device-tokens", "384"]
    return command.main(["replay", str(trace), *given, *arguments])


def _disturb(
    folder: Path, victim: int, signum: signal.Signals, *, peer_seconds: float, pids: list[int] | None = None
) -> None:
    """Replay a trace of minutes on three ranks, and send `victim` a signal at the first progress."""
    config = _config(cp_size=3)
    trace = make_trace(folder, requests=2_000, block_tokens=config.block_tokens)
    sent: list[int] = []

    def on_progress(layout: str, done: int, total: int) -> None:
        assert 0 < done < total
        if not sent:
            ranks = {process.name: process.pid for process in _rank_processes() if process.pid is not None}
            assert len(ranks) == 3
            sent.extend(ranks.values())
            os.kill(ranks[f"kvlayouts-rank-{victim}"], signum)

    try:
        run_replay(config, trace, on_progress, peer_seconds=peer_seconds)
    finally:
        if pids is not None:
            pids.extend(sent)


def _rank_processes() -> list[mp.process.BaseProcess]:
    return [process for process in mp.active_children() if process.name.startswith("kvlayouts-rank-")]


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


def _without_progress(error: str) -> list[str]:
    return [line for line in error.splitlines() if line and not re.fullmatch(r"\w+: [\d,]+ of [\d,]+ requests", line)]
