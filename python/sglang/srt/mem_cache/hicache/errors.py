"""Errors of the serving side that a caller may want to tell apart. Imports nothing, so that commands can read it."""

from __future__ import annotations


class LostPeerError(RuntimeError):
    """Another rank did not come to a collective within the bound, or has gone.

    What the collective was to decide is left undone. Its connections are closed, so that the ranks in it cannot go on
    without each other: their next collective of that group fails too.
    """
