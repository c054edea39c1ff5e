"""Ranks of one GPU give each other pages through shared device memory: NCCL puts no two ranks on one GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import reduce_tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

_MOST_BYTES = 96 << 20


class IpcGather:
    """A `PeerGather` whose threads wait for each other's calls and never for the device.

    Every rank of `group`, a gloo group, makes one. Takes 96 MiB of the device: no rank may send more.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.ranks, self._group = dist.get_rank(group), dist.get_world_size(group), group
        own = torch.empty(_MOST_BYTES, dtype=torch.uint8, device="cuda")
        make_event: Any = torch.cuda.Event  # torch leaves it untyped
        events = [make_event(interprocess=True) for _ in range(2)]
        for event in events:
            event.record()
        torch.cuda.synchronize()
        offers: list[Any] = [None] * self.ranks
        share: Any = reduce_tensor  # ditto
        dist.all_gather_object(offers, (share(own), [event.ipc_handle() for event in events]), group=group)
        device = torch.device("cuda", torch.cuda.current_device())
        self._sent: list[torch.Tensor] = []
        self._written: list[Any] = []
        self._read: list[Any] = []
        for number, ((rebuild, arguments), handles) in enumerate(offers):
            mine = number == self.rank
            written, read = events if mine else [make_event.from_ipc_handle(device, handle) for handle in handles]
            self._sent.append(own if mine else rebuild(*arguments))
            self._written.append(written)
            self._read.append(read)

    def gather(self, sent: torch.Tensor, received: torch.Tensor) -> None:
        """See `PeerGather.gather`. An event says nothing before it is recorded, so threads meet before each wait."""
        stream = torch.cuda.current_stream()
        given = sent.reshape(-1).view(torch.uint8)
        self._meet(self._read)  # nobody still reads what this rank sent last
        self._sent[self.rank][: len(given)].copy_(given, non_blocking=True)
        self._written[self.rank].record(stream)
        self._meet(self._written)
        for number in range(self.ranks):
            taken = self._sent[number][: len(given)]
            received[number].reshape(-1).view(torch.uint8).copy_(taken, non_blocking=True)
        self._read[self.rank].record(stream)

    def _meet(self, events: Sequence[Any]) -> None:
        dist.barrier(self._group)
        for event in events:
            event.wait(torch.cuda.current_stream())
