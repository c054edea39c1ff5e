"""Does the cache's memory stay flat? Insert, back up, evict and delete over and over, and watch this process's memory.

    python benchmark/memory_cycles.py --cycles 100000 --ranks 2 --layout cp_shared

Each cycle brings a chain that was never seen before, longer than what is free, so that older ones leave the device
and then the host. Ranks live in this process; pools are small and real. Exits with 1 if the memory grew by more than
2 % after the first tenth, or if anything is still held at the end.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from array import array
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang.srt.mem_cache.hicache.assemble import assemble_cache
from sglang.srt.mem_cache.hicache.cpu.support import install_cpu_support
from sglang.srt.mem_cache.hicache.device.pools import MlaGeometry, build_device_pool
from sglang.srt.mem_cache.hicache.runtime import standalone_runtime
from sglang.srt.mem_cache.hicache.settings import HiCacheSettings, ShardGroup
from sglang.srt.mem_cache.hicache.slots.allocator import LaneSlotAllocator
from sglang.srt.mem_cache.hicache.tree.calls import Insertion
from sglang.srt.mem_cache.layouts import GroupKind, LayoutConfig, PoolKind, create_layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang.srt.mem_cache.hicache.radix_cache import HiRadixCache

PAGE = 4
CHAIN_PAGES = 6
DEVICE_PAGES = 64  # over all owners, as those of the host
HOST_PAGES = 128


class Alone:
    """Agreement of ranks that all finish at once: copies on a CPU are done when they were submitted."""

    def minimum(self, values: Sequence[int]) -> tuple[int, ...]:
        """The values, which are equal on all ranks."""
        return tuple(values)

    def capacity(self, value: int) -> int:
        """The value, which is equal on all ranks."""
        return value


def make_cache(layout_name: str, rank: int, ranks: int, policy: str) -> HiRadixCache[Any]:
    """One rank's cache on small MLA pools."""
    layout = create_layout(LayoutConfig(name=layout_name, page_size=PAGE, shard_size=ranks, shard_rank=rank))
    physical_size = DEVICE_PAGES // layout.lane_count * PAGE
    pool = build_device_pool(
        PoolKind.MLA,
        tokens=physical_size,
        page_size=PAGE,
        layers=1,
        geometry=MlaGeometry(kv_lora_rank=4, qk_rope_head_dim=2),
    )
    allocator = LaneSlotAllocator(
        layout=layout, physical_size=physical_size, dtype=torch.bfloat16, device="cpu", kvcache=pool
    )
    params = CacheInitParams(
        disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=allocator, page_size=PAGE
    )
    settings: dict[str, Any] = {
        "write_policy": policy,
        "host_ratio": HOST_PAGES / DEVICE_PAGES,
        "load_back_threshold": 1,
    }
    return assemble_cache(
        params,
        layout=layout,
        settings=HiCacheSettings(**settings),
        group=ShardGroup(kind=GroupKind.ATTENTION_CP, size=ranks, rank=rank),
        agreement=Alone(),
    )


def chain_of(number: int) -> array[int]:
    """Tokens of a chain whose first two pages others have too; each fifth one was seen and has left the device."""
    if number % 5 == 4:
        number = max(0, number - 13)
    pages = [number // 8, number // 4, *(number * CHAIN_PAGES + at for at in range(2, CHAIN_PAGES))]
    return array("q", [page * PAGE + at for page in pages for at in range(PAGE)])


def cycle(cache: HiRadixCache[Any], number: int) -> None:
    """One request: match, load back, lock, allocate, insert, which backs up, unlock; sometimes eviction by order."""
    tokens = chain_of(number)
    match = cache.match(RadixKey(tokens))
    node, found = match.device_node, len(match.slots)
    slot_pages = match.slots.numpy()[::PAGE] // PAGE
    if match.host_tokens and (loaded := cache.load_back(match.host_node)) is not None:
        node, found = match.host_node, found + len(loaded)
        slot_pages = np.concatenate([slot_pages, loaded.numpy()[::PAGE] // PAGE])
        cache.ready_to_load_host_cache()
    cache.inc_lock_ref(node)
    base = cache.layout.chain_base(tokens[:PAGE].tobytes(), "")
    own = cache.alloc_slots(cache.layout.extend_lanes(base, found // PAGE, CHAIN_PAGES - found // PAGE))
    if own is not None:
        every = np.concatenate([slot_pages, own])
        cache.put(Insertion(key=RadixKey(tokens), value=cache.slots.slots(every), slot_pages=every))
    cache.dec_lock_ref(node)
    cache.check_hicache_events()
    if number % 16 == 0:
        cache.evict(EvictParams(num_tokens=CHAIN_PAGES * PAGE))
        cache.evict_host(CHAIN_PAGES * PAGE)


def left_over(cache: HiRadixCache[Any]) -> dict[str, int]:
    """What is still held after everything was evicted; all 0 if nothing leaks."""
    cache.check_hicache_events()
    cache.evict(EvictParams(num_tokens=sys.maxsize))
    cache.evict_host(sys.maxsize)
    allocator = cache.token_to_kv_pool_allocator
    return {
        "nodes": sum(1 for _ in cache.nodes()),
        "slots": allocator.size - allocator.available_size(),
        "host_slots": cache.token_to_kv_pool_host.size - cache.token_to_kv_pool_host.available_size(),
        "ledger_pages": sum(cache.cache_controller.ledger.used_pages),
        "protected_tokens": cache.protected_size(),
        "in_flight": len(cache.parts.in_flight.backups) + len(cache.parts.in_flight.loads),
        "candidates": len(cache.parts.accounting.device_order) + len(cache.parts.accounting.host_order),
    }


def run(layout: str, ranks: int, cycles: int, policy: str) -> dict[str, Any]:
    """Run the cycles; memory is taken after the first tenth, when pools, caches and interned values exist."""
    caches = [make_cache(layout, rank, ranks, policy) for rank in range(ranks)]
    process, warm, started = psutil.Process(), max(1, cycles // 10), time.perf_counter()
    rss_start = 0
    for number in range(cycles):
        if number == warm:
            gc.collect()
            rss_start = process.memory_info().rss
        for cache in caches:
            cycle(cache, number)
    gc.collect()
    stats = caches[0].stats
    return {
        "layout": layout,
        "ranks": ranks,
        "policy": policy,
        "cycles": cycles,
        "seconds": round(time.perf_counter() - started, 1),
        "backups": stats.backups,
        "loads": stats.loads,
        "evicted_device_tokens": stats.evicted_device_tokens,
        "evicted_host_tokens": stats.evicted_host_tokens,
        "rss_start_bytes": rss_start,
        "rss_end_bytes": process.memory_info().rss,
        "left_over": [left_over(cache) for cache in caches],
    }


def main() -> int:
    """Parse, run, print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layout", default="cp_shared")
    parser.add_argument("--policy", default="write_through")
    options = parser.parse_args()
    install_cpu_support()
    with standalone_runtime(page_size=PAGE):
        result = run(options.layout, options.ranks, options.cycles, options.policy)
    print(json.dumps(result, indent=1))
    grew = result["rss_end_bytes"] > 1.02 * result["rss_start_bytes"]
    return int(grew or any(any(left.values()) for left in result["left_over"]))


if __name__ == "__main__":
    sys.exit(main())
