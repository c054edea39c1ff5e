"""One fork server for all tests that start processes: SGLang is imported once, for replays and for gloo ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from kvlayouts.ranks.processes import forking_context

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext

_MODULES = ["support.gloo.scenarios"]


def forking_context_for_tests() -> ForkServerContext:
    """The context of a fork server that has imported what any test's processes need; started on the first call.

    It must come before the first replay of the session, which would start the server for itself.
    """
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), before)))
    try:
        return forking_context(*_MODULES)
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
