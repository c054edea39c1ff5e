"""Two ranks of which one does not come where the other one waits, each in its own process.

The late rank comes once the other one has given up, which it is told over another group: nothing here sleeps.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from sglang.srt.mem_cache.hicache.agreement import RankAgreement
from sglang.srt.mem_cache.hicache.device.page_reader import group_sum
from sglang.srt.mem_cache.hicache.errors import LostPeerError
from support.caches import Rank, chain
from support.gloo.scenarios import evict_all, insert

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.caches import CacheSpec
    from support.gloo.ranks import World

GROUP_SECONDS = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The error of a rank, how long it waited, and how many acks are left in its cache."""

    text: str
    seconds: float
    acks: int = 0


def check_events_alone(world: World, spec: CacheSpec, *, seconds: float | None, group_seconds: float) -> Loss:
    """Rank 1 is late for `check_hicache_events`, with a finished backup on both ranks."""
    rank = Rank(spec, world.number, None, tp_group=_fresh_group(group_seconds), peer_seconds=seconds)
    insert(rank, chain(spec, 1))
    loss = _late(world, rank.cache.check_hicache_events)
    return Loss(text=loss.text, seconds=loss.seconds, acks=len(rank.controller.ack_write_queue))


def construct_alone(world: World, spec: CacheSpec, *, seconds: float) -> Loss:
    """Rank 1 is late to construct its cache."""
    group = _fresh_group()
    return _late(world, lambda: Rank(spec, world.number, None, tp_group=group, peer_seconds=seconds))


def gather_alone(world: World, *, seconds: float) -> Loss:
    """Rank 1 is late for a gather of pages."""
    reduce = group_sum(_fresh_group(), peer_seconds=seconds)
    return _late(world, lambda: reduce(torch.zeros(8, dtype=torch.int32)))


def exchange_alone(world: World, spec: CacheSpec, *, seconds: float) -> Loss:
    """Rank 1 fails, or is late, to start a load whose pages the ranks exchange."""
    rank = Rank(spec, world.number, None, tp_group=_fresh_group(), peer_seconds=seconds)
    tokens = chain(spec, 1, 2, 3, 4)
    insert(rank, tokens)
    rank.cache.check_hicache_events()
    evict_all(rank)
    rank.cache.bring_back(rank.cache.match(rank.key(tokens)).host_node)
    return _late(world, rank.cache.ready_to_load_host_cache)


def follow_alone(world: World, *, late_stage: int, seconds: float) -> Loss:
    """The first pipeline stage is late with its decision, or the second to take it."""
    agreement = RankAgreement([], pp_group=_fresh_group(), pp_rank=world.number, pp_size=2, peer_seconds=seconds)
    return _late(world, lambda: [agreement.minimum([5]) for _ in range(2)], late=late_stage)  # a send ends a turn later


def _fresh_group(seconds: float = GROUP_SECONDS) -> dist.ProcessGroup:
    """A group that may be broken."""
    group: dist.ProcessGroup = dist.new_group(
        [0, 1], timeout=timedelta(seconds=seconds), use_local_synchronization=True
    )
    return group


def _late(world: World, call: Callable[[], object], *, late: int = 1) -> Loss:
    """`call` on one rank, and then on the `late` one; both fail."""
    if world.number == late:
        dist.barrier(group=world.group)
    started = time.monotonic()
    try:
        call()
    except LostPeerError as error:
        return Loss(text=str(error), seconds=time.monotonic() - started)
    finally:
        if world.number != late:
            dist.barrier(group=world.group)
    raise AssertionError("the rank goes on although the other one has given up")
