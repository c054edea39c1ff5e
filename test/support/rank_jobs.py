"""Small jobs for `run_job`, importable in the ranks' processes."""

from __future__ import annotations

import logging
import os
import threading
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlayouts.ranks.messages import Finished, Progress

if TYPE_CHECKING:
    from kvlayouts.ranks.job import RankOrder
    from kvlayouts.ranks.outbox import Outbox


@dataclass(frozen=True, kw_only=True, slots=True)
class Waits:
    """Says that it runs, and then waits until its process is ended."""

    def run(self, order: RankOrder, outbox: Outbox) -> None:
        """The work of one rank."""
        outbox.send(Progress(label="waits", done=1))
        threading.Event().wait()


@dataclass(frozen=True, kw_only=True, slots=True)
class Vanishes:
    """The process of rank 1 ends, as one does that a library ends; rank 0 waits."""

    def run(self, order: RankOrder, outbox: Outbox) -> None:
        """The work of one rank."""
        if order.rank == 1:
            os._exit(7)
        threading.Event().wait()


@dataclass(frozen=True, kw_only=True, slots=True)
class Warns:
    """Says the same things several times, and is done."""

    def run(self, order: RankOrder, outbox: Outbox) -> None:
        """The work of one rank."""
        for number in range(3):
            logging.getLogger(__name__).warning("room is\nshort: %d", number)
            warnings.warn("too warm", RuntimeWarning, stacklevel=1)
            warnings.warn("too cold", RuntimeWarning, stacklevel=1)
            logging.getLogger(__name__).info("not worth a word")
        outbox.send(Finished(label="warns", seconds=0.0, report=order.rank))
