import threading
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.l2_transfer import L2TransferEngine
from sglang.srt.mem_cache.pool_host import HostKVCache, HostPoolGroup
from sglang_releases import SINCE_0_5_23
from torch.distributed import ProcessGroup

# torch.cuda, torch.cpu or the like, of which it takes events.
device_module: Any

class LayerLoadingEvent:
    start_event: torch.Event
    load_events: list[torch.Event]
    def __init__(self, num_layers: int) -> None: ...
    def complete(self, layer_index: int) -> None: ...
    @property
    def finish_event(self) -> torch.Event: ...

class LayerDoneCounter:
    events: list[LayerLoadingEvent]
    def update_producer(self) -> int: ...
    def set_consumer(self, index: int) -> None: ...
    def wait_until(self, threshold: int) -> None: ...

class HiCacheAck(NamedTuple):
    start_event: torch.Event
    finish_event: torch.Event
    node_ids: list[int]
    num_tokens: int = 0
    timing_enabled: bool = False
    num_tokens_by_pool: dict[str, int] | None = None
    num_bytes: int = 0

class HiCacheController:
    mem_pool_host: HostKVCache | HostPoolGroup
    page_size: int
    layer_done_counter: LayerDoneCounter
    ack_write_queue: list[HiCacheAck]
    ack_load_queue: list[HiCacheAck]
    l2_transfer_engine: L2TransferEngine
    # The scheduler puts its forward stream here.
    load_fence_stream: torch.Stream | None
    def __init__(
        self,
        token_to_kv_pool_allocator: BaseTokenToKVPoolAllocator,
        mem_pool_host: HostKVCache | HostPoolGroup,
        page_size: int,
        tp_group: ProcessGroup | None,
        load_cache_event: threading.Event,
        attn_cp_group: ProcessGroup | None = None,
        attn_tp_group: ProcessGroup | None = None,
        pp_group: ProcessGroup | None = None,
        write_policy: str = "write_through_selective",
        io_backend: str = "",
        storage_backend: str | None = None,
        *,
        model_name: str | None = None,
    ) -> None: ...
    def reset(self) -> None: ...
    def write(
        self, device_indices: torch.Tensor, priority: int | None = None, node_id: int = -1
    ) -> torch.Tensor | None: ...
    def start_writing(self) -> None: ...
    def load(
        self, host_indices: torch.Tensor, priority: int | None = None, node_id: int = -1
    ) -> torch.Tensor | None: ...
    def start_loading(self) -> int: ...
    if not SINCE_0_5_23:
        def evict_device(self, device_indices: torch.Tensor) -> int: ...
