"""What the serving side looks like, for a layout strategy to agree with before anything is allocated."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from sglang.srt.mem_cache.layouts.config import LayoutEnvironment

from .device.kinds import pool_kind

if TYPE_CHECKING:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

    from .settings import HiCacheSettings, ShardGroup
    from .slots.allocator import SlotAllocator


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
        group_size=group.size,
        group_rank=group.rank,
        storage_backend=settings.storage_backend,
    )


def agreement_groups(params: CacheInitParams) -> list[dist.ProcessGroup]:
    """The groups whose ranks share a tree: attention-CP and attention-TP if they have peers, else all of TP.

    Groups of one rank are left out; without any peer the list is empty.
    """
    attention = [group for group in (params.attn_cp_cache_group, params.attn_tp_cache_group) if _has_peers(group)]
    groups = attention or [params.tp_cache_group]
    return [group for group in groups if group is not None and _has_peers(group)]


def _has_peers(group: dist.ProcessGroup | None) -> bool:
    return group is not None and dist.get_world_size(group) > 1
