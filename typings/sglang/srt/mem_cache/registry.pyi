from collections.abc import Callable
from typing import TypeAlias

from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.server_args import ServerArgs

class TreeCacheBuildContext:
    server_args: ServerArgs
    params: CacheInitParams
    tp_worker: TpModelWorker
    tp_size: int

RadixCacheFactory: TypeAlias = Callable[[TreeCacheBuildContext], BasePrefixCache]

def register_radix_cache_backend(name: str, factory: RadixCacheFactory) -> None: ...
def get_radix_cache_factory(name: str) -> RadixCacheFactory | None: ...
