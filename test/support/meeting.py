"""Exchanges among ranks of one process, which are driven one after the other: the last one to come serves all.

`PageExchanger` does the reckoning. Only the meeting is another one: where ranks in processes of their own would wait
for each other, a rank leaves its part here, and the pages move when all have come to the same layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from typing_extensions import override

from sglang.srt.mem_cache.hicache.copies.exchange import PageExchanger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang.srt.managers.cache_controller import LayerLoadingEvent
    from sglang.srt.mem_cache.memory_pool import KVCache

    Rounds = Sequence[tuple[torch.Tensor, torch.Tensor]]


@dataclass(slots=True)
class Meeting:
    """Where the exchanges of `ranks` ranks meet. `waiting` are those that not all ranks have come to yet."""

    ranks: int
    waiting: list[dict[int, tuple[list[torch.Tensor], Rounds]]] = field(default_factory=list)

    def come(self, rank: int, pages: list[torch.Tensor], rounds: Rounds) -> None:
        """`rank` has come to its next layer, whose buffers by page are `pages`."""
        for parts in self.waiting:
            if rank not in parts:
                break
        else:
            parts = {}
            self.waiting.append(parts)
        parts[rank] = (pages, rounds)
        if len(parts) == self.ranks:
            self.waiting.remove(parts)
            self._move([parts[number] for number in range(self.ranks)])

    def _move(self, parts: list[tuple[list[torch.Tensor], Rounds]]) -> None:
        for rounds in zip(*(rounds for _, rounds in parts), strict=True):
            for kind in range(len(parts[0][0])):
                given = torch.cat([pages[kind][own] for (pages, _), (own, _) in zip(parts, rounds, strict=True)])
                for (pages, _), (_, theirs) in zip(parts, rounds, strict=True):
                    pages[kind].index_copy_(0, theirs, given)


@dataclass(frozen=True, slots=True)
class Seat:
    """One rank's `PeerGather`, for the warm-up: alone it hears itself."""

    rank: int
    ranks: int

    def gather(self, sent: torch.Tensor, received: torch.Tensor) -> None:
        """See `PeerGather`."""
        received.copy_(sent.expand_as(received))


class MeetingExchanger(PageExchanger):
    """The exchanger of one rank of a `Meeting`."""

    def __init__(self, device_pool: KVCache, meeting: Meeting, rank: int) -> None:
        super().__init__(device_pool, Seat(rank, meeting.ranks), staging_bytes=1)
        self._meeting = meeting
        self._rank = rank

    @override
    def give_layer(self, layer: int, rounds: Rounds, copied: torch.Event, done: LayerLoadingEvent) -> None:
        """Leave it to the meeting."""
        self._meeting.come(self._rank, self._layers[layer], rounds)
        done.complete(layer)
