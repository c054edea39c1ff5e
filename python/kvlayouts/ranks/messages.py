"""What a rank's process tells the process that started it. Imports no SGLang class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far the part called `label` is, in units of the job."""

    label: str
    done: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Logged:
    """A warning or worse that the rank would have written to stderr; `origin` is where in the code it comes from."""

    origin: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """The part called `label` was done in `seconds` of wall time; `report` is the job's own record."""

    label: str
    seconds: float
    report: Any  # one type a job; the job's driver knows it


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """The rank gave up: one line, and the traceback. If it waited for its peers in vain, `waiting_in` says where."""

    error: str
    details: str
    waiting_in: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Alive:
    """The rank's process runs, whatever its work is doing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """The rank has done its part and is about to end."""


Message: TypeAlias = Progress | Alive | Logged | Finished | Failed | Done
