"""How ranks give each other pages: one meeting, to which each brings as many bytes and gets what all have brought.

Each way has a process group of its own, so that no operation of the forward pass can come between::

    gloo   tensors in host memory, those of a device through it    the calling thread waits
    NCCL   tensors on devices                                      submitted to the current stream; nobody waits

A group is made by its members alone, at the same point of their start.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from ..waits import EXCHANGE, named_wait

if TYPE_CHECKING:
    from collections.abc import Sequence


class PeerGather(Protocol):
    """Gathers what the ranks of a shard group have. `rank` is this one's number in it."""

    rank: int
    ranks: int

    def gather(self, sent: torch.Tensor, received: torch.Tensor) -> None:
        """`received`, shape ``[ranks, *shape of sent]``, is what each rank has `sent`; contiguous, of one device.

        After what the current stream was given, and done for what it is given afterwards. Every rank calls it in the
        same order with the same shapes.
        """
        ...


class GlooGather:
    """Over gloo. `LostPeerError` if a rank is gone or does not come within `seconds`; None is the group's time-out."""

    def __init__(self, group: dist.ProcessGroup, *, seconds: float | None) -> None:
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)
        self._group = group
        self._seconds = seconds
        self._options = dist.AllgatherOptions()
        if seconds is not None:
            self._options.timeout = timedelta(seconds=seconds)

    def gather(self, sent: torch.Tensor, received: torch.Tensor) -> None:
        """See `PeerGather.gather`. Waits for the current stream where the tensors are a device's."""
        ours = sent.cpu()
        theirs = received if received.device.type == "cpu" else torch.empty_like(received, device="cpu")
        with named_wait(self._group, EXCHANGE, seconds=self._seconds):
            self._group.allgather([list(theirs.unbind())], [ours], self._options).wait()
        if theirs is not received:
            received.copy_(theirs)


class NcclGather:
    """Over NCCL. A rank that does not come holds the stream up, not the thread: the watchdogs look after that."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)
        self._group = group

    def gather(self, sent: torch.Tensor, received: torch.Tensor) -> None:
        """See `PeerGather.gather`."""
        dist.all_gather_into_tensor(received, sent.unsqueeze(0), group=self._group)


def gather_among(ranks: Sequence[int], *, backend: str, seconds: float | None) -> PeerGather:
    """A gather over a new process group of `ranks`, global numbers; each of them calls this, and nobody else.

    `backend` is ``gloo``, or ``nccl`` where each rank has a device of its own. A rank waits for another one for
    `seconds` at most, where its thread waits at all.
    """
    timeout = None if seconds is None else timedelta(seconds=seconds)
    group = dist.new_group(list(ranks), backend=backend, timeout=timeout, use_local_synchronization=True)
    return NcclGather(group) if backend == dist.Backend.NCCL else GlooGather(group, seconds=seconds)
