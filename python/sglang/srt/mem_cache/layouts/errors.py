"""The two errors of the layout layer: the user's mistakes and our own."""

from __future__ import annotations


class LayoutConfigError(ValueError):
    """A setting is impossible or does not go together with another one.

    The message is one line that names the setting, the value seen and the values accepted.
    Raised before anything is allocated or changed.
    """


class LayoutInvariantError(RuntimeError):
    """Two records that must agree do not: ledger and pool, metadata and node, pattern and slots.

    The message holds both numbers. It is a bug in this package or in a strategy, never a
    condition to recover from: the state that it was found in is left as it is for inspection.
    """
