"""The list of faults and the lines that are broken for it fit together, and a broken copy reaches every process.

Reads text, but for one process that is started. It does not load SGLang, so that it answers at once.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import mutants
import pytest

MUTANTS = mutants.read_mutants()
ROW = re.compile(r"^\| (\d+[a-z]?) \| (.*) \|$", re.MULTILINE)
ROWS = ROW.findall((mutants.ROOT / "docs/faults.md").read_text(encoding="utf-8"))
"""Number and text of each row of faults."""


def test_each_row_of_faults_has_a_number_of_its_own() -> None:
    assert len(ROWS) > 40
    assert [number for number, count in Counter(number for number, _ in ROWS).items() if count > 1] == []


def test_each_fault_that_there_can_be_has_a_line_to_break() -> None:
    assert {number for number, text in ROWS if not text.startswith("*storage*")} == {mutant.row for mutant in MUTANTS}


def test_a_number_that_is_there_twice_or_a_line_that_is_not_there_once_is_an_error() -> None:
    mutants.check(MUTANTS)
    first, second, *_ = MUTANTS
    with pytest.raises(ValueError, match=f"two mutants have the number {first.number}"):
        mutants.check([first, replace(second, name=f"{first.number} again")])
    for old in ("no such line", "self"):
        with pytest.raises(ValueError, match="must stand once"):
            mutants.check([replace(first, old=old)])


def test_each_mutant_names_tests_that_there_are() -> None:
    missing = []
    for test in {test for mutant in MUTANTS for test in mutant.tests}:
        path, *names = str(mutants.path_of(test)).split("::")
        text = Path(path).read_text(encoding="utf-8")
        missing += [test for name in names if not re.search(rf"^ *(def|class) {name}\b", text, re.MULTILINE)]
    assert missing == []


@pytest.mark.parametrize(
    ("arguments", "numbers"),
    [
        (["12"], ["12.1", "12.2"]),
        (["12.2", "3"], ["3", "12.2"]),
        (["35"], ["35"]),
        (["38", "--part", "2/2"], ["38.2", "38.4"]),
        ([], [mutant.number for mutant in MUTANTS]),
    ],
)
def test_a_row_its_mutants_or_a_part_of_all_can_be_chosen(arguments: list[str], numbers: list[str]) -> None:
    assert [mutant.number for mutant in mutants.chosen_mutants(arguments)] == numbers


@pytest.mark.parametrize("arguments", [["999"], ["--part", "3/2"], ["--part", "0/2"], ["--part", "half"]])
def test_what_cannot_be_chosen_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        mutants.chosen_mutants(arguments)


def test_a_module_for_some_releases_is_broken_with_those_only() -> None:
    releases = ("0.5.20", "0.5.23", "0.6.0")
    for text, those in (
        ("assert SINCE_0_5_23\n", releases[1:]),
        ("import x\n\nassert not SINCE_0_5_23\n", releases[:1]),
        ("assert left == right\n", releases),
    ):
        assert tuple(release for release in releases if mutants.loaded_by(text, release)) == those


def test_a_process_that_a_test_starts_imports_the_broken_copy(tmp_path: Path) -> None:
    mutants.copy_packages(tmp_path)
    (tmp_path / "kvlayouts/common/errors.py").write_text("MARK = 'broken'\n")
    asked = (
        "import importlib.util, kvlayouts.common.errors as errors, sys\n"
        "print(errors.MARK)\n"
        "for name in ('sglang.srt.mem_cache.hicache.tree.node', 'sglang.srt.mem_cache.layouts'):\n"
        "    print(sys.meta_path[0].find_spec(name).origin)\n"
    )
    environment = os.environ | mutants.variables_of(tmp_path)
    done = subprocess.run([sys.executable, "-c", asked], env=environment, capture_output=True, text=True, check=True)
    below = tmp_path / "sglang/srt/mem_cache"
    assert done.stdout.split() == ["broken", str(below / "hicache/tree/node.py"), str(below / "layouts/__init__.py")]
