"""How ranks give each other pages: one meeting, to which each brings as many bytes and gets what all have brought.

Each way has a process group of its own, so that no operation of the forward pass can come between::

    gloo   tensors in host memory, those of a device through it    the calling thread waits
    NCCL   tensors on devices                                      submitted to the current stream; nobody waits

A group is made by its members alone, at the same point of their start.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions

from ..waits import EXCHANGE, named_wait


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
        self._options = AllgatherOptions()
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


def gather_beside(group: dist.ProcessGroup, *, backend: str, seconds: float | None) -> PeerGather:
    """A gather over a new process group of the ranks of `group`; each of them calls this, and nobody else.

    `backend` is ``gloo``, or ``nccl`` where each rank has a device of its own. A rank whose thread waits for another
    one does so for `seconds` at most; None means the time-out of `group`.
    """
    own = dist.new_group(
        dist.get_process_group_ranks(group),
        backend=backend,
        timeout=_timeout_of(group) if seconds is None else timedelta(seconds=seconds),
        use_local_synchronization=True,
    )
    return NcclGather(own) if backend == dist.Backend.NCCL else GlooGather(own, seconds=seconds)


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    timeout: timedelta = group._get_backend(torch.device("cpu")).options._timeout  # type: ignore[attr-defined]  # noqa: SLF001  # torch has no other way, nor a stub
    return timeout
