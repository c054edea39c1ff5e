"""SGLang's own trees under comparison, with SGLang's paged allocator: `SGLANG_TREES` are those of this release."""

from __future__ import annotations

import atexit
from functools import partial
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.mem_cache.radix_cache import RadixKey

from kvlayouts.bench.subjects import NoCopyEngine, cache_params, device_pool, joined
from kvlayouts.common.values import ceil_div
from sglang.srt.mem_cache.hicache.seam.trees import OWN_TREES, make_tree, match_and_load, put
from sglang.srt.mem_cache.layouts.errors import LayoutInvariantError

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Mapping

    from sglang.srt.server_args import ServerArgs

    from kvlayouts.bench.subjects import PoolSizes, Subject


class SGLangSubject:
    """One of SGLang's own trees. Its host sizes come from `server_args`; see `subjects_runtime`."""

    def __init__(self, name: str, sizes: PoolSizes, server_args: ServerArgs) -> None:
        self.name = name
        pool = device_pool(sizes.device_tokens, sizes.page_size)
        self.allocator = PagedTokenToKVPoolAllocator(
            sizes.device_tokens, sizes.page_size, pool.dtype, "cpu", pool, need_sort=False
        )
        self.cache: Any = make_tree(name, cache_params(self.allocator, sizes.page_size), server_args)
        self.cache.cache_controller.l2_transfer_engine = NoCopyEngine("direct")
        atexit.unregister(self.cache.shutdown)  # it would keep every cache of this process alive

    def serve(self, tokens: array[int]) -> int:
        """See `Subject.serve`."""
        cache, allocator, page_size = self.cache, self.allocator, self.allocator.page_size
        prefix, node = match_and_load(cache, RadixKey(tokens, limit=len(tokens) - 1))
        cache.ready_to_load_host_cache()
        lock = cache.inc_lock_ref(node)
        need = ceil_div(len(tokens), page_size) * page_size - len(prefix)
        evict_from_tree_cache(cache, need)
        fresh = allocator.alloc(need)
        if fresh is None:
            raise LayoutInvariantError(f"no room for a prompt of {len(tokens)} tokens")
        slots = joined(prefix, fresh)
        whole = len(tokens) // page_size * page_size
        put(cache, RadixKey(tokens), slots[:whole], own_from=len(prefix))
        allocator.free_segment(slots[whole : len(tokens)], start_pos=whole)
        cache.dec_lock_ref(node, lock.to_dec_params())
        cache.check_hicache_events()
        return len(prefix)

    def close(self) -> None:
        """See `Subject.close`."""
        self.cache.release_host_resources()


SGLANG_TREES: Mapping[str, Callable[[PoolSizes, ServerArgs], Subject]] = {
    name: partial(SGLangSubject, name) for name in OWN_TREES
}
"""How each of SGLang's trees is made; ours takes the place of the first one."""
