"""What ranks are asked to do. Imports no SGLang class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvlayouts.ranks.outbox import Outbox


class Job(Protocol):
    """What every rank is to do; picklable."""

    def run(self, order: RankOrder, outbox: Outbox) -> None:
        """The work of rank ``order.rank``, in its own process. Sends `Progress` and one `Finished` a label."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RankOrder:
    """One rank's part of a job. `rendezvous` is the path of a file that the ranks meet at.

    A rank that waits longer than `peer_seconds` for another one within a collective fails.
    """

    job: Job
    rank: int
    ranks: int
    rendezvous: str
    peer_seconds: float
