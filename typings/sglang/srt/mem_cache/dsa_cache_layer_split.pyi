import torch
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

class LayerSplitDSATokenToKVPool(DSATokenToKVPool):
    layer_shard_size: int
    def __init__(
        self,
        size: int,
        page_size: int,
        *,
        dtype: torch.dtype,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        index_head_dim: int,
        kv_cache_dim: int,
        layer_num: int,
        device: str,
        enable_memory_saver: bool,
        layer_shard_rank: int,
        layer_shard_size: int,
    ) -> None: ...
