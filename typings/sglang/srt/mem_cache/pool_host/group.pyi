from collections.abc import Callable
from dataclasses import dataclass

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.memory_pool import KVCache
from sglang.srt.mem_cache.pool_host.base import HostKVCache

@dataclass
class PoolEntry:
    name: PoolName
    host_pool: HostKVCache
    device_pool: KVCache
    layer_mapper: Callable[[int], int | None]
    is_primary_index_anchor: bool = False

class HostPoolGroup:
    entries: list[PoolEntry]
    entry_map: dict[PoolName, PoolEntry]
    anchor_entry: PoolEntry
    layout: str
    can_use_write_back_jit: bool
    page_size: int
    size: int
    def __init__(self, entries: list[PoolEntry]) -> None: ...
    @property
    def size_per_token(self) -> int: ...
    def get_pool(self, name: PoolName) -> HostKVCache: ...
    def alloc(
        self,
        need_size: int,
        *,
        pool: PoolName | None = None,
        reclaim: Callable[[int], object] | None = None,
    ) -> torch.Tensor | None: ...
    def free(self, indices: torch.Tensor, *, pool: PoolName | None = None) -> int: ...
    def available_size(self, pool: PoolName | None = None) -> int: ...
    def clear(self) -> None: ...
    def destroy(self) -> None: ...
