"""The command `kvlayouts`: exit status, one line on stderr for bad input, files, progress.

A stand-in for the driver replaces the run itself, which starts processes; a test of its own runs the real one.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from io import BytesIO, TextIOWrapper
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TextIO

import pytest
from rich.console import Console

from kvlayouts import main as command
from kvlayouts.common.endings import Terminated
from kvlayouts.common.errors import RunError
from kvlayouts.common.progress import show_progress
from kvlayouts.replay.config import ReplayConfig

if TYPE_CHECKING:
    from kvlayouts.common.progress import OnProgress
    from kvlayouts.common.trace import Trace
    from kvlayouts.replay.results import LayoutResult

DRIVER = "kvlayouts.replay.driver"


class _Driver(ModuleType):
    """Remembers what the command line asked for and answers with the results it was given."""

    def __init__(self, results: dict[str, LayoutResult]) -> None:
        super().__init__(DRIVER)
        self.results = results
        self.config: ReplayConfig | None = None
        self.trace: Trace | None = None
        self.error: BaseException | None = None

    def run_replay(self, config: ReplayConfig, trace: Trace, on_progress: OnProgress) -> dict[str, LayoutResult]:
        self.config, self.trace = config, trace
        if self.error is not None:
            raise self.error
        for layout in config.layouts:
            for done in range(len(trace.requests) + 1):
                on_progress(layout, done, len(trace.requests))
        return {layout: self.results[layout] for layout in config.layouts}


def _pipe_that_nobody_reads() -> TextIO:
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "w", buffering=1, encoding="utf-8")  # by line, as stderr


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, identity: LayoutResult, sharded: LayoutResult) -> _Driver:
    driver = _Driver({"identity": identity, "cp_shared": sharded, "host_shared": sharded})
    monkeypatch.setitem(sys.modules, DRIVER, driver)
    return driver


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    path = tmp_path / "requests.jsonl"
    lines = [{"timestamp": 0, "input_length": 700, "output_length": 1, "hash_ids": [1, number]} for number in range(8)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


BAD_ARGUMENTS = {
    "--layout nonesuch": "--layout nonesuch: unknown; known layouts are identity, cp_shared",
    "--layout identity --layout identity": "--layout identity: given twice",
    "--layout-config {}": "--layout-config {}: needs exactly one --layout, got 3",
    "--layout nonesuch --layout-config {}": "--layout nonesuch: unknown; known layouts are identity, cp_shared",
    "--layout identity --layout-config {": "--layout-config must be JSON or @FILE with JSON, got '{': ",
    '--layout cp_shared --layout-config {"a":1}': "--layout cp_shared: --layout-config: layout 'cp_shared' has no "
    "setting 'a'; accepted: none",
    "--cp-size 0": "'--cp-size': 0 is not in the range 1<=x<=64",
    "--cp-size 65": "'--cp-size': 65 is not in the range 1<=x<=64",
    "--cp-size two": "'--cp-size': 'two' is not a valid integer",
    "--pool gqa": "'--pool': 'gqa' is not one of 'dsa', 'mla', 'mha'",
    "--page-size 0": "'--page-size': 0 is not in the range 1<=x<=1024",
    "--page-size 1025": "'--page-size': 1025 is not in the range 1<=x<=1024",
    "--page-size 32 --pool dsa": "--page-size 32: must be 64 with --pool dsa",
    "--device-tokens 0": "'--device-tokens': 0 is not in the range x>=1",
    "--device-tokens 1000": "--device-tokens 1000: must be a positive multiple of --page-size 64",
    "--device-tokens 640": "--device-tokens 640: must be at least 704 with layout identity, for the prompt of 700 "
    "tokens on line 1 of requests.jsonl",
    "--layout cp_shared --device-tokens 128": "--device-tokens 128: must be at least 192 with layout cp_shared",
    "--host-ratio 0": "--host-ratio 0: must be above 0 and at most 1000",
    "--host-ratio nan": "--host-ratio nan: must be above 0",
    "--host-ratio 0.001": "--host-ratio 0.001: leaves no host page of 64 tokens beside 1728 device tokens",
    "--policy write_around": "'--policy': 'write_around' is not one of 'write_through', 'write_through_selective'",
    "--eviction-policy random": "'--eviction-policy': 'random' is not one of 'lru', 'lfu', 'fifo', 'mru', 'filo'",
    "--host-mem-layout rows": "'--host-mem-layout': 'rows' is not one of 'layer_first', 'page_first_direct'",
    "--requests 0": "'--requests': 0 is not in the range x>=1",
    "--requests 9": "--requests 9: must be between 1 and 8",
    "--block-tokens 0": "'--block-tokens': 0 is not in the range 1<=x<=512",
    "--block-tokens 513": "'--block-tokens': 513 is not in the range 1<=x<=512",
    "--verify some": "'--verify': 'some' is not one of 'all', 'sample', 'off'",
    "--seed -1": "'--seed': -1 is not in the range 0<=x<=4294967295",
    "--json .": "--json .: is a directory",
    "--json none/out.json": "--json none/out.json: directory none does not exist",
    "--plot none/out.png": "--plot none/out.png: directory none does not exist",
    "--plot out.pdf": "--plot out.pdf: must end with .png",
    "--report out.png": "--report out.png: must end with .html",
    "--report none/out.html": "--report none/out.html: directory none does not exist",
    "--json same.html --report same.html": "--report same.html: is the same file as --json",
    "--json same.png --plot ./same.png": "--plot same.png: is the same file as --json",
    "--json requests.jsonl": "--json requests.jsonl: is the same file as TRACE",
    "--frobnicate": "No such option",
    "second.jsonl": "unexpected extra argument",
}


@pytest.mark.parametrize(("arguments", "complaint"), BAD_ARGUMENTS.items(), ids=list(BAD_ARGUMENTS))
def test_bad_input_exits_with_2_and_one_line_before_anything_runs(
    arguments: str,
    complaint: str,
    trace_file: Path,
    driver: _Driver,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(trace_file.parent)
    assert command.main(["replay", trace_file.name, *arguments.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("kvlayouts: error: ")
    assert captured.err.count("\n") == 1
    assert complaint in captured.err
    assert driver.config is None
    assert os.listdir() == [trace_file.name]


@pytest.mark.parametrize(("output", "package"), [("--plot out.png", "matplotlib"), ("--report out.html", "jinja2")])
def test_an_output_whose_package_is_missing_is_refused_before_anything_runs(
    output: str,
    package: str,
    trace_file: Path,
    driver: _Driver,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(trace_file.parent)
    monkeypatch.setitem(sys.modules, package, None)
    assert command.main(["replay", trace_file.name, *output.split()]) == 2
    refusal = f"{output}: needs the package {package}, which is not installed: pip install {package}"
    assert capsys.readouterr().err == f"kvlayouts: error: {refusal}\n"
    assert driver.config is None


def test_a_bad_trace_line_exits_with_2_and_names_the_line(
    trace_file: Path, driver: _Driver, capsys: pytest.CaptureFixture[str]
) -> None:
    with trace_file.open("a", encoding="utf-8") as file:
        file.write('{"timestamp": 0}\n')
    assert command.main(["replay", str(trace_file)]) == 2
    assert capsys.readouterr().err == f"kvlayouts: error: TRACE {trace_file}, line 9: field input_length is missing\n"
    assert command.main(["replay", str(trace_file.with_name("none"))]) == 2
    assert "none: cannot be read: No such file" in capsys.readouterr().err
    assert driver.config is None


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_target_without_write_permission_is_refused(trace_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = trace_file.with_name("out.json")
    target.touch(mode=0o444)
    assert command.main(["replay", str(trace_file), "--json", str(target)]) == 2
    assert "permission denied" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "complaint"), [([], "Missing command"), (["explode"], "No such command")])
def test_no_command_and_an_unknown_command_exit_with_2(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(arguments) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1


def test_version_and_help_exit_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("kvlayouts, version ")
    assert command.main(["replay", "--help"]) == 0
    shown = capsys.readouterr().out
    for flag in (
        "--layout",
        "--cp-size",
        "--device-tokens",
        "--host-mem-layout",
        "--verify",
        "--json",
        "--plot",
        "--report",
    ):
        assert flag in shown


def test_a_good_run_exits_with_0_and_writes_table_json_picture_and_page(
    trace_file: Path, driver: _Driver, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out, picture, page = tmp_path / "out.json", tmp_path / "out.png", tmp_path / "out.html"
    outputs = ["--json", str(out), "--plot", str(picture), "--report", str(page)]
    status = command.main(["replay", str(trace_file), *outputs])
    captured = capsys.readouterr()
    assert status == 0
    assert "cp_shared: 2.0x the capacity per rank of identity" in captured.out.splitlines()[-1]
    assert "\x1b" not in captured.out + captured.err
    assert list(json.loads(out.read_text(encoding="utf-8"))["layouts"]) == ["identity", "cp_shared", "host_shared"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "<title>KV cache replay of requests.jsonl</title>" in page.read_text(encoding="utf-8")
    assert driver.config is not None


def test_every_option_reaches_the_run(trace_file: Path, driver: _Driver) -> None:
    options = (
        "--layout cp_shared --layout identity --cp-size 2 --pool mha --page-size 16 --device-tokens 512 "
        "--host-ratio 1.5 --policy write_back --eviction-policy slru --host-mem-layout page_first_direct "
        "--requests 3 --block-tokens 64 --verify sample --seed 9"
    )
    assert command.main(["replay", str(trace_file), *options.split()]) == 0
    assert driver.config == ReplayConfig(
        layouts=("cp_shared", "identity"),
        device_tokens=512,
        cp_size=2,
        pool="mha",
        page_size=16,
        host_ratio=1.5,
        policy="write_back",
        eviction_policy="slru",
        host_layout="page_first_direct",
        block_tokens=64,
        verify="sample",
        seed=9,
    )
    assert driver.trace is not None
    assert [request.prompt_tokens for request in driver.trace.requests] == [88, 88, 88]


@pytest.mark.parametrize("arguments", ["", "--layout cp_shared --cp-size 3 --pool mha --host-ratio 1.5 --requests 5"])
def test_the_command_in_the_results_leads_to_the_same_run(arguments: str, trace_file: Path, driver: _Driver) -> None:
    out = trace_file.with_suffix(".json")
    assert command.main(["replay", str(trace_file), *arguments.split(), "--json", str(out)]) == 0
    first = (driver.config, driver.trace)
    document = json.loads(out.read_text(encoding="utf-8"))
    assert document["config"]["trace"] == str(trace_file)
    assert document["config"]["requests"] == len(driver.trace.requests if driver.trace else ())
    program, *words = shlex.split(document["command"])
    assert (program, command.main(words)) == ("kvlayouts", 0)
    assert (driver.config, driver.trace) == first


def test_without_arguments_the_shipped_trace_runs_with_the_documented_defaults(driver: _Driver) -> None:
    assert command.main(["replay"]) == 0
    assert driver.config == ReplayConfig(layouts=("identity", "cp_shared", "host_shared"), device_tokens=2145 * 64)
    assert driver.trace is not None
    assert (driver.trace.name, len(driver.trace.requests)) == ("conversation_trace_head.jsonl", 1000)


def test_a_pool_that_only_a_sharded_layout_can_use_is_accepted_for_it_alone(trace_file: Path, driver: _Driver) -> None:
    assert command.main(["replay", str(trace_file), "--layout", "cp_shared", "--device-tokens", "192"]) == 0
    assert driver.config is not None
    assert driver.config.device_tokens == 192


@pytest.mark.parametrize("layout", ["identity", "cp_shared"])
@pytest.mark.parametrize("fault", ["bytes", "digests", "acks"])
def test_a_mismatch_or_a_disagreement_in_any_layout_exits_with_1(
    layout: str, fault: str, trace_file: Path, driver: _Driver, capsys: pytest.CaptureFixture[str]
) -> None:
    good = driver.results[layout]
    driver.results[layout] = {
        "bytes": replace(good, mismatched_tokens=1),
        "digests": replace(good, digests_equal=False),
        "acks": replace(good, write_acks_per_rank=(1, 2)),
    }[fault]
    assert command.main(["replay", str(trace_file)]) == 1
    assert f"FAILED: {layout}: " in capsys.readouterr().out.splitlines()[-1]


def test_a_failed_run_exits_with_1_and_one_line(
    trace_file: Path, driver: _Driver, capsys: pytest.CaptureFixture[str]
) -> None:
    driver.error = RunError("rank 3 ended\nwith status 9")
    assert command.main(["replay", str(trace_file)]) == 1
    assert capsys.readouterr().err == "kvlayouts: error: rank 3 ended with status 9\n"


@pytest.mark.parametrize(
    ("interrupt", "status", "words"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (Terminated(signal.SIGTERM), 143, "ended by SIGTERM"),
        (Terminated(signal.SIGHUP), 129, "ended by SIGHUP"),
    ],
    ids=["Ctrl-C", "SIGTERM", "SIGHUP"],
)
def test_an_interrupted_run_exits_with_128_and_the_number_of_the_signal(
    interrupt: KeyboardInterrupt,
    status: int,
    words: str,
    trace_file: Path,
    driver: _Driver,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver.error = interrupt
    assert command.main(["replay", str(trace_file)]) == status
    assert capsys.readouterr().err.strip() == f"kvlayouts: error: {words}"
    monkeypatch.setattr(sys, "stderr", _pipe_that_nobody_reads())  # a terminal that closed can show nothing
    assert command.main(["replay", str(trace_file)]) == status


@pytest.mark.parametrize("arguments", ["explain --tokens 64", "plan --kv-bytes-per-token 64", "--help", "plan --help"])
def test_a_pipe_that_nobody_reads_any_more_ends_a_command_with_141_and_no_word(
    arguments: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = _pipe_that_nobody_reads()
    monkeypatch.setattr(sys, "stdout", pipe)
    assert command.main(arguments.split()) == 141
    assert "error" not in capsys.readouterr().err
    sys.stdout.flush()  # as the interpreter does at its end, which complains if that fails


def test_a_command_whose_table_nobody_reads_writes_its_files_all_the_same(
    trace_file: Path, driver: _Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert driver.config is None
    out = trace_file.with_suffix(".json")
    monkeypatch.setattr(sys, "stdout", _pipe_that_nobody_reads())
    assert command.main(["replay", str(trace_file), "--json", str(out)]) == 141
    assert list(json.loads(out.read_text(encoding="utf-8"))["layouts"]) == ["identity", "cp_shared", "host_shared"]


def test_progress_that_nobody_reads_any_more_ends_the_run(
    trace_file: Path, driver: _Driver, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", _pipe_that_nobody_reads())
    assert command.main(["replay", str(trace_file)]) == 141
    assert capsys.readouterr().out == ""
    assert driver.config is not None
    sys.stderr.flush()


def test_bad_input_exits_with_2_also_where_nobody_reads_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", _pipe_that_nobody_reads())
    assert command.main(["replay", "--cp-size", "0"]) == 2
    sys.stderr.flush()


def test_a_target_that_cannot_be_written_after_all_exits_with_1_after_the_table(
    trace_file: Path, driver: _Driver, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    assert driver.config is None
    assert command.main(["replay", str(trace_file), "--json", "/dev/full"]) == 1
    captured = capsys.readouterr()
    assert "ranks agree" in captured.out
    assert captured.err.splitlines()[-1].startswith("kvlayouts: error: ")
    assert "No space left" in captured.err


def test_standard_output_that_is_full_ends_the_run_with_1_and_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    full = open("/dev/full", "w", encoding="utf-8")  # noqa: SIM115  # closing it fails
    monkeypatch.setattr(sys, "stdout", full)
    status = command.main(["explain", "--tokens", "64"])
    with suppress(OSError):
        full.close()
    assert status == 1
    assert capsys.readouterr().err == "kvlayouts: error: No space left on device\n"


def test_a_terminal_that_cannot_show_a_character_shows_another_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    ascii_bytes = BytesIO()
    monkeypatch.setattr(sys, "stdout", TextIOWrapper(ascii_bytes, encoding="ascii"))
    assert command.main(["explain", "--tokens", "64"]) == 0
    sys.stdout.flush()
    assert b"cp_shared: 4 ranks" in ascii_bytes.getvalue()


def test_progress_without_a_terminal_is_four_plain_lines_a_layout(
    trace_file: Path, driver: _Driver, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["replay", str(trace_file)]) == 0
    assert driver.config is not None
    expected = [
        f"{name}: {done} of 8 requests" for name in ("identity", "cp_shared", "host_shared") for done in (2, 4, 6, 8)
    ]
    assert capsys.readouterr().err.splitlines() == expected


def test_progress_on_a_terminal_is_a_bar_per_layout(capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress(Console(stderr=True, force_terminal=True, width=100)) as on_progress:
        on_progress("identity", 5, 5)
        on_progress("cp_shared", 2, 5)
    shown = capsys.readouterr().err
    assert "identity" in shown
    assert "5/5" in shown
    assert "cp_shared" in shown
    assert "2/5" in shown
