"""The console examples and pictures in docs/explain.md and docs/plan.md are what the commands give."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from sglang.test.ci.ci_register import register_cpu_ci

from kvlayouts.main import main

register_cpu_ci(est_time=30, suite="base-a-test-cpu")

DOCS = Path(__file__).parents[4] / "docs"
COLUMNS = "110"
# Refusals that left the pages, which have some examples only.
MORE_REFUSALS = {
    "explain --tokens 63": "--tokens 63: must be between 64 and 67108864",
    "explain --rank 4": "--rank 4: must be between 0 and 3",
    "plan": (
        "--model-config: is missing; give a model's config.json, or --kv-bytes-per-token with the bytes that a token "
        "takes on one GPU"
    ),
    "plan --model-config config.json --gpus 8 --cp-size 3": "--cp-size 3: must divide --gpus 8; accepted: 1, 2, 4, 8",
    "plan --model-config config.json --host-gb 80 --host-ratio 2": (
        "--host-gb 80: must not be given together with --host-ratio 2"
    ),
}


def _examples() -> list[tuple[str, str, str]]:
    """Page, arguments and what is shown below them; then what left the pages."""
    found = []
    for page in ("explain.md", "plan.md"):
        text = (DOCS / page).read_text(encoding="utf-8")
        blocks = re.findall(r"^```console\n\$ kvlayouts (.*?)\n(.*?)\n```$", text, re.MULTILINE | re.DOTALL)
        found += [(page, arguments, shown) for arguments, shown in blocks]
    return found + [("", arguments, f"kvlayouts: error: {message}") for arguments, message in MORE_REFUSALS.items()]


@pytest.fixture
def _config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The config.json that docs/plan.md shows, in a working directory of its own, on a console as wide as the docs'."""
    (shown,) = re.findall(r"^```json\n(.*?)\n```$", (DOCS / "plan.md").read_text("utf-8"), re.MULTILINE | re.DOTALL)
    (tmp_path / "config.json").write_text(shown, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", COLUMNS)


def test_both_pages_have_examples_and_refusals() -> None:
    for command in ("explain", "plan"):
        shown = [output for _, arguments, output in _examples() if arguments.startswith(command)]
        refusals = [output for output in shown if output.startswith("kvlayouts: error: ")]
        assert len(refusals) >= 5
        assert len(shown) > len(refusals)


@pytest.mark.usefixtures("_config")
@pytest.mark.parametrize(
    ("page", "arguments", "shown"), _examples(), ids=[f"{page} {arguments}" for page, arguments, _ in _examples()]
)
def test_an_example_shows_what_the_command_prints(
    page: str, arguments: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(shlex.split(arguments))
    captured = capsys.readouterr()
    printed = captured.err if status else captured.out
    assert status in (0, 2), page
    assert [line.rstrip() for line in printed.rstrip().splitlines()] == shown.splitlines(), page


@pytest.mark.usefixtures("_config")
def test_the_picture_of_a_node_is_the_one_that_the_page_asks_for(tmp_path: Path) -> None:
    (command,) = re.findall(r"^    kvlayouts (explain .*)$", (DOCS / "explain.md").read_text("utf-8"), re.MULTILINE)
    assert main(shlex.split(command)) == 0
    drawn = (tmp_path / "node.svg").read_text(encoding="utf-8")
    assert drawn == (DOCS / "images" / "explain.svg").read_text(encoding="utf-8")


def test_a_small_node_fits_a_terminal_of_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["explain", "--split", "512"]) == 0
    printed = capsys.readouterr().out
    assert re.findall(r"^ +(\d) .*\d B$", printed, re.MULTILINE) == ["0", "1", "2", "3"], printed
