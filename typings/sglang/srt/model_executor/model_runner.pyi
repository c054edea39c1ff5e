from sglang.srt.mem_cache.memory_pool import KVCache, ReqToTokenPool

class ModelRunner:
    token_to_kv_pool: KVCache
    req_to_token_pool: ReqToTokenPool
