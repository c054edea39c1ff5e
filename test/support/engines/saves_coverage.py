"""A plugin for `make coverage`: a scheduler whose cache is flushed writes down which branches it has taken so far.

SGLang ends its schedulers by SIGKILL, which leaves no time for that. Installed as `faulty_gather` is.
"""

from __future__ import annotations

from coverage import Coverage
from sglang.srt.plugins.hook_registry import HookRegistry, HookType


def register() -> None:
    """Save after each flush, in every scheduler that is measured."""
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.flush_cache", save, HookType.AFTER)


def save(flushed: object, *_: object, **__: object) -> object:
    """Write the branches taken so far to a data file of this process's own; returns what the flush did."""
    measuring = Coverage.current()
    if measuring is not None:
        measuring.save()
    return flushed
