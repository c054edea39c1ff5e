"""What the serving side looks like, for a layout strategy to agree with before anything is allocated."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from sglang.srt.mem_cache.layouts.config import LayoutEnvironment
from sglang.srt.mem_cache.layouts.facts import HostLanes, host_lanes
from sglang.srt.mem_cache.layouts.owner_check import refuse_shared_host_lanes, refuse_shared_lanes

from .device.kinds import layers_differ, pool_kind
from .waits import LANES, BoundedReduction

if TYPE_CHECKING:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

    from sglang.srt.mem_cache.layouts.protocol import AnyKVLayoutStrategy

    from .settings import HiCacheSettings, ShardGroup
    from .slots.allocator import SlotAllocator


_NO_LANE = -1


def observe_environment(
    params: CacheInitParams, slots: SlotAllocator, settings: HiCacheSettings, group: ShardGroup
) -> LayoutEnvironment:
    """Pool, page size, allocator, group and storage backend as they really are."""
    device_pool = params.token_to_kv_pool_allocator.get_kvcache()
    return LayoutEnvironment(
        pool_kind=pool_kind(device_pool),
        pool_class=type(device_pool).__name__,
        page_size=params.page_size,
        allocator_lanes=slots.lane_count,
        group_kind=group.kind,
        shard_size=group.size,
        shard_rank=group.rank,
        storage_backend=settings.storage_backend,
        layers_differ=layers_differ(device_pool),
    )


def refuse_lanes_that_ranks_share(
    layout: AnyKVLayoutStrategy, group: dist.ProcessGroup, *, peer_seconds: float | None
) -> None:
    """Raise `LayoutConfigError`, on every rank of the shard group, unless each has a lane of its own or all have one.

    So for each tier.

    The parent has asked the strategy for all ranks; this compares what the ranks' own processes were given. Waits for
    them for `peer_seconds` at most (see `waits`).
    """
    host = host_lanes(layout)
    found = torch.zeros(dist.get_world_size(group), 4, dtype=torch.int64)
    own = _NO_LANE if host.own is None else host.own
    found[dist.get_rank(group)] = torch.tensor([layout.lane_count, layout.lane, host.count, own])
    BoundedReduction(group, op=dist.ReduceOp.SUM, meeting=LANES, seconds=peer_seconds)(found)
    refuse_shared_lanes(layout.name, [(lanes, lane) for lanes, lane, _, _ in found.tolist()])
    by_rank = [HostLanes(count=lanes, own=None if own == _NO_LANE else own) for _, _, lanes, own in found.tolist()]
    refuse_shared_host_lanes(layout.name, by_rank)


def agreement_groups(params: CacheInitParams) -> list[dist.ProcessGroup]:
    """The groups whose ranks share a tree: attention-CP and attention-TP if they have peers, else all of TP.

    Groups of one rank are left out; without any peer the list is empty.
    """
    attention = [group for group in (params.attn_cp_cache_group, params.attn_tp_cache_group) if _has_peers(group)]
    groups = attention or [params.tp_cache_group]
    return [group for group in groups if group is not None and _has_peers(group)]


def _has_peers(group: dist.ProcessGroup | None) -> bool:
    return group is not None and dist.get_world_size(group) > 1
