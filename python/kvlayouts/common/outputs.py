"""What a command shows and the files that it writes: checked before it runs, written after what it shows."""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from kvlayouts.common.errors import InputError, RunError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from rich.console import Console

SUFFIXES: Final = {"--plot": ".png", "--report": ".html", "--svg": ".svg"}
NEEDED_PACKAGES: Final = {"--plot": "matplotlib", "--report": "jinja2"}
"""What the extra ``cli`` brings; an installation without it has the rest of the commands."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """A file that was asked for with `flag`, and what writes it; no file where `path` is None."""

    flag: str
    path: Path | None
    write: Callable[[Path], object]


def json_output(path: Path | None, value: Callable[[], object]) -> Output:
    """What ``--json`` asks for."""

    def write(path: Path) -> None:
        path.write_text(json.dumps(value(), indent=2, allow_nan=False) + "\n", encoding="utf-8")

    return Output(flag="--json", path=path, write=write)


def deliver(show: Callable[[Console], None], *outputs: Output, plain_width: int | None = None) -> None:
    """Print on standard output, then write the files, also where nobody reads what is printed.

    `plain_width` is that of what goes to a file or a pipe. Raises `RunError` where a file could not be written after
    all; the others are written.
    """
    from rich.console import Console

    terminal = sys.stdout.isatty()
    try:
        show(Console(force_terminal=terminal, width=None if terminal else plain_width))
    finally:
        with ExitStack() as all_of_them:  # each is called, whatever another one raises; the last one first
            for output in reversed(outputs):
                all_of_them.callback(_write, output)


def _write(output: Output) -> None:
    if output.path is None:
        return
    is_new = not output.path.exists()
    try:
        output.write(output.path)
    except BaseException as error:
        if is_new:
            output.path.unlink(missing_ok=True)  # no half of a file
        if isinstance(error, OSError):
            raise RunError(f"{output.flag} {output.path}: cannot be written: {error.strerror or error}") from error
        raise


def check_outputs(outputs: Mapping[str, Path | None], trace: Path | None = None) -> None:
    """Raise `InputError` for an output that could not be written, or would overwrite the trace or its twin."""
    taken = {} if trace is None else {trace.resolve(): "TRACE"}
    for flag, path in outputs.items():
        if path is None:
            continue
        _check_file(flag, path)
        if path.resolve() in taken:
            raise InputError(f"{flag} {path}: is the same file as {taken[path.resolve()]}")
        taken[path.resolve()] = flag
        suffix = SUFFIXES.get(flag, "")
        if not path.name.lower().endswith(suffix):
            raise InputError(f"{flag} {path}: must end with {suffix}")


def _check_file(flag: str, path: Path) -> None:
    try:
        is_directory = path.is_dir()
    except OSError as error:  # no name for a file
        raise InputError(f"{flag} {path}: {error.strerror or error}") from error
    if is_directory:
        raise InputError(f"{flag} {path}: is a directory; must be a file")
    if not path.parent.is_dir():
        raise InputError(f"{flag} {path}: directory {path.parent} does not exist")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InputError(f"{flag} {path}: cannot be written: permission denied")
    needed = NEEDED_PACKAGES.get(flag)
    if needed is not None and find_spec(needed) is None:
        raise InputError(f"{flag} {path}: needs the package {needed}, which is not installed: pip install {needed}")
