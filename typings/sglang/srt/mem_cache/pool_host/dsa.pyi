import torch
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool
from sglang.srt.mem_cache.pool_host.base import HostKVCache
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang_releases import SINCE_0_5_23

if SINCE_0_5_23:
    def make_dsa_indexer_pool_decl(pool: DSATokenToKVPool) -> object: ...

class DSAIndexerPoolHost(HostKVCache):
    index_k_with_scale_buffer: torch.Tensor
    if SINCE_0_5_23:
        # Host layer of each device layer that has index keys.
        _device_to_host_layer: dict[int, int]
        def __init__(
            self,
            decl: object,
            anchor_host: MLATokenToKVPoolHost,
            *,
            pin_memory: bool = True,
            device: str = "cpu",
            allocator_type: str = "default",
        ) -> None: ...
    else:
        def __init__(
            self,
            device_pool: DSATokenToKVPool,
            anchor_host: MLATokenToKVPoolHost,
            layout: str,
            pin_memory: bool = True,
            device: str = "cpu",
            allocator_type: str = "default",
        ) -> None: ...
