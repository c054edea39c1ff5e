"""How a command ends badly: by the user's mistake, or by a run that failed."""

from __future__ import annotations


class InputError(ValueError):
    """Bad input. The message is one line that names the flag or the trace line, the value and what is accepted."""


class RunError(RuntimeError):
    """A run that failed, or whose numbers contradict each other. The message is one line."""


class RankError(RunError):
    """Ranks that failed, died or stopped answering. The message names the rank."""
