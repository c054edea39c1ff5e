"""An environment of somebody else's: SGLang and this distribution installed as wheels, and a package that uses them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

REPOSITORY = Path(__file__).parents[2]
EXAMPLE = REPOSITORY / "examples" / "keyed-layout"
BUILT_FROM = ("LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py", "python", "typings")


@dataclass(frozen=True, slots=True, kw_only=True)
class ThirdParty:
    """`sources` is a copy of the package outside the repository, `site` where it is installed, `python` who sees it."""

    python: Path
    site: Path
    sources: Path

    def run(self, *arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
        """``python -m ...`` in `cwd`, by default the copied package. No variable of ours says where modules lie."""
        inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
        return subprocess.run(
            [str(self.python), "-m", *arguments],
            cwd=cwd or self.sources,
            env={**inherited, "COLUMNS": "200", **environment},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )


def make_third_party(folder: Path) -> ThirdParty:
    """Build and install this distribution and the example below `folder`, without a network.

    Everything else, SGLang included, comes from the environment that runs the tests. SGLang's folders are made anew
    with links to its files, so that our two packages can lie among them as in one site-packages.
    """
    sources = folder / "keyed-layout"
    shutil.copytree(EXAMPLE, sources, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info", ".*"))
    ours = folder / "ours"
    ours.mkdir()
    for name in BUILT_FROM:
        if (REPOSITORY / name).is_dir():
            shutil.copytree(REPOSITORY / name, ours / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(REPOSITORY / name, ours)
    site = folder / "site"
    venv.create(folder / "venv", symlinks=True)
    installed = folder / "venv" / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    sglang = _sglang_folder()
    _link_beside(sglang, installed / "sglang", ours_in=("srt", "mem_cache"))
    (installed / "others.pth").write_text(f"{site}\n{sglang.parent}\n", encoding="utf-8")
    python = folder / "venv" / "bin" / "python"
    _pip_install(python, ours)
    built = folder / "built"
    shutil.copytree(sources, built)  # a build writes into its sources
    _pip_install(python, built, "--target", str(site))
    return ThirdParty(python=python, site=site, sources=sources)


def _sglang_folder() -> Path:
    spec = find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _link_beside(real: Path, copy: Path, ours_in: tuple[str, ...]) -> None:
    """`copy` with a link to each thing in `real`, but real folders along the way to our packages."""
    copy.mkdir()
    for entry in real.iterdir():
        if ours_in and entry.name == ours_in[0]:
            _link_beside(entry, copy / entry.name, ours_in[1:])
        elif entry.name != "__pycache__":
            (copy / entry.name).symlink_to(entry)


def _pip_install(python: Path, sources: Path, *options: str) -> None:
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "--quiet"]
    install = ["install", "--no-index", "--no-deps", "--no-build-isolation", *options, str(sources)]
    done = subprocess.run([*pip, *install], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def entry_points_of(site: Path) -> Mapping[str, str]:
    """Name and object of each layout strategy that is installed in `site`."""
    from importlib.metadata import distributions

    return {
        entry.name: entry.value
        for distribution in distributions(path=[str(site)])
        for entry in distribution.entry_points
        if entry.group == "sglang.kv_layouts"
    }
