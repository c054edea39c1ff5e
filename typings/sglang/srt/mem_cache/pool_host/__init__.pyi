from sglang.srt.mem_cache.pool_host.base import HostKVCache as HostKVCache
from sglang.srt.mem_cache.pool_host.common import HostTensorAllocator as HostTensorAllocator
from sglang.srt.mem_cache.pool_host.group import HostPoolGroup as HostPoolGroup
from sglang.srt.mem_cache.pool_host.group import PoolEntry as PoolEntry
