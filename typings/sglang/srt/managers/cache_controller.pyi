import threading
from typing import NamedTuple

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.pool_host import HostKVCache, HostPoolGroup
from torch.distributed import ProcessGroup

class HiCacheAck(NamedTuple):
    start_event: torch.Event
    finish_event: torch.Event
    node_ids: list[int]

class HiCacheController:
    ack_write_queue: list[HiCacheAck]
    ack_load_queue: list[HiCacheAck]
    def __init__(
        self,
        token_to_kv_pool_allocator: PagedTokenToKVPoolAllocator,
        mem_pool_host: HostKVCache | HostPoolGroup,
        page_size: int,
        tp_group: ProcessGroup | None,
        load_cache_event: threading.Event,
        attn_cp_group: ProcessGroup | None = None,
        attn_tp_group: ProcessGroup | None = None,
        pp_group: ProcessGroup | None = None,
        write_policy: str = "write_through_selective",
        io_backend: str = "",
    ) -> None: ...
    def write(
        self, device_indices: torch.Tensor, priority: int | None = None, node_id: int = -1
    ) -> torch.Tensor | None: ...
    def load(
        self, host_indices: torch.Tensor, priority: int | None = None, node_id: int = -1
    ) -> torch.Tensor | None: ...
    def start_loading(self) -> int: ...
    def evict_device(self, device_indices: torch.Tensor) -> int: ...
