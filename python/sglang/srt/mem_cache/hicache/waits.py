"""Waits for other ranks: each has a bound, and its error says who waited where, for whom, and what to look at.

Without them a rank that never comes would hold its peers for the time-out of the process group, two hours for SGLang's
CPU groups, and end in a text of gloo's that names neither a rank nor a place.

The bound is given to gloo with the operation itself. A wait for the operation that ended earlier would leave it under
way: a rank that comes late would find it complete, and go on alone. After gloo's own time-out the connection is closed,
and the late rank gets an error too.
"""

from __future__ import annotations

import re
import time
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from .errors import LostPeerError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where ranks wait for each other: its name, what is left undone if one is missing, and what to look at then."""

    name: str
    undone: str
    look_at: str


EVENTS = Meeting(
    name="check_hicache_events (how many copies have finished on every rank)",
    undone="nothing was settled",
    look_at="for an earlier error in its log, or for a forward pass or a copy that hangs (py-spy dump)",
)
STAGES = Meeting(
    name="check_hicache_events (what the first pipeline stage has decided)",
    undone="nothing was settled",
    look_at="for an earlier error in its log, or for a forward pass or a copy that hangs (py-spy dump)",
)
CAPACITY = Meeting(
    name="the start of the cache (which host pool is the smallest)",
    undone="no cache was made",
    look_at="for an error while it took its host memory, or for memory that is still being pinned",
)
LANES = Meeting(
    name="the start of the allocator (which rank stores which lane)",
    undone="no allocator was made",
    look_at="for an error while it made its KV pool",
)
GATHER = Meeting(
    name="the gather of KV pages for a forward pass",
    undone="the batch has no result",
    look_at="for an earlier error in its log, or for a batch that it was not given (py-spy dump)",
)
EXCHANGE = Meeting(
    name="the exchange of pages that were loaded from the host",
    undone="the load has no result",
    look_at="for an earlier error in its log, or for a load that it has not started (py-spy dump)",
)


class BoundedReduction:
    """Reduces tensors over `group`, in place, by `op`. It waits for `seconds` at most; None means the group's time-out.

    For groups that wait on the CPU, as gloo does. `LostPeerError`, with the tensor's content undefined, if a rank is
    gone or does not come.
    """

    def __init__(
        self, group: dist.ProcessGroup, *, op: dist.ReduceOp.RedOpType, meeting: Meeting, seconds: float | None
    ) -> None:
        self._group = group
        self._meeting = meeting
        self._seconds = seconds
        self._options = dist.AllreduceOptions()
        self._options.reduceOp = dist.ReduceOp(op)
        self._options.asyncOp = False
        if seconds is not None:
            self._options.timeout = timedelta(seconds=seconds)

    def __call__(self, tensor: torch.Tensor) -> None:
        """Every rank of the group calls it with a tensor of the same shape and dtype."""
        with named_wait(self._group, self._meeting, seconds=self._seconds):
            self._group.allreduce([tensor], self._options).wait()


@contextmanager
def named_wait(
    group: dist.ProcessGroup, meeting: Meeting, *, seconds: float | None, peer: int | None = None
) -> Iterator[None]:
    """What goes wrong between the ranks of `group` within the block is a `LostPeerError`.

    `peer` is the rank of the group that this one waits for, if it is known, and `seconds` the bound that the block
    gives to its operations.
    """
    started = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        text = _lost_peer(group, meeting, waited=time.monotonic() - started, seconds=seconds, peer=peer)
        raise LostPeerError(f"{text} The cause: {_first_sentence(error)}") from error


def _lost_peer(
    group: dist.ProcessGroup, meeting: Meeting, *, waited: float, seconds: float | None, peer: int | None
) -> str:
    """Who waited for whom. Ranks are called by their global number."""
    own, ranks = dist.get_rank(), dist.get_process_group_ranks(group)
    peers = _listed([rank for rank in ranks if rank != own] if peer is None else [ranks[peer]], "or")
    bound = "its process group's time-out" if seconds is None else f"{seconds:g} s, --watchdog-timeout"
    return (
        f"rank {own} waited {waited:.1f} s in vain for rank {peers} in {meeting.name}, "
        f"a collective of ranks {_listed(ranks, 'and')} with a bound of {bound}: {meeting.undone}. "
        f"Look at rank {peers} {meeting.look_at}."
    )


def _listed(ranks: Sequence[int], conjunction: str) -> str:
    *most, last = [str(rank) for rank in ranks]
    return f"{', '.join(most)} {conjunction} {last}" if most else last


def _first_sentence(error: RuntimeError) -> str:
    """Without the place in gloo's sources that comes first, and its advice."""
    return re.sub(r"^\[\S+\]\s*", "", " ".join(str(error).split())).split(". ")[0]
