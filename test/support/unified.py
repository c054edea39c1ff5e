"""A scheduler over the newest release's own `UnifiedRadixCache`, and where ours is meant to differ from that tree.

Both schedulers write KV that tells its prefix, so that every matched slot can be checked.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from typing_extensions import override

from sglang.srt.mem_cache.hicache.seam.trees import UNIFIED, make_tree
from support.caches import make_device_pool, make_params, page_bytes, page_prefixes, page_views
from support.scheduler import LONGEST_TOKENS, ROWS, Scheduler

if TYPE_CHECKING:
    from array import array

    import torch
    from sglang.srt.server_args import ServerArgs

    from support.caches import CacheSpec

# Modules of which our stubs have nothing.
_core: Any = import_module("sglang.srt.mem_cache.unified_cache.unified_tree_core")
_registry: Any = import_module("sglang.srt.mem_cache.unified_cache.tree_core_registry")
RUST, CORRECTED = "rust", "python, corrected"


class CorrectedTreeCore(_core.UnifiedTreeCore):  # type: ignore[misc]  # SGLang's class, as Any
    """SGLang's tree in Python, with the two differences taken out that show where no memory is short.

    - The upper part of a split node is as old as the split, as in SGLang 0.5.20: theirs is as old as the node was.
    - Under write_back, too, a request is a use of what it inserts: theirs counts none, so that `lfu` and `slru` are
      `lru` there.
    """

    def _split_node(self, key: Any, child: Any, split_len: int) -> Any:  # noqa: ANN401
        upper, action = super()._split_node(key, child, split_len)
        upper.creation_time = _core.get_and_increase_time_counter()
        return upper, action

    def _inc_hit_count_and_check(self, node: Any) -> bool:  # noqa: ANN401
        if self.is_write_back and not node.evicted:
            node.hit_count += 1
        return bool(super()._inc_hit_count_and_check(node))

    def _should_backup_after_insert(self, state: Any) -> bool:  # noqa: ANN401
        leaf_end = state.total_prefix_length + len(state.target_node.key)
        if self.is_write_back and state.is_new_leaf and leaf_end > state.params.inserted_len:
            self._inc_hit_count_and_check(state.target_node)
        return bool(super()._should_backup_after_insert(state))


_registry.register_tree_core_backend(CORRECTED, CorrectedTreeCore)


class WritingScheduler(Scheduler):
    """Ours, which writes and checks KV."""

    @override
    def forward(self, request: Any, end: int) -> None:
        """Write the whole pages of a request's first `end` tokens that are its own."""
        size, kv = self.spec.page_size, request.kv
        tokens = (request.origin_input_ids + request.output_ids)[: end // size * size]
        row = self.pool.req_to_token[kv.req_pool_idx, : len(tokens)]
        self._pages(tokens, row, first=kv.cache_protected_len // size, write=True)

    def match(self, tokens: array[int]) -> tuple[int, int]:
        """Tokens on the device and on the host. Raises `AssertionError` for wrong bytes."""
        cache: Any = self.cache  # ours or SGLang's, as this release calls them
        found = cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens)))
        slots = cache.path_device_indices(found.last_device_node)[: found.device_prefix_len]
        self._pages(tokens[: len(slots)], slots, first=0, write=False)
        return found.device_prefix_len, found.host_hit_length

    @property
    def host_pool(self) -> Any:  # noqa: ANN401  # SGLang's
        """The host tier."""
        return self.cache.token_to_kv_pool_host

    def seen(self) -> dict[str, int]:
        """What a scheduler can see of cache and pools at any time, in tokens."""
        return {
            "evictable": self.cache.evictable_size(),
            "protected": self.cache.protected_size(),
            "free slots": self.allocator.available_size(),
            "free host tokens": self.host_pool.available_size(),
            "free rows": self.pool.available_size(),
            "loaded requests": self.host_hits,
        }

    def _pages(self, tokens: array[int], slots: torch.Tensor, *, first: int, write: bool) -> None:
        size = self.spec.page_size
        prefixes = page_prefixes(tokens, size)
        rows = (slots[::size] // size).tolist()
        for number, pages in enumerate(page_views(self.allocator.get_kvcache())):
            for prefix, row in list(zip(prefixes, rows, strict=True))[first:]:
                expected = page_bytes(prefix, number, pages.shape[1])
                if write:
                    pages[row] = expected
                assert (pages[row] == expected).all(), f"{type(self.cache).__name__}: page {row} has wrong KV"


class UnifiedScheduler(WritingScheduler):
    """SGLang's own cache and allocator behind the same scheduler. Needs an initialised process group."""

    def __init__(self, spec: CacheSpec, server_args: ServerArgs, *, core: str) -> None:
        self.spec = spec
        self.pool = ReqToTokenPool(ROWS, LONGEST_TOKENS, "cpu", enable_memory_saver=False)
        device_pool = make_device_pool(spec)
        tokens = spec.device_pages * spec.page_size
        allocator: Any = PagedTokenToKVPoolAllocator(
            tokens, spec.page_size, device_pool.dtype, "cpu", device_pool, need_sort=False
        )
        self.allocator = allocator
        params = make_params(
            spec, allocator, req_to_token_pool=self.pool, tp_cache_group=dist.group.WORLD, tree_core_backend=core
        )
        self._theirs = make_tree(UNIFIED, params, server_args)
        self.cache = self._theirs
        self._theirs.load_back_threshold = spec.load_back_pages * spec.page_size
        self.running = None
        self.chunked = []
        self._names = self.host_hits = self.retractions = 0

    @property
    @override
    def host_pool(self) -> Any:
        return self._theirs.host_pool_group
