from dataclasses import dataclass

@dataclass(kw_only=True)
class ReqKvInfo:
    req_pool_idx: int | None = None
    cache_protected_len: int = 0
    kv_allocated_len: int = 0
