from typing import Literal

# The leaves of the published namespace "memory" that we read, as they are after resolution.
class Memory:
    hicache_io_backend: str
    hicache_mem_layout: str
    hicache_ratio: float
    hicache_size: int
    hicache_storage_backend: str | None
    hicache_write_policy: Literal["write_back", "write_through", "write_through_selective"]
