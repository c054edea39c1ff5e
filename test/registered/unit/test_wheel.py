"""The built wheel, without the checkout beside it: what it holds, and that it can check an installation."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase
from typing_extensions import override

import sglang

register_cpu_ci(est_time=60, suite="base-a-test-cpu")

ROOT = Path(__file__).resolve().parents[3]
BUILT_FROM = ("LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py", "python", "typings")
STUBS = "sglang/srt/mem_cache/hicache/check/typings/"


class TestWheel(CustomTestCase):
    folder: ClassVar[Path]
    names: ClassVar[list[str]]

    @classmethod
    @override
    def setUpClass(cls) -> None:
        """Build a wheel from a copy and unpack it into a copy, made of links, of the SGLang that is installed."""
        super().setUpClass()
        cls.folder = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        source = cls.folder / "source"
        for name in BUILT_FROM:
            if (ROOT / name).is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
                shutil.copytree(ROOT / name, source / name, ignore=ignored)
            else:
                source.mkdir(exist_ok=True)
                shutil.copy(ROOT / name, source / name)
        build = ["pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--no-index"]
        subprocess.run([sys.executable, "-m", *build, "-w", str(cls.folder), str(source)], check=True)
        shutil.rmtree(source)
        (wheel,) = cls.folder.glob("*.whl")
        site = cls.folder / "site"
        _link(Path(sglang.__path__[0]), site / "sglang", "srt", "mem_cache")
        with zipfile.ZipFile(wheel) as archive:
            cls.names = archive.namelist()
            archive.extractall(site)

    def test_it_carries_every_stub_and_no_package_of_sglangs(self) -> None:
        expected = {STUBS + file.relative_to(ROOT / "typings").as_posix() for file in (ROOT / "typings").rglob("*.pyi")}
        self.assertEqual({name for name in self.names if name.startswith(STUBS)}, expected)
        ours = ("kvlayouts/", "sglang/srt/mem_cache/hicache/", "sglang/srt/mem_cache/layouts/", "sglang_kv_layouts-")
        self.assertEqual([name for name in self.names if not name.startswith(ours)], [])

    def test_check_compares_the_signatures_with_what_is_in_the_wheel(self) -> None:
        line = self._check()
        release = re.escape(version("sglang"))
        self.assertRegex(line, rf"^ok +signatures: \d+ names in \d+ modules as in {release}$")

    def test_its_command_finds_the_strategies_beside_it_without_loading_sglang(self) -> None:
        program = (
            "import sys; from kvlayouts import main; print(main.__file__);"
            "print(main.main(['explain', '--tokens', '64']), 'sglang' in sys.modules)"
        )
        place, *_, ended = self._run(program)
        self.assertTrue(place.startswith(str(self.folder)), place)
        self.assertEqual(ended, "0 False")

    def test_a_wheel_without_stubs_says_so_instead_of_passing(self) -> None:
        stubs = self.folder / "site" / STUBS
        hidden = stubs.rename(self.folder / "hidden")
        try:
            line = self._check()
        finally:
            hidden.rename(stubs)
        self.assertEqual(line, "FAILED  signatures: the table of signatures is missing; reinstall sglang-kv-layouts")

    def _check(self) -> str:
        """What the unpacked wheel says about signatures."""
        program = (
            "from sglang.srt.mem_cache.hicache.check import installation as found;"
            "print(found.__file__); print(dict(found._CHECKS)['signatures']())"
        )
        place, line = self._run(program)[-2:]
        self.assertTrue(place.startswith(str(self.folder)), place)
        return line

    def _run(self, program: str) -> list[str]:
        """The lines that a program prints beside the unpacked wheel."""
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONPATH": str(self.folder / "site"), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=True,
            timeout=200,
        )
        return done.stdout.splitlines()


def _link(source: Path, target: Path, *apart: str) -> None:
    """Make `target` a folder of links to what `source` holds; the folders `apart`, one in the other, are made anew."""
    target.mkdir(parents=True)
    for entry in source.iterdir():
        if apart and entry.name == apart[0]:
            _link(entry, target / entry.name, *apart[1:])
        elif entry.name not in ("hicache", "layouts", "__pycache__"):
            (target / entry.name).symlink_to(entry)
