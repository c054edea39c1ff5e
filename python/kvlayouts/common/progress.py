"""How far a run is, on stderr: a bar on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from collections.abc import Iterator

PLAIN_LINES: Final = 4
"""Lines per layout where stderr is no terminal."""


class OnProgress(Protocol):
    """Called with a layout's name, the requests it has done and the requests in all."""

    def __call__(self, layout: str, done: int, total: int, /) -> None: ...


@contextmanager
def progress_on_stderr(*, unit: str = "requests") -> Iterator[OnProgress]:
    """`show_progress` on standard error."""
    with show_progress(Console(stderr=True, force_terminal=sys.stderr.isatty()), unit=unit) as on_progress:
        yield on_progress


@contextmanager
def show_progress(console: Console, *, unit: str = "requests") -> Iterator[OnProgress]:
    """A callback that shows progress, counted in `unit`, on `console` while the context is open."""
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console) as bar:
            yield _Bars(bar)
    else:
        yield _PlainLines(console, unit)


class _Bars:
    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, layout: str, done: int, total: int, /) -> None:
        if layout not in self._tasks:
            for earlier in self._tasks.values():
                self._bar.stop_task(earlier)
            self._tasks[layout] = self._bar.add_task(layout, total=total)
        self._bar.update(self._tasks[layout], completed=done, total=total)


class _PlainLines:
    def __init__(self, console: Console, unit: str) -> None:
        self._console = console
        self._unit = unit
        self._shown: dict[str, int] = {}

    def __call__(self, layout: str, done: int, total: int, /) -> None:
        quarter = PLAIN_LINES * done // total if total else 0
        if quarter > self._shown.get(layout, 0):
            self._shown[layout] = quarter
            self._console.print(f"{layout}: {done:,} of {total:,} {self._unit}", highlight=False, markup=False)
