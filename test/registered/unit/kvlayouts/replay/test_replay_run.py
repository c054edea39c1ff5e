"""Whole replays: real rank processes, real trees, controllers and pools, on a made-up trace that needs both tiers."""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import pytest
from sglang.test.ci.ci_register import register_cpu_ci

from kvlayouts import main as command
from kvlayouts.common.errors import RunError
from kvlayouts.ranks.processes import RankTraceback
from kvlayouts.replay.driver import run_replay
from support.replays import (
    FAULTY_LAYOUTS,
    conversations,
    make_trace,
    rank_processes,
    small_config,
    without_progress,
    write_trace,
)

if TYPE_CHECKING:
    from pathlib import Path

    from kvlayouts.common.trace import Trace
    from kvlayouts.replay.config import ReplayConfig
    from kvlayouts.replay.results import LayoutResult

register_cpu_ci(est_time=90, suite="base-a-test-cpu")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(180), pytest.mark.usefixtures("fork_server")]

BOTH = ("identity", "cp_shared")
COMPARED = (*BOTH, "host_shared")  # unless others are asked for
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


def _dsa_config(**options: Any) -> ReplayConfig:  # noqa: ANN401  # fields of ReplayConfig
    """The same four times as large: SGLang's DSA pages have 64 tokens."""
    return small_config(**{"pool": "dsa", "page_size": 64, "block_tokens": 128, "device_tokens": 1536, **options})


CONFIGS = {
    "mla on one rank": small_config(cp_size=1),
    "mla on two ranks, write_through_selective": small_config(
        policy="write_through_selective", eviction_policy="slru", verify="sample"
    ),
    "mla on three ranks, write_back": small_config(cp_size=3, policy="write_back", host_layout="page_first_direct"),
    "dsa on one rank, write_back": _dsa_config(cp_size=1, policy="write_back"),
    "dsa on two ranks, page_first_direct": _dsa_config(host_layout="page_first_direct"),
    "dsa on three ranks, unverified": _dsa_config(cp_size=3, verify="off", eviction_policy="lfu"),
    "mha on one rank, page_first_direct": small_config(pool="mha", cp_size=1, host_layout="page_first_direct"),
    "mha on two ranks, fifo": small_config(pool="mha", eviction_policy="fifo"),
    "mha on three ranks, write_back": small_config(pool="mha", cp_size=3, policy="write_back"),
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
    config = small_config(cp_size=3, device_tokens=16 * 1024)
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
    config = small_config(cp_size=1, pool="mha")
    identity, shared = _replay(config, _trace(tmp_path, config)).values()
    assert replace(identity, seconds=1.0) == replace(shared, seconds=1.0)


def test_the_command_writes_table_json_picture_and_page_of_a_real_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, picture, page = tmp_path / "out.json", tmp_path / "out.png", tmp_path / "out.html"
    status = _run_command(tmp_path, "--json", str(out), "--plot", str(picture), "--report", str(page))
    captured = capsys.readouterr()
    assert status == 0
    assert "ranks agree" in captured.out.splitlines()[-1]
    assert without_progress(captured.err) == []
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert page.read_text(encoding="utf-8").count("<svg") == 3 * len(COMPARED)
    found = json.loads(out.read_text(encoding="utf-8"))
    assert {"trace", "layouts"} <= set(found)
    assert list(found["layouts"]) == list(COMPARED)
    for layout in found["layouts"].values():
        assert set(layout) >= ISSUE_KEYS
        parts = layout["device_hit_tokens"] + layout["host_hit_tokens"] + layout["computed_tokens"]
        assert parts == layout["prompt_tokens"] == found["trace"]["prompt_tokens"]
        assert layout["hit_share"] == pytest.approx(1 - layout["computed_tokens"] / parts)
        assert (layout["digests_equal"], layout["mismatched_tokens"]) == (True, 0)
        for key in ("d2h_bytes_per_rank", "h2d_bytes_per_rank", "write_acks_per_rank", "load_acks_per_rank"):
            assert len(layout[key]) == 2
        assert layout["seconds"] > 0
        assert layout["evicted_device_tokens"] > 0
        for key in ("device_hit_tokens", "host_hit_tokens", "evicted_device_tokens", "evicted_host_tokens"):
            assert sum(window[key] for window in layout["hit_series"]) == layout[key], key
        assert layout["device_capacity_pages"] == 384 // 16
        assert layout["host_capacity_pages"] == 2 * 384 // 16 + 1
        for tier in ("device", "host"):
            assert len(layout[f"{tier}_pages_per_rank"]) == 2
            assert all(0 < used <= layout[f"{tier}_capacity_pages"] for used in layout[f"{tier}_pages_per_rank"])
            assert set(layout[f"{tier}_pages_per_rank"]) == set(layout["hit_series"][-1][f"{tier}_pages_per_lane"])


def test_progress_of_each_layout_grows_to_the_number_of_requests(tmp_path: Path) -> None:
    config = small_config(cp_size=1)
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
@pytest.mark.parametrize("arguments", ["replay --cp-size 4", "soak --ranks 4 --events 100"])
def test_a_layout_that_keeps_each_page_on_two_ranks_is_refused_before_a_rank_starts(
    arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvlayouts.ranks.processes.forking_context", None)  # what starts ranks
    assert command.main([*arguments.split(), "--layout", "two_copies"]) == 2
    assert capsys.readouterr().err == (
        "kvlayouts: error: --layout two_copies: ranks 0 to 3 store lanes 0, 1, 0, 1 of 2; accepted: 4 lanes, each "
        "stored by one rank (copies on several ranks would be added up), or one lane for all\n"
    )


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
@pytest.mark.parametrize(("told", "status"), [("true", 1), ("false", 0)])
def test_the_settings_of_a_strategy_reach_its_ranks_and_the_command_that_repeats_the_run(
    told: str, status: int, tmp_path: Path
) -> None:
    out, settings = tmp_path / "out.json", f'{{"forgets": {told}}}'
    chosen = ("--layout", "forgets_if_told", "--layout-config", settings)
    assert _run_command(tmp_path, *chosen, "--json", str(out)) == status
    document = json.loads(out.read_text(encoding="utf-8"))
    assert (document["layouts"]["forgets_if_told"]["mismatched_tokens"] > 0) == bool(status)
    assert document["config"]["layout_options"] == json.loads(settings)
    assert f"--layout forgets_if_told --layout-config '{settings}' " in document["command"]


@pytest.mark.usefixtures("faulty_layouts")
def test_a_wrong_byte_goes_unseen_without_verification_and_seen_in_a_sample(tmp_path: Path) -> None:
    config = small_config(layouts=("swaps_pages",), verify="off")
    trace = _trace(tmp_path, config)
    assert _replay(config, trace)["swaps_pages"].mismatched_tokens == 0
    sampled = _replay(replace(config, verify="sample"), trace)["swaps_pages"]
    assert (
        0 < sampled.mismatched_tokens < _replay(replace(config, verify="all"), trace)["swaps_pages"].mismatched_tokens
    )


@pytest.mark.usefixtures("faulty_layouts")
@pytest.mark.parametrize("layout", ["deals_by_rank", "orders_by_rank"])
def test_ranks_that_place_pages_differently_disagree_and_exit_with_1(
    layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    arguments = ("--layout", layout, "--device-tokens", str(16 * 1024), "--json", str(out))
    assert _run_command(tmp_path, *arguments) == 1
    assert json.loads(out.read_text(encoding="utf-8"))["layouts"][layout]["digests_equal"] is False
    assert f"FAILED: {layout}: " in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.usefixtures("faulty_layouts")
def test_a_rank_that_raises_is_named_on_one_line_and_its_traceback_is_shown_on_request(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert _run_command(tmp_path, "--layout", "breaks_on_rank_1") == 1
    (line,) = without_progress(capfd.readouterr().err)
    assert re.fullmatch(
        r"kvlayouts: error: rank 1 of 2 failed: breaks_on_rank_1, request \d+ of 60: "
        "ZeroDivisionError: three backups are enough",
        line,
    )
    assert _run_command(tmp_path, "--layout", "breaks_on_rank_1", "--traceback") == 1
    shown = without_progress(capfd.readouterr().err)
    assert shown[0].startswith("Traceback")
    assert any("faulty_layouts.py" in said for said in shown)
    assert shown[-1] == line
    assert rank_processes() == []
    config = small_config(layouts=("breaks_on_rank_1",))
    with pytest.raises(RunError, match="rank 1 of 2 failed") as caught:
        _replay(config, _trace(tmp_path, config))
    assert isinstance(caught.value.__cause__, RankTraceback)


@pytest.mark.usefixtures("faulty_layouts")
def test_what_the_ranks_log_is_logged_once_by_the_process_that_started_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    config = small_config(layouts=("talks",), cp_size=3)
    assert _replay(config, _trace(tmp_path, config))["talks"].passed
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert all(text.startswith("rank ") for text in said)
    assert any("pages" in text for text in said)
    assert any("RuntimeWarning: this layout talks too much" in text for text in said)
    assert capfd.readouterr().err == ""


def _trace(folder: Path, config: ReplayConfig) -> Trace:
    """More conversations the more ranks, so that no device tier holds them all."""
    return make_trace(folder, requests=REQUESTS, block_tokens=config.block_tokens, talks=5 * config.cp_size)


def _replay(config: ReplayConfig, trace: Trace) -> dict[str, LayoutResult]:
    return run_replay(config, trace, lambda *_: None)


def _run_command(folder: Path, *arguments: str) -> int:
    trace = write_trace(folder / "requests.jsonl", conversations(requests=REQUESTS))
    options = {
        key: value for key, value in asdict(small_config()).items() if key in ("cp_size", "page_size", "block_tokens")
    }
    given = [part for key, value in options.items() for part in (f"--{key.replace('_', '-')}", str(value))]
    if "--device-tokens" not in arguments:
        given += ["--device-tokens", "384"]
    return command.main(["replay", str(trace), *given, *arguments])
