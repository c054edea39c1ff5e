"""Imports our packages from the folder that KVLAYOUTS_COPY names.

Python loads a module of this name whenever it starts, and scripts/mutants.py puts this folder on PYTHONPATH. So a
process that a test starts has the broken copy too, such as the fork server of the ranks and what it forks.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

VARIABLE: Final = "KVLAYOUTS_COPY"
PACKAGES: Final = ("kvlayouts", "sglang.srt.mem_cache.layouts", "sglang.srt.mem_cache.hicache")


class CopyFinder(importlib.abc.MetaPathFinder):
    """Finds our packages below another folder than python/."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    # No @override: typing_extensions would be loaded by every Python that starts.
    def find_spec(  # type: ignore[explicit-override]  # see above
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's file in the folder, None for modules that are not ours or not there."""
        if not is_ours(fullname):
            return None
        place = self._folder.joinpath(*fullname.split("."))
        if (package := place / "__init__.py").is_file():
            return importlib.util.spec_from_file_location(fullname, package, submodule_search_locations=[str(place)])
        module = place.with_suffix(".py")
        return importlib.util.spec_from_file_location(fullname, module) if module.is_file() else None


def is_ours(module: str) -> bool:
    """Whether a module belongs to our packages."""
    return f"{module}.".startswith(tuple(f"{package}." for package in PACKAGES))


def install(folder: Path) -> None:
    """Import our packages from `folder` from now on."""
    sys.meta_path.insert(0, CopyFinder(folder))


if chosen := os.environ.get(VARIABLE):
    install(Path(chosen))
