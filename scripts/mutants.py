"""Break one line of a copy of the code at a time and see that a test notices: `python scripts/mutants.py [NUMBER ...]`.

scripts/mutants.toml lists the lines; docs/faults.md says which fault each one stands for. SGLang is imported once, and
each broken copy is tried in a child that imports our packages from the copy. Nothing in the checkout changes.
The exit status is 1 if a broken copy passes its tests, or the code as it is does not.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
import tomllib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
MEM_CACHE = Path("sglang/srt/mem_cache")
PACKAGES = {"kvlayouts": Path(), "layouts": MEM_CACHE, "hicache": MEM_CACHE}
"""The folder that each of our packages lies in, below python/."""
TESTS = {"kvlayouts": Path(), "layouts": Path("mem_cache"), "hicache": Path("mem_cache")}
"""The folder of its tests, below the unit tests."""
PRELOADED = (
    "hypothesis.stateful",
    "sglang.srt.managers.cache_controller",
    "sglang.srt.managers.schedule_batch",
    "sglang.srt.mem_cache.pool_host",
    "sglang.srt.mem_cache.radix_cache",
    "sglang.test.ci.ci_register",
    "sglang.test.test_utils",
)
CHILD_SECONDS = 240


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """In `file`, which begins with its package, `old` becomes `new`; `tests`, which begin alike, must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


class CopyFinder(importlib.abc.MetaPathFinder):
    """Imports our packages from another folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's file in the folder, None for modules that are not ours."""
        if not is_ours(fullname):
            return None
        place = self._folder.joinpath(*fullname.split("."))
        if place.is_dir():
            return importlib.util.spec_from_file_location(
                fullname, place / "__init__.py", submodule_search_locations=[str(place)]
            )
        return importlib.util.spec_from_file_location(fullname, place.with_suffix(".py"))


def is_ours(module: str) -> bool:
    """Whether a module belongs to our packages."""
    ours = (".".join((*folder.parts, package)) for package, folder in PACKAGES.items())
    return f"{module}.".startswith(tuple(f"{name}." for name in ours))


def source_of(file: str) -> Path:
    """The path of a mutant's file, below python/."""
    return PACKAGES[file.partition("/")[0]] / file


def test_of(test: str) -> Path:
    """The path of a mutant's test."""
    return ROOT / "test/registered/unit" / TESTS[test.partition("/")[0]] / test


def read_mutants() -> list[Mutant]:
    """The table. Raises ValueError for a line that is not found exactly once."""
    table = tomllib.loads((ROOT / "scripts/mutants.toml").read_text())
    mutants = [
        Mutant(name=entry["name"], file=entry["file"], old=entry["old"], new=entry["new"], tests=tuple(entry["tests"]))
        for entry in table["mutant"]
    ]
    for mutant in mutants:
        count = (ROOT / "python" / source_of(mutant.file)).read_text().count(mutant.old)
        if count != 1:
            raise ValueError(f"{mutant.name}: {mutant.old!r} must stand once in {mutant.file}, found {count} times")
    return mutants


def passes(tests: Iterable[str], mutant: Mutant | None, folder: Path) -> bool:
    """Whether the tests pass in a child with the broken copy, or with an intact one."""
    for package, place in PACKAGES.items():
        source = ROOT / "python" / place / package
        shutil.copytree(source, folder / place / package, ignore=shutil.ignore_patterns("__pycache__"))
    if mutant is not None:
        file = folder / source_of(mutant.file)
        file.write_text(file.read_text().replace(mutant.old, mutant.new))
    child = os.fork()
    if not child:
        os._exit(_run(tests, folder))
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 0


def _run(tests: Iterable[str], folder: Path) -> int:
    signal.alarm(CHILD_SECONDS)  # a copy that hangs is noticed
    for name in filter(is_ours, list(sys.modules)):
        del sys.modules[name]
    sys.meta_path.insert(0, CopyFinder(folder))
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    arguments = ["-q", "-x", "-p", "no:cacheprovider", "--no-header", *(str(test_of(test)) for test in tests)]
    status = pytest.main(arguments)
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return 0  # nothing was collected: that proves nothing
    return int(status)


def main(chosen: Sequence[str]) -> int:
    """Try the chosen mutants, or all."""
    by_number = {mutant.name.split()[0]: mutant for mutant in read_mutants()}
    unknown = [number for number in chosen if number not in by_number]
    if unknown:
        print(f"no mutant {', '.join(unknown)}; there are {', '.join(by_number)}", file=sys.stderr)
        return 2
    mutants = [by_number[number] for number in chosen] if chosen else list(by_number.values())
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for module in PRELOADED:
        importlib.import_module(module)
    missed = 0
    with tempfile.TemporaryDirectory() as scratch:
        every = sorted({test for mutant in mutants for test in mutant.tests})
        if not passes(every, None, Path(scratch) / "intact"):
            print("the code as it is does not pass", flush=True)
            print((Path(scratch) / "intact/log").read_text()[-3000:])
            return 1
        for number, mutant in enumerate(mutants):
            folder = Path(scratch) / str(number)
            noticed = not passes(mutant.tests, mutant, folder)
            missed += not noticed
            print(f"{'noticed' if noticed else 'MISSED '}  {mutant.name}", flush=True)
            if not noticed:
                print((folder / "log").read_text()[-600:])
            with suppress(OSError):
                shutil.rmtree(folder)
    print(f"{len(mutants) - missed} of {len(mutants)} broken copies were noticed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
