"""The numbers and messages in docs/ are what the code gives: the life of a node, and how replay refuses bad input."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sglang.test.ci.ci_register import register_cpu_ci

from kvlayouts.main import main
from sglang.srt.mem_cache.hicache.cpu.support import install_cpu_support

if TYPE_CHECKING:
    from types import ModuleType

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

DOCS = Path(__file__).parents[4] / "docs"
REQUEST = '{"timestamp": 0, "input_length": 512, "hash_ids": [0]}\n'
TRACES = {
    "broken.jsonl": REQUEST + "not json\n",
    "short.jsonl": REQUEST + '{"timestamp": 0, "input_length": 700, "hash_ids": [0]}\n',
}

# Not on the page, which has examples only.
MORE_REFUSALS = {
    "replay --cp-size 65": "Invalid value for '--cp-size': 65 is not in the range 1<=x<=64.",
    "replay --device-tokens 1000": "--device-tokens 1000: must be a positive multiple of --page-size 64",
    "replay --host-ratio 0.0001": (
        "--host-ratio 0.0001: leaves no host page of 64 tokens beside 137280 device tokens; must be at least 0.000467"
    ),
    "replay --requests 2000": "--requests 2000: must be between 1 and 1000, the trace's requests",
    "replay nowhere.jsonl": "TRACE nowhere.jsonl: cannot be read: No such file or directory",
    "replay broken.jsonl": "TRACE broken.jsonl, line 2: is no JSON object: not json",
}


def _refusals() -> list[tuple[str, str]]:
    guide = (DOCS / "replay.md").read_text(encoding="utf-8")
    return re.findall(r"^\$ kvlayouts (replay .*)\nkvlayouts: error: (.*)$", guide, re.MULTILINE)


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("life_of_a_node", DOCS / "life_of_a_node.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_life_of_a_node_is_as_the_page_shows_it() -> None:
    install_cpu_support()
    page = (DOCS / "life-of-a-node.md").read_text(encoding="utf-8")
    shown = re.findall(r"^```text life\n(.*?)\n```$", page, re.MULTILINE | re.DOTALL)
    assert shown == list(_script().story())


def test_the_guide_to_replay_shows_refusals() -> None:
    assert len(_refusals()) + len(MORE_REFUSALS) >= 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [pytest.param(arguments, message, id=arguments) for arguments, message in (*_refusals(), *MORE_REFUSALS.items())],
)
def test_replay_refuses_bad_input_in_these_words(
    arguments: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, text in TRACES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(arguments)) == 2
    assert capsys.readouterr().err.splitlines() == [f"kvlayouts: error: {message}"]
