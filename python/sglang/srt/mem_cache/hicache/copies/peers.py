"""How ranks give each other pages: one meeting, to which each brings as many bytes and gets what all have brought.

Each way has a process group of its own, so that no operation of the forward pass can come between::

    gloo   tensors in host memory, those of a device through it    the calling thread waits
    NCCL   tensors on devices                                      submitted to the current stream; nobody waits

Ways are made by their ranks alone, at the same point of their start.
"""

from __future__ import annotations

from datetime import timedelta
from typing import ClassVar, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, PrefixStore, ProcessGroupGloo
from torch.distributed.distributed_c10d import _get_default_store

from ..waits import EXCHANGE, BoundedReduction, named_wait


class PeerGather(Protocol):
    """Gathers what the ranks of a shard group have."""

    @property
    def rank(self) -> int:
        """This rank's number in its shard group."""
        ...

    @property
    def ranks(self) -> int:
        """Ranks of the shard group."""
        ...

    def gather(self, sent: torch.Tensor, received: torch.Tensor) -> None:
        """`received`, shape ``[ranks, *shape of sent]``, is what each rank has `sent`; contiguous, of one device.

        After what the current stream was given, and done for what it is given afterwards. Every rank calls it in the
        same order with the same shapes.
        """
        ...


class GlooGather:
    """Over gloo, among the ranks of `group` but on connections of its own.

    `LostPeerError` if a rank is gone or does not come within `seconds`; None means the time-out of `group`. So does
    the constructor, which every rank of `group` calls.
    """

    _made: ClassVar[int] = 0  # in this process

    def __init__(self, group: dist.ProcessGroup, *, seconds: float | None) -> None:
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)
        self._group = group
        self._seconds = seconds
        timeout = _timeout_of(group) if seconds is None else timedelta(seconds=seconds)
        self._options = AllgatherOptions()
        self._options.timeout = timeout
        # torch names a new group by how many a process has, which may differ between its ranks.
        store = PrefixStore(f"kv_layout_exchange/{self._agreed_number()}", _get_default_store())
        with named_wait(group, EXCHANGE, seconds=seconds):
            self._own = ProcessGroupGloo(store, self.rank, self.ranks, timeout)

    def _agreed_number(self) -> str:
        """A name that no earlier gather of any of these ranks has, the same on all of them."""
        number = torch.tensor([GlooGather._made])
        BoundedReduction(self._group, op=dist.ReduceOp.MAX, meeting=EXCHANGE, seconds=self._seconds)(number)
        GlooGather._made = int(number) + 1
        return f"{dist.get_process_group_ranks(self._group)}/{int(number)}"

    def gather(self, sent: torch.Tensor, received: torch.Tensor) -> None:
        """See `PeerGather.gather`. Waits for the current stream where the tensors are a device's."""
        ours = sent.cpu()
        theirs = received if received.device.type == "cpu" else torch.empty_like(received, device="cpu")
        with named_wait(self._group, EXCHANGE, seconds=self._seconds):
            self._own.allgather([list(theirs.unbind())], [ours], self._options).wait()  # type: ignore[attr-defined]  # in no stub
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
    """A gather among the ranks of `group`, a gloo group; each of them calls this, and nobody else.

    `backend` is ``gloo``, or ``nccl`` where each rank has a device of its own. A rank whose thread waits for another
    one does so for `seconds` at most; None means the time-out of `group`.
    """
    if backend == dist.Backend.NCCL:
        ranks = dist.get_process_group_ranks(group)
        return NcclGather(dist.new_group(ranks, backend=backend, use_local_synchronization=True))
    return GlooGather(group, seconds=seconds)


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    timeout: timedelta = group._get_backend(torch.device("cpu")).options._timeout  # noqa: SLF001  # torch tells nobody else
    return timeout
