"""What the ranks of `test_ranks_over_gloo` do: each function runs in every rank's process at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist

from sglang.srt.mem_cache.hicache.agreement import RankAgreement
from sglang.srt.mem_cache.hicache.check.digest import tree_digest
from sglang.srt.mem_cache.hicache.device.pools import bytes_of as device_bytes_of
from sglang.srt.mem_cache.hicache.environment import agreement_groups, refuse_lanes_that_ranks_share
from sglang.srt.mem_cache.hicache.host.pools import host_bytes_of
from sglang.srt.mem_cache.hicache.tree.calls import Insertion
from sglang.srt.mem_cache.layouts import CpSharedLayout, LayoutConfigError
from support.caches import Rank, chain, make_allocator, make_device_pool, make_layout, make_params, page_views
from support.gloo.traffic import RankTraffic, TrafficReport
from support.groups import chain_lanes, pages_of

if TYPE_CHECKING:
    from array import array

    from support.caches import CacheSpec
    from support.gloo.ranks import World


def make_rank(world: World, spec: CacheSpec, *, grid: bool = False) -> Rank:
    """This rank's cache. In a `grid`, pages are dealt along a row, and the columns hold the same."""
    number = world.number % spec.ranks
    pool = make_device_pool(spec)
    groups = {"attn_cp_cache_group": world.row, "attn_tp_cache_group": world.column} if grid else {}
    params = make_params(
        spec, make_allocator(spec, make_layout(spec, number), pool), **(groups or {"tp_cache_group": world.group})
    )
    return Rank(spec, number, RankAgreement(agreement_groups(params)))


def random_traffic(world: World, spec: CacheSpec, *, steps: int, seed: int, grid: bool = False) -> TrafficReport:
    """`steps` random operations, then an end to everything that is under way."""
    traffic = RankTraffic(rank=make_rank(world, spec, grid=grid), world=world, seed=seed)
    for step in range(steps):
        try:
            traffic.step(step)
        except Exception as error:
            error.add_note(f"in step {step} of seed {seed} of {spec}: {traffic.operations}")
            raise
    traffic.drain()
    return traffic.report()


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What one rank holds after some chains were cached on both tiers, in bytes and pages."""

    device_pool_bytes: int
    host_pool_bytes: int
    page_bytes: int
    device_pages_written: int
    host_pages_used: int
    backed_up_bytes: int
    logical_tokens: int
    capacity_tokens: int


def footprint(world: World, spec: CacheSpec, *, chains: int, pages: int) -> Footprint:
    """Cache `chains` chains of `pages` pages each, and look at what that took."""
    rank = make_rank(world, spec)
    for number in range(chains):
        serve(rank, chain(spec, *range(number * 100, number * 100 + pages)))
    cache = rank.cache
    views = page_views(rank.device_pool)
    return Footprint(
        device_pool_bytes=device_bytes_of(rank.device_pool),
        host_pool_bytes=host_bytes_of(cache.token_to_kv_pool_host),
        page_bytes=sum(view.shape[1] for view in views),
        device_pages_written=int(np.count_nonzero(np.any([view.any(axis=1) for view in views], axis=0))),
        host_pages_used=rank.controller.ledger.capacity_pages - rank.host_free_pages(),
        backed_up_bytes=cache.stats.backed_up_bytes,
        logical_tokens=cache.total_size(),
        capacity_tokens=rank.allocator.size,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTrip:
    """One rank's account of chains that left the device and came back."""

    loaded_tokens: int
    wrong_pages: int
    verified_pages: int
    loaded_bytes: int
    digest: int


def round_trip(world: World, spec: CacheSpec, *, chains: int, pages: int) -> RoundTrip:
    """Cache chains, evict all, overwrite the device pool, load back every chain and compare."""
    rank = make_rank(world, spec)
    prompts = [chain(spec, *range(number * 100, number * 100 + pages)) for number in range(chains)]
    for tokens in prompts:
        serve(rank, tokens)
    evict_all(rank)
    wrong = verified = 0
    for tokens in prompts:
        found = load_back(rank, tokens)
        wrong += rank.mismatches(tokens, found)
        verified += sum(1 for _ in rank.rows(found))
        rank.cache.check_hicache_events()
    stats = rank.cache.stats
    return RoundTrip(
        loaded_tokens=stats.loaded_tokens,
        wrong_pages=wrong,
        verified_pages=verified,
        loaded_bytes=stats.loaded_bytes,
        digest=tree_digest(rank.cache),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AckCount:
    """One rank's acks: `(node ids, logical tokens, own bytes)` of each, in order; reductions of each check."""

    writes: list[tuple[tuple[int, ...], int, int]]
    loads: list[tuple[tuple[int, ...], int, int]]
    collectives: list[int]
    settled: tuple[int, int]


def one_page_nodes(world: World, spec: CacheSpec, *, nodes: int) -> AckCount:
    """Back up and load back nodes of one page: all ranks but one own nothing of each."""
    rank = make_rank(world, spec)
    queues = rank.controller.ack_write_queue, rank.controller.ack_load_queue
    collectives: list[int] = []
    acks: tuple[list[Any], list[Any]] = ([], [])
    for number in range(nodes):
        insert(rank, chain(spec, number * 100))
        acks[0].extend(_noted(queues[0]))
        collectives.append(_counted_check(world, rank))
    evict_all(rank)
    for number in range(nodes):
        load_back(rank, chain(spec, number * 100))
        acks[1].extend(_noted(queues[1]))
        collectives.append(_counted_check(world, rank))
    collectives.append(_counted_check(world, rank))  # with nothing pending
    return AckCount(
        writes=acks[0],
        loads=acks[1],
        collectives=collectives,
        settled=(rank.cache.stats.backups, rank.cache.stats.loads),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """How many backups this rank could see the end of, and had settled, after each turn."""

    ready: list[int]
    settled: list[int]
    collectives: list[int]


def lagging_ranks(world: World, spec: CacheSpec, *, nodes: int) -> Lag:
    """Backups whose copies end on rank r in its r-th turn from now; every rank must wait for the last."""
    rank = make_rank(world, spec)
    rank.engine.held = True
    for number in range(nodes):
        insert(rank, chain(spec, number * 100))
    ready, settled, collectives = [], [], []
    for turn in range(world.size):
        if turn == world.number:
            rank.engine.finish_writes()
        ready.append(sum(ack.finish_event.query() for ack in rank.controller.ack_write_queue))
        collectives.append(_counted_check(world, rank))
        settled.append(rank.cache.stats.backups)
    return Lag(ready=ready, settled=settled, collectives=collectives)


# What a scheduler does, one request at a time.


def two_stages(world: World, *, capacities: list[int], ready: list[int]) -> tuple[int, tuple[int, ...]]:
    """Two pipeline stages of two ranks, the rows of the grid; what they agree on as capacity and as ready counts."""
    assert world.row is not None
    agreement = RankAgreement([world.row], pp_group=world.column, pp_rank=world.number // 2, pp_size=2)
    capacity = agreement.capacity(capacities[world.number])
    agreement.minimum([0])  # the sends of one turn are waited for in the next
    agreed = agreement.minimum([ready[world.number], 5])
    dist.barrier(group=world.group)  # the last send lives as long as the agreement
    return capacity, agreed


def lanes_that_ranks_share(world: World, *, lanes: list[int], counts: list[int]) -> str:
    """What each rank is told at start, where rank i stores lane ``lanes[i]`` of ``counts[i]``."""
    layout = CpSharedLayout(page_size=4, shard_size=counts[world.number], shard_rank=lanes[world.number])
    try:
        refuse_lanes_that_ranks_share(layout, world.group, peer_seconds=60)
    except LayoutConfigError as error:
        return str(error)
    return ""


def serve(rank: Rank, tokens: array[int]) -> None:
    """Insert a chain whose KV is written, and settle."""
    insert(rank, tokens)
    rank.cache.check_hicache_events()


def insert(rank: Rank, tokens: array[int]) -> None:
    """Allocate a chain that is not cached, write its KV and give it to the tree."""
    lanes = chain_lanes(rank, tokens, None, 0, len(tokens) // rank.spec.page_size)
    pages = rank.cache.alloc_slots(lanes)
    assert pages is not None, "no room for the chain"
    rank.write(tokens, pages)
    rank.cache.put(Insertion(key=rank.key(tokens), value=rank.cache.slots.slots(pages)))
    rank.cache.parts.transfers.submit_backups()


def load_back(rank: Rank, tokens: array[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Bring a chain back that only the host has, and wait for it; its slot pages."""
    match = rank.cache.match(rank.key(tokens))
    assert (len(match.slots), match.host_tokens) == (0, len(tokens)), "the chain is not on the host alone"
    slots, _ = rank.cache.bring_back(match.host_node)
    rank.cache.ready_to_load_host_cache()
    rank.engine.run_loads()
    return pages_of(slots, rank.spec.page_size)


def evict_all(rank: Rank) -> None:
    """Everything leaves the device, whatever the demand, and other bytes take its place."""
    rank.cache.parts.device_room.evict_until(lambda _, __: False)
    assert rank.cache.total_size() == 0
    rank.scribble()


def _noted(queue: list[Any]) -> list[tuple[tuple[int, ...], int, int]]:
    return [(tuple(ack.node_ids), ack.num_tokens, ack.num_bytes) for ack in queue]


def _counted_check(world: World, rank: Rank) -> int:
    before = world.collectives()
    rank.cache.check_hicache_events()
    return world.collectives()[0] - before[0]
