"""The one collective of the cache: how many acknowledgements every rank is ready to settle.

Everything else is decided from mirrored state. Transfers finish at different times on different ranks, so
each event loop takes the minimum of the ready counts over the ranks, in exactly one reduction a group,
whether or not anything is pending: a rank that skipped it would desynchronise the others.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from .seam.sglang import PP_SYNC_TAG
from .waits import CAPACITY, EVENTS, STAGES, BoundedReduction, named_wait

if TYPE_CHECKING:
    from collections.abc import Sequence


class Agreement(Protocol):
    """Takes minima over the ranks that share a tree."""

    def minimum(self, values: Sequence[int]) -> tuple[int, ...]:
        """Element-wise minimum of `values` over the ranks; every rank calls it with the same length."""
        ...

    def capacity(self, value: int) -> int:
        """Smallest `value` of all ranks and pipeline stages: what the smallest of them can hold. For start-up."""
        ...


class RankAgreement:
    """Minimum of small integers over the ranks that share a tree.

    `groups` are reduced one after the other. With pipeline parallelism the
    first stage decides and the later ones follow it, as in SGLang: `pp_rank` receives from the stage before.

    A rank waits for another one for `peer_seconds` at most; None means the time-out of the process group. Then, or if
    the other one is gone, both methods raise `LostPeerError`, and no rank in the collective gets an answer.
    """

    def __init__(
        self,
        groups: Sequence[dist.ProcessGroup],
        *,
        pp_group: dist.ProcessGroup | None = None,
        pp_rank: int = 0,
        pp_size: int = 1,
        peer_seconds: float | None = None,
    ) -> None:
        self._groups = list(groups)
        self._peer_seconds = peer_seconds
        self._reductions = [
            BoundedReduction(group, op=dist.ReduceOp.MIN, meeting=EVENTS, seconds=peer_seconds) for group in groups
        ]
        self._pp_group = pp_group if pp_size > 1 else None
        self._pp_rank = pp_rank
        self._pp_size = pp_size
        self._sends: list[dist.Work | None] = []
        self._buffers: dict[int, torch.Tensor] = {}

    def minimum(self, values: Sequence[int]) -> tuple[int, ...]:
        """Element-wise minimum of `values` over the ranks; every rank must call it with the same length."""
        if not self._groups and self._pp_group is None:
            return tuple(values)
        buffer = self._buffers.get(len(values))
        if buffer is None:
            buffer = self._buffers[len(values)] = torch.empty(len(values), dtype=torch.int64)
        numbers = buffer.numpy()  # the same memory: no tensor is made for a reduction
        numbers[:] = values
        if self._pp_rank == 0:
            for reduce in self._reductions:
                reduce(buffer)
        if self._pp_group is not None:
            self._follow_first_stage(buffer, self._pp_group)
        return tuple(numbers.tolist())

    def capacity(self, value: int) -> int:
        """See `Agreement.capacity`. Unlike `minimum`, later pipeline stages have a say."""
        buffer = torch.tensor([value], dtype=torch.int64)
        for group in (*self._groups, *([self._pp_group] if self._pp_group is not None else [])):
            BoundedReduction(group, op=dist.ReduceOp.MIN, meeting=CAPACITY, seconds=self._peer_seconds)(buffer)
        return int(buffer.item())

    def _follow_first_stage(self, buffer: torch.Tensor, group: dist.ProcessGroup) -> None:
        before, after = self._pp_rank - 1, self._pp_rank + 1
        if after < self._pp_size:
            with named_wait(group, STAGES, seconds=self._peer_seconds, peer=after):
                for earlier in self._sends:
                    self._wait(earlier)
            self._sends.clear()
        if before >= 0:
            with named_wait(group, STAGES, seconds=self._peer_seconds, peer=before):
                self._wait(dist.irecv(buffer, group_src=before, group=group, tag=PP_SYNC_TAG))
        if after < self._pp_size:
            with named_wait(group, STAGES, seconds=self._peer_seconds, peer=after):
                self._sends.append(dist.isend(buffer.clone(), group_dst=after, group=group, tag=PP_SYNC_TAG))

    def _wait(self, message: dist.Work | None) -> None:
        """None stands for a message that was not to be sent."""
        if message is None:
            return
        if self._peer_seconds is None:
            message.wait()
        else:
            message.wait(timedelta(seconds=self._peer_seconds))
