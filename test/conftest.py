"""Which tests run beside each other when pytest has several workers (`make unit`)."""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start several processes go first, all with one worker: two of them at once would crowd the cores.

    The other ones stay together by file, whose fixtures are then made once.
    """
    items.sort(key=lambda item: item.get_closest_marker("processes") is None)
    for item in items:
        group = "processes" if item.get_closest_marker("processes") else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
