"""One rank's real pools, allocator and tree on the CPU, for the commands that drive them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from sglang.srt.mem_cache.cache_init_params import CacheInitParams

from kvlayouts.ranks.memory import LAYERS
from sglang.srt.mem_cache.hicache.assemble import assemble_cache
from sglang.srt.mem_cache.hicache.device.pools import build_device_pool
from sglang.srt.mem_cache.hicache.settings import ShardGroup
from sglang.srt.mem_cache.hicache.slots.allocator import LaneSlotAllocator
from sglang.srt.mem_cache.layouts import GroupKind, create_layout
from sglang.srt.mem_cache.layouts.facts import page_rows

if TYPE_CHECKING:
    from sglang.srt.mem_cache.memory_pool import KVCache

    from sglang.srt.mem_cache.hicache.device.geometry import Geometry
    from sglang.srt.mem_cache.hicache.radix_cache import HiRadixCache
    from sglang.srt.mem_cache.hicache.settings import HiCacheSettings
    from sglang.srt.mem_cache.layouts import AnyKVLayoutStrategy, LayoutConfig


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankCache:
    """What one rank has. `layout` is the one strategy object of allocator, controller and tree."""

    device_pool: KVCache
    layout: AnyKVLayoutStrategy
    allocator: LaneSlotAllocator
    cache: HiRadixCache[Any]


def build_rank_cache(
    choice: LayoutConfig,
    *,
    geometry: Geometry,
    rank_tokens: int,
    settings: HiCacheSettings,
    eviction_policy: str,
) -> RankCache:
    """Build the cache of rank ``choice.shard_rank`` over the default process group.

    The device pool has `LAYERS` layers and `rank_tokens` rows, whatever the layout. Every rank calls this. Raises
    `LayoutConfigError` for a layout or sizes that do not fit.
    """
    layout = create_layout(choice)
    device_pool = build_device_pool(
        geometry.kind, tokens=rank_tokens, page_size=page_rows(layout), layers=LAYERS, geometry=geometry
    )
    allocator = LaneSlotAllocator(
        layout=layout, physical_size=rank_tokens, dtype=device_pool.dtype, device="cpu", kvcache=device_pool
    )
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=None,
        token_to_kv_pool_allocator=allocator,
        page_size=choice.page_size,
        tp_cache_group=dist.group.WORLD,
        eviction_policy=eviction_policy,
    )
    group = ShardGroup(kind=GroupKind.ATTENTION_CP, size=choice.shard_size, rank=choice.shard_rank)
    cache: HiRadixCache[Any] = assemble_cache(params, layout=layout, settings=settings, group=group)
    return RankCache(device_pool=device_pool, layout=layout, allocator=allocator, cache=cache)
