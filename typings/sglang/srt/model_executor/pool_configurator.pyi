from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator

class MemoryPoolConfig:
    max_total_num_tokens: int

class MemoryPoolConfigurator:
    def calculate_pool_sizes(self, available_bytes: int, page_size: int) -> MemoryPoolConfig: ...

def create_memory_pool_configurator(kvc: KVCacheConfigurator) -> MemoryPoolConfigurator: ...
