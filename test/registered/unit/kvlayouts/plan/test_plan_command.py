"""`kvlayouts plan`: model configs, sizes, refusals, the table, JSON and picture."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from sglang.test.ci.ci_register import register_cpu_ci

from kvlayouts.main import main
from kvlayouts.plan.results import LayoutPlan, SweepPoint
from kvlayouts.plan.simulation import SimulatedHits
from support.plan_models import DEEPSEEK_V3_2, GPT_OSS, LLAMA_70B, MINIMAX_TEXT_01, write_config
from support.replays import FAULTY_LAYOUTS, conversations, write_trace

if TYPE_CHECKING:
    from pathlib import Path


register_cpu_ci(est_time=30, suite="base-a-test-cpu")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a trace of conversations and the config.json of DeepSeek-V3.2, as working directory."""
    write_trace(tmp_path / "talks.jsonl", conversations(requests=60))
    write_config(tmp_path, DEEPSEEK_V3_2)
    monkeypatch.chdir(tmp_path)
    return tmp_path


# Bad input.

BAD_ARGUMENTS = {
    "": "--model-config: is missing; give a model's config.json, or --kv-bytes-per-token",
    "--model-config none.json": "--model-config none.json: cannot be read: No such file",
    "--model-config talks.jsonl": "--model-config talks.jsonl: is no JSON",
    "--model-config list.json": "--model-config list.json: is no JSON object",
    "--model-config layers.json": "layers.json: 0 layers take 0 bytes a token; must be at least 1 layer",
    "--model-config rank.json": "rank.json: SGLang cannot use it: Validation error for field 'kv_lora_rank'",
    "--model-config nameless.json": "nameless.json: architectures is missing; must name the model's class",
    "--model-config typeless.json": "typeless.json: SGLang cannot use it: Unrecognized model in typeless.json. Should",
    "--model-config sliding.json": "error: --layout identity does not go together with a model with sliding-window "
    "layers: its pools have two kinds of pages; use a model with full attention, or drop the strategy",
    "--model-config unknown.json": "unknown.json: SGLang cannot use it: Cannot find model module. 'MiniMaxText01For",
    "--model-config . --kv-bytes-per-token 9": "--kv-bytes-per-token 9: must not be given together with --model-config",
    "--model-config . --pool mla": "--pool mla: must not be given together with --model-config .",
    "--model-config . --layout nonesuch": "--layout nonesuch: unknown; known layouts are identity, cp_shared, ",
    "--model-config . --layout identity --layout identity": "--layout identity: given twice",
    "--model-config . --layout-config {}": "--layout-config {}: needs exactly one --layout, got 2",
    '--model-config . --layout cp_shared --layout-config {"a":1}': "--layout cp_shared: --layout-config: layout "
    "'cp_shared' has no setting 'a'; accepted: none",
    "--model-config . --page-size 32": "--page-size 32: must be 64 with a DSA model",
    "--kv-bytes-per-token 9 --pool dsa --page-size 32": "--page-size 32: must be 64 with --pool dsa",
    "--model-config . --page-size 1 --layout cp_shared --kv-cache-dtype auto": "must be 64 with a DSA model",
    "--kv-bytes-per-token 9 --page-size 1 --layout cp_shared": "error: --layout cp_shared does not go together with "
    "--page-size 1: pages are what is shared out",
    "--model-config . --gpus 8 --cp-size 3": "--cp-size 3: must divide --gpus 8; accepted: 1, 2, 4, 8",
    "--model-config . --device-gb 1 --device-tokens 64": "--device-gb 1: must not be given together with",
    "--model-config . --device-gb 0": "--device-gb 0: must be above 0 and at most 1e+06",
    "--model-config . --device-gb nan": "--device-gb nan: must be above 0",
    "--model-config . --device-gb 0.001": "--device-gb 0.001: holds no page of 64 tokens; must be at least 0.00502",
    "--model-config . --device-gb 0.1": "--device-gb 0.1, which is 1216 tokens: must be at least 4032 with layout",
    "--model-config . --device-tokens 100": "--device-tokens 100: must be a positive multiple of --page-size 64",
    "--model-config . --device-tokens 64": "--device-tokens 64: must be at least 4032 with layout identity",
    "--model-config . --host-gb 1 --host-ratio 2": "--host-gb 1: must not be given together with --host-ratio 2",
    "--model-config . --host-ratio 0": "--host-ratio 0: must be above 0 and at most 1000",
    "--model-config . --host-ratio 0.001": "--host-ratio 0.001: leaves no host page of 64 tokens beside",
    "--kv-bytes-per-token 9 --page-size 2 --device-tokens 268435456 --gpus 1024 --layout cp_shared": "--device-tokens "
    "268435456: are 137,438,953,472 pages of --page-size 2 on --gpus 1024 with layout cp_shared; must be at most",
    "--model-config thin.json": "thin.json: SGLang cannot use it: Class validation error for validator",
    "--model-config . --device-gb 1e6": "--device-gb 1e+06: is 12,",
    "--model-config . --restore-tokens 1099511627776": "--restore-tokens 1099511627776: must be between 64 and 10737",
    "--model-config . --ranks-per-machine 9": "--ranks-per-machine 9: must be between 1 and 8",
    "--model-config . --restore-tokens 3": "--restore-tokens 3: must be between 64 and",
    "--model-config . --link-gb-per-s 0": "--link-gb-per-s 0: must be above 0",
    "--model-config . --requests 61": "--requests 61: must be between 1 and 60",
    "--model-config . --plot out.svg": "--plot out.svg: must end with .png",
    "--model-config . --json talks.jsonl": "--json talks.jsonl: is the same file as TRACE",
    "--kv-bytes-per-token 100 --kv-cache-dtype fp8_e4m3": "--kv-cache-dtype fp8_e4m3: must not be given together",
    "--kv-bytes-per-token 100 --pool mha --layout cp_shared": "error: --layout cp_shared does not go together with "
    "a model without latent KV (MHA, GQA): every rank holds other heads, so no rank can keep a page for the others; "
    "use an MLA model such as DeepSeek-V2, or --layout identity",
    "--kv-bytes-per-token 100 --layout two_copies": "error: --layout two_copies: ranks 0 to 7 store lanes 0, 1, 2, 3, "
    "0, 1, 2, 3 of 4; accepted: 8 lanes, each stored by one rank (copies on several ranks would be added up)",
    "--kv-bytes-per-token 100 --pool mha --layout refuses_heads": "error: --layout refuses_heads does not support "
    "the KV pool MHATokenToKVPool with --gpus 8: every rank holds other heads; accepted: a context-parallel group "
    "(--cp-size), or an MLA or DSA model",
}


@pytest.mark.parametrize(("arguments", "complaint"), BAD_ARGUMENTS.items(), ids=list(BAD_ARGUMENTS))
def test_bad_input_exits_with_2_and_one_line(
    arguments: str,
    complaint: str,
    here: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(FAULTY_LAYOUTS))
    models: dict[str, object] = {
        "list": [],
        "layers": LLAMA_70B | {"num_hidden_layers": 0},
        "rank": DEEPSEEK_V3_2 | {"kv_lora_rank": "512"},
        "nameless": LLAMA_70B | {"architectures": None},
        "typeless": {key: value for key, value in LLAMA_70B.items() if key != "model_type"},
        "sliding": GPT_OSS,
        "unknown": MINIMAX_TEXT_01,
        "thin": LLAMA_70B | {"hidden_size": 63},
    }
    for name, model in models.items():
        (here / f"{name}.json").write_text(json.dumps(model), encoding="utf-8")
    assert main(["plan", "talks.jsonl", *arguments.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("kvlayouts: error: ")
    assert captured.err.count("\n") == 1
    assert complaint in captured.err


# Plans.


def _plan(here: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, dict[str, Any]]:
    """What a plan of the small trace prints, and its JSON file."""
    out = here / "out.json"
    common = ["talks.jsonl", "--block-tokens", "32", "--json", str(out), "--restore-tokens", "640"]
    assert main(["plan", *common, *arguments]) == 0
    return capsys.readouterr().out, json.loads(out.read_text(encoding="utf-8"))


def test_capacity_memory_and_restore_time_are_the_strategys(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--model-config . --gpus 4 --device-tokens 512 --host-ratio 2 --host-memory-gb 11.8 --link-gb-per-s 10"
    shown, plan = _plan(here, capsys, *arguments.split())
    page_bytes = 64 * 61 * (576 * 2 + 132)
    assert plan["config"]["host_pages"] == 2 * 512 // 64 + 1
    assert plan["config"]["machine_host_bytes"] == 4 * 17 * page_bytes
    assert plan["config"]["machine_budget_bytes"] == int(11.8e9) - 10 * 2**30
    assert plan["config"]["fits_machine"] is (4 * 17 * page_bytes <= int(11.8e9) - 10 * 2**30) is True
    identity, shared = plan["layouts"]["identity"], plan["layouts"]["cp_shared"]
    assert (identity["lanes"], shared["lanes"]) == (1, 4)
    assert (identity["device_capacity_tokens"], shared["device_capacity_tokens"]) == (512, 2048)
    assert (identity["host_capacity_tokens"], shared["host_capacity_tokens"]) == (17 * 64, 4 * 17 * 64)
    # Ten pages: all of them on a rank, or three on the two fullest of four; identity's device holds eight.
    assert (identity["restore_bytes"], shared["restore_bytes"]) == (10 * page_bytes, 3 * page_bytes)
    assert identity["restore_seconds"] is None
    assert shared["restore_seconds"] == pytest.approx(3 * page_bytes / 10e9)
    assert "does not fit on the device" in shown
    assert "10.7 GB free: fits;" in shown
    assert "cp_shared: 4.0x the capacity of identity with the same memory" in shown


def test_too_little_host_memory_is_said_and_the_ratio_that_would_fill_the_machine_fits(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model-config", ".", "--gpus", "4", "--device-tokens", "51200", "--host-memory-gb", "40"]
    shown, plan = _plan(here, capsys, *arguments)
    assert plan["config"]["fits_machine"] is False
    assert "DOES NOT FIT" in shown
    ratio = shown.partition("(--host-ratio ")[2].partition(")")[0]
    shown, plan = _plan(here, capsys, *arguments, "--host-ratio", ratio)
    assert plan["config"]["fits_machine"] is True


def test_a_given_size_in_gb_is_a_pool_of_that_many_bytes(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, plan = _plan(here, capsys, "--kv-bytes-per-token", "1000", "--device-gb", "0.001", "--host-gb", "0.002")
    assert plan["config"]["device_tokens"] == 1_000_000 // 1000 // 64 * 64
    assert plan["config"]["host_pages"] == 2_000_000 // 1000 // 64 + 1


def test_hits_add_up_and_a_sweep_goes_up_to_a_cache_of_everything(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = here / "out.png"
    arguments = ["--model-config", ".", "--gpus", "4", "--device-tokens", "512", "--plot", str(picture)]
    shown, plan = _plan(here, capsys, *arguments, "--sweep-points", "6", "--host-memory-gb", "11.8")
    assert picture.read_bytes().startswith(b"\x89PNG")
    for name, layout in plan["layouts"].items():
        hits = layout["hits"]
        parts = hits["device_hit_tokens"] + hits["host_hit_tokens"] + hits["computed_tokens"]
        assert parts == plan["trace"]["prompt_tokens"]
        sizes = [point["host_pages"] for point in layout["sweep"]]
        assert sizes == sorted(set(sizes))
        assert plan["config"]["host_pages"] in sizes
        chosen = layout["sweep"][sizes.index(plan["config"]["host_pages"])]
        assert chosen["hit_share"] == hits["hit_share"]
        assert layout["sweep"][-1]["hit_share"] >= hits["hit_share"]
        assert layout["sweep"][-1]["host_pages"] * layout["lanes"] >= plan["trace"]["distinct_pages"]
        assert f"{name}: " in shown
    last = plan["layouts"]["cp_shared"]["sweep"][-1]
    assert last["evicted_host_tokens"] == 0


def test_a_model_with_other_heads_on_every_rank_leaves_out_the_layouts_that_refuse_it(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_config(here, LLAMA_70B)
    shown, plan = _plan(here, capsys, "--model-config", ".", "--gpus", "8")
    assert list(plan["layouts"]) == ["identity"]
    assert "every rank holds other heads" in plan["refused"]["cp_shared"]
    assert "refused: --layout cp_shared does not go together with a model without latent KV" in shown
    _, plan = _plan(here, capsys, "--model-config", ".", "--gpus", "8", "--cp-size", "4")
    assert list(plan["layouts"]) == ["identity"]
    assert plan["config"]["model"]["bytes_per_token"] == 80 * 4 * 128 * 2 * 2  # two ranks for eight heads


def test_a_strategy_of_another_distribution_is_planned_by_its_own_answers(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(FAULTY_LAYOUTS))
    arguments = ["--model-config", ".", "--gpus", "4", "--layout", "cp_shared", "--layout", "deals_by_rank"]
    _, plan = _plan(here, capsys, *arguments)
    assert plan["layouts"]["deals_by_rank"] == plan["layouts"]["cp_shared"]  # rank 0 of it deals as cp_shared does


def _point(host_pages: int, hit_tokens: int) -> SweepPoint:
    hits = SimulatedHits(
        requests=1,
        device_hit_tokens=0,
        host_hit_tokens=hit_tokens,
        computed_tokens=1000 - hit_tokens,
        evicted_device_tokens=0,
        evicted_host_tokens=0,
        refused_backups=0,
        backups=0,
        loads=0,
        backed_up_lane_pages=(0,),
        loaded_lane_pages=(0,),
    )
    return SweepPoint(host_pages=host_pages, machine_host_bytes=host_pages * 1000, hits=hits)


@pytest.mark.parametrize(
    ("shares", "knee"),
    [
        ([(1, 100), (2, 300), (4, 309), (8, 310)], 2),
        ([(1, 100), (2, 105), (4, 300), (8, 305)], 4),
        ([(1, 100), (2, 200), (4, 300)], None),
        ([(1, 100), (16, 139)], 1),
        ([(1, 100), (16, 141)], None),
    ],
)
def test_memory_stops_paying_where_no_later_doubling_adds_a_hundredth(
    shares: list[tuple[int, int]], knee: int | None
) -> None:
    points = tuple(_point(pages, tokens) for pages, tokens in shares)
    plan = LayoutPlan(
        lanes=1,
        device_capacity_tokens=1,
        host_capacity_tokens=1,
        hits=points[0].hits,
        restore_bytes=0,
        restore_seconds=None,
        backed_up_bytes_per_rank=0,
        loaded_bytes_per_rank=0,
        sweep=points,
    )
    assert (plan.knee.host_pages if plan.knee is not None else None) == knee
