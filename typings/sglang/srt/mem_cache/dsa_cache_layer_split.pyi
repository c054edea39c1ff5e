from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

class LayerSplitDSATokenToKVPool(DSATokenToKVPool):
    layer_shard_size: int
    # Whatever else it is given goes to the class above.
    def __init__(self, *args: object, layer_shard_rank: int, layer_shard_size: int, **kwargs: object) -> None: ...
