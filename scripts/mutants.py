"""Break one line of a copy of the code at a time and see that a test notices: `python scripts/mutants.py [NUMBER ...]`.

scripts/mutants.toml lists the lines; docs/faults.md says which fault each one stands for. A NUMBER is a mutant's (12.2)
or that of a row of faults, for all of its mutants (12). `--part 2/5` takes every fifth one, from the second on.

SGLang is imported once, and each broken copy is tried in a child that imports our packages from the copy, as do the
processes that it starts. Nothing in the checkout changes. The exit status is 1 if a broken copy passes its tests, or
the code as it is does not.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import re
import runpy
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from broken_copy import sitecustomize

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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
"""A copy that hangs is noticed after this time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """In `file`, which begins with its package, `old` becomes `new`; `tests`, which begin alike, must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def number(self) -> str:
        """What the name begins with."""
        return self.name.split()[0]

    @property
    def row(self) -> str:
        """The row of docs/faults.md."""
        return self.number.partition(".")[0]


def source_of(file: str) -> Path:
    """The path of a mutant's file."""
    return ROOT / "python" / PACKAGES[file.partition("/")[0]] / file


def path_of(test: str) -> Path:
    """The path of a mutant's test."""
    return ROOT / "test/registered/unit" / TESTS[test.partition("/")[0]] / test


def read_mutants() -> list[Mutant]:
    """The table, checked."""
    table = tomllib.loads((ROOT / "scripts/mutants.toml").read_text())
    mutants = [
        Mutant(name=entry["name"], file=entry["file"], old=entry["old"], new=entry["new"], tests=tuple(entry["tests"]))
        for entry in table["mutant"]
    ]
    check(mutants)
    return mutants


def check(mutants: Sequence[Mutant]) -> None:
    """Raise ValueError for a line that does not stand exactly once in its file, or a number that is there twice."""
    for mutant in mutants:
        count = source_of(mutant.file).read_text().count(mutant.old)
        if count != 1:
            raise ValueError(f"{mutant.name}: {mutant.old!r} must stand once in {mutant.file}, found {count} times")
        if sum(mutant.number == other.number for other in mutants) != 1:
            raise ValueError(f"{mutant.name}: two mutants have the number {mutant.number}")


def loaded_by(text: str, release: str) -> bool:
    """Whether a release of SGLang loads a module: one for some releases asserts a condition such as SINCE_0_5_23."""
    holds = runpy.run_path(str(source_of("hicache/releases.py")))["holds"]
    asserted = re.search(r"^assert (not )?(SINCE_\w+)$", text, re.MULTILINE)
    return asserted is None or bool(holds(asserted[2], release)) != bool(asserted[1])


def copy_packages(folder: Path) -> None:
    """Copy our packages below `folder`."""
    for package, place in PACKAGES.items():
        source = ROOT / "python" / place / package
        shutil.copytree(source, folder / place / package, ignore=shutil.ignore_patterns("__pycache__"))


def variables_of(folder: Path) -> dict[str, str]:
    """Environment variables with which a Python that starts imports our packages from `folder`."""
    path = [str(Path(sitecustomize.__file__).parent), os.environ.get("PYTHONPATH", "")]
    return {sitecustomize.VARIABLE: str(folder), "PYTHONPATH": os.pathsep.join(filter(None, path))}


def passes(tests: Iterable[str], mutant: Mutant | None, folder: Path) -> bool:
    """Whether the tests pass in a child with the broken copy, or with an intact one."""
    copy_packages(folder)
    if mutant is not None:
        file = folder / source_of(mutant.file).relative_to(ROOT / "python")
        file.write_text(file.read_text().replace(mutant.old, mutant.new))
    child = os.fork()
    if not child:
        signal.alarm(0 if mutant is None else CHILD_SECONDS)
        os._exit(_run(tests, folder))
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 0


def _run(tests: Iterable[str], folder: Path) -> int:
    for name in filter(sitecustomize.is_ours, list(sys.modules)):
        del sys.modules[name]
    sitecustomize.install(folder)
    os.environ.update(variables_of(folder))
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    arguments = ["-q", "-x", "-p", "no:cacheprovider", "--no-header", *(str(path_of(test)) for test in tests)]
    status = pytest.main(arguments)
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return 0  # nothing was collected: that proves nothing
    return int(status)


def chosen_mutants(arguments: Sequence[str]) -> list[Mutant]:
    """The mutants that the arguments name, all by default."""
    parser = argparse.ArgumentParser(usage="mutants.py [NUMBER ...] [--part K/N]")
    parser.add_argument("numbers", nargs="*")
    parser.add_argument("--part", default="1/1")
    asked = parser.parse_args(arguments)
    mutants = read_mutants()
    unknown = set(asked.numbers).difference(*({mutant.number, mutant.row} for mutant in mutants))
    if unknown:
        parser.error(f"no mutant {', '.join(unknown)}; there are {', '.join(mutant.number for mutant in mutants)}")
    if not (part := re.fullmatch(r"(\d+)/(\d+)", asked.part)) or not 1 <= int(part[1]) <= int(part[2]):
        parser.error(f"--part {asked.part}: must be such as 2/5")
    chosen = [mutant for mutant in mutants if not asked.numbers or {mutant.number, mutant.row} & set(asked.numbers)]
    return chosen[int(part[1]) - 1 :: int(part[2])]


def main(arguments: Sequence[str]) -> int:
    """Try the chosen mutants."""
    chosen = chosen_mutants(arguments)
    release = importlib.metadata.version("sglang")
    mutants = [mutant for mutant in chosen if loaded_by(source_of(mutant.file).read_text(), release)]
    print(f"{len(mutants)} broken copies with SGLang {release}; {len(chosen) - len(mutants)} are other releases'")
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
        for mutant in mutants:
            folder = Path(scratch) / mutant.number
            started = time.monotonic()
            noticed = not passes(mutant.tests, mutant, folder)
            missed += not noticed
            seconds = time.monotonic() - started
            print(f"{'noticed' if noticed else 'MISSED '} {seconds:4.0f} s  {mutant.name}", flush=True)
            if not noticed:
                print((folder / "log").read_text()[-600:])
            with suppress(OSError):
                shutil.rmtree(folder)
    print(f"{len(mutants) - missed} of {len(mutants)} broken copies were noticed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
