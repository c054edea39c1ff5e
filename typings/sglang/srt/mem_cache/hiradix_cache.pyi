import torch
from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams, _NodeHandle
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.pool_host import HostKVCache, HostPoolGroup
from sglang.srt.mem_cache.radix_cache import RadixCache, TreeNode
from sglang.srt.server_args import ServerArgs
from sglang_releases import SINCE_0_5_23
from typing_extensions import override

if not SINCE_0_5_23:
    # SGLang's own hierarchical cache, which only tests use, to compare ours with it.
    class HiRadixCache(RadixCache):
        token_to_kv_pool_host: HostKVCache | HostPoolGroup
        ongoing_write_through: dict[int, object]
        def __init__(self, params: CacheInitParams, server_args: ServerArgs) -> None: ...
        def evict_host(self, num_tokens: int) -> None: ...
        def load_back(self, node: TreeNode, mem_quota: int | None = None) -> torch.Tensor | None: ...
        @override
        def init_load_back(self, params: InitLoadBackParams) -> tuple[torch.Tensor, _NodeHandle]: ...
        def shutdown(self) -> None: ...
