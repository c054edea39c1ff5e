import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host.base import HostKVCache
from sglang_releases import SINCE_0_5_23

class MHATokenToKVPoolHost(HostKVCache):
    if SINCE_0_5_23:
        def __init__(
            self,
            buffer_info: object,
            host_to_device_ratio: float,
            host_size: float,
            page_size: int,
            layout: str,
            pin_memory: bool = True,
            device: str = "cpu",
            allocator_type: str = "default",
            *,
            device_capacity_tokens: int,
            start_layer: int,
            end_layer: int,
            write_back_staging: tuple[torch.Tensor, torch.Tensor] | None = None,
        ) -> None: ...
    else:
        def __init__(
            self,
            device_pool: MHATokenToKVPool,
            host_to_device_ratio: float,
            host_size: float,
            page_size: int,
            layout: str,
            pin_memory: bool = True,
            device: str = "cpu",
            allocator_type: str = "default",
        ) -> None: ...

if SINCE_0_5_23:
    def get_mha_host_pool_cls(buffer_info: object) -> type[MHATokenToKVPoolHost]: ...

else:
    def get_mha_host_pool_cls(device_pool: MHATokenToKVPool) -> type[MHATokenToKVPoolHost]: ...
