from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.base import HostKVCache
from sglang_releases import SINCE_0_5_23

class MLATokenToKVPoolHost(HostKVCache):
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
            override_kv_cache_dim: int | None = None,
            *,
            device_capacity_tokens: int,
            start_layer: int,
            end_layer: int,
            target_layer_num: int,
            layer_shard_enabled: bool = False,
        ) -> None: ...
    else:
        def __init__(
            self,
            device_pool: MLATokenToKVPool,
            host_to_device_ratio: float,
            host_size: float,
            page_size: int,
            layout: str,
            pin_memory: bool = True,
            device: str = "cpu",
            allocator_type: str = "default",
            override_kv_cache_dim: int | None = None,
        ) -> None: ...
