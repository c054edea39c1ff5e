"""Which tests run beside each other when pytest has several workers (`make unit`)."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from xdist.remote import Producer  # type: ignore[import-untyped]  # xdist has no types
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]  # xdist has no types


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start several processes go first: they are the longest, and all with one worker."""
    items.sort(key=lambda item: item.get_closest_marker("processes") is None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """A file stays with one worker, for its fixtures; files whose tests start several processes stay with the same one.

    Two of those at once would crowd the cores, and their bounds on waiting would be met by chance. Marks such as
    `xdist_group` say the same, but xdist 3.8 cannot read them with pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "processes" if _starts_processes(config.rootpath / file) else file

    return ByFile(config, log)


@functools.cache
def _starts_processes(file: Path) -> bool:
    return "mark.processes" in file.read_text(encoding="utf-8")
