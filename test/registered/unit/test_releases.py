"""One list of supported releases: what is written for people and for tools agrees with it.

Reads text and asks scripts. It does not load SGLang, so that it answers at once.
"""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
RELEASES = runpy.run_path(str(ROOT / "python/sglang/srt/mem_cache/hicache/releases.py"))
SUPPORTED: tuple[str, ...] = RELEASES["supported_releases"]()
ASKED_FOR_NOTHING = {name: value for name, value in os.environ.items() if name not in {"SGLANG", "MAKEFLAGS"}}
"""The environment without what `make test SGLANG=...` hands on to the processes that it starts."""
TYPECHECK = runpy.run_path(str(ROOT / "scripts/typecheck.py"))


def _pins(file: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / file).read_text(encoding="utf-8").splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {name.lower().replace("_", "-"): pinned for name, pinned in pins}


def _where(release: str) -> str:
    command = ["bash", "scripts/setup_env.sh", "--where"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"SGLANG": release}, capture_output=True, text=True)
    return done.stdout.strip()


def test_the_readme_names_the_releases_in_one_line() -> None:
    named = re.findall(r"beside SGLang (.+?), which stays as it is", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert named == [" or ".join(SUPPORTED)]


def test_the_list_is_in_order_and_the_extra_asks_for_the_newest() -> None:
    assert list(SUPPORTED) == sorted(SUPPORTED, key=lambda name: [int(part) for part in re.findall(r"\d+", name)])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["optional-dependencies"]["sglang"] == [f"sglang=={SUPPORTED[-1]}"]


@pytest.mark.parametrize("release", SUPPORTED)
def test_a_release_has_pins_a_record_and_no_pin_twice(release: str) -> None:
    pins = _pins(f"constraints-{release}.txt")
    assert pins["sglang"] == release
    assert not pins.keys() & _pins("constraints.txt").keys(), "pinned twice: pip would see a conflict"
    assert (ROOT / f"scripts/relied/{release}.json").is_file()


def test_the_newest_release_lives_in_venv_and_another_beside_it() -> None:
    assert _where("") == _where(SUPPORTED[-1]) == ".venv"
    assert _where("0.5.1") == ".venv-0.5.1"


def test_make_takes_the_environment_of_the_release_that_it_is_given() -> None:
    for asked, python in (("", ".venv/bin/python"), ("SGLANG=0.5.1", ".venv-0.5.1/bin/python")):
        command = ["make", "-n", "typecheck", *asked.split()]
        done = subprocess.run(command, cwd=ROOT, env=ASKED_FOR_NOTHING, capture_output=True, text=True)
        assert f"{python} scripts/typecheck.py" in done.stdout


def test_an_unknown_release_is_refused_before_anything_is_made() -> None:
    done = subprocess.run(
        ["bash", "scripts/setup_env.sh"], cwd=ROOT, env=os.environ | {"SGLANG": "0.5.1"}, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert re.fullmatch(r"setup: error: SGLANG must be one of: [\d. ]+, got 0\.5\.1 \(.*\)\n", done.stderr)
    assert not (ROOT / ".venv-0.5.1").exists()


def test_mypy_is_told_which_conditions_of_the_stubs_are_true_of_a_release() -> None:
    conditions = {
        name for stub in (ROOT / "typings").rglob("*.pyi") for name in re.findall(r"SINCE_\w+", stub.read_text())
    }
    declared = set(re.findall(r"^(SINCE_\w+): bool$", (ROOT / "typings/sglang_releases.pyi").read_text(), re.MULTILINE))
    assert conditions == declared
    assert TYPECHECK["options"]("0.5.22")[-2:] == ["--always-false", "SINCE_0_5_23"]
    assert TYPECHECK["options"]("0.5.23.post1")[-2:] == ["--always-true", "SINCE_0_5_23"]
