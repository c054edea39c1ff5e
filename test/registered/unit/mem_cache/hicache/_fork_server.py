"""One fork server for all tests that start processes: SGLang is imported once, for replays and for gloo ranks."""

from __future__ import annotations

import multiprocessing as mp
import os
from pathlib import Path
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.hicache.cli.replay.driver import PRELOAD_MODULE, start_fork_server

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext

_OWN_MODULES = ["_gloo_traffic", "_gloo_scenarios"]


def forking_context() -> ForkServerContext:
    """The context of a fork server that has imported what any test's processes need."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([PRELOAD_MODULE, *_OWN_MODULES])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parent), before)))
    try:
        start_fork_server()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return context
