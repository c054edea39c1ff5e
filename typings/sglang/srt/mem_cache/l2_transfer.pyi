from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.memory_pool import KVCache
from sglang.srt.mem_cache.pool_host.base import HostKVCache
from sglang_releases import SINCE_0_5_23

class L2Transfer(NamedTuple):
    host_pool: HostKVCache
    device_pool: KVCache
    host_indices: torch.Tensor
    device_indices: torch.Tensor
    layer_mapper: Callable[[int], int | None] | None = None
    is_draft: bool = False

# Events of whatever device; `HiCacheAck` says what is done with them.
class TransferCompletion(NamedTuple):
    start_event: Any
    finish_event: Any
    timing_enabled: bool

class L2TransferEngine:
    device_to_host_stream: torch.Stream
    host_to_device_stream: torch.Stream
    def __init__(self, io_backend: str) -> None: ...
    def submit_device_to_host(self, transfers: list[L2Transfer]) -> TransferCompletion: ...
    if SINCE_0_5_23:
        def submit_host_to_device(
            self,
            transfers: list[L2Transfer],
            *,
            transfer_layer_id_max: int,
            start_event: torch.Event | None = None,
            on_layer_done: Callable[[int], None] | None = None,
        ) -> TransferCompletion: ...
    else:
        def submit_host_to_device(
            self,
            transfers: list[L2Transfer],
            *,
            layer_num: int,
            start_event: torch.Event | None = None,
            on_layer_done: Callable[[int], None] | None = None,
        ) -> TransferCompletion: ...

# Start and finish of a transfer, and whether the time between them can be asked.
def make_timing_event_pair() -> tuple[Any, Any, bool]: ...
