"""Our `HiRadixCache` with `IdentityLayout` beside the newest release's own `UnifiedRadixCache`, which is its only tree.

Both are called as SGLang's scheduler calls them. After each call everything that a caller can see is compared: tokens
found on the device and on the host, what was loaded back, duplicates, tokens evicted, lock deltas of the evictable and
protected sizes, free slots. The KV of each matched slot must be what its prefix says.

Permitted differences, each with its reason:

- *Backups under pressure.* SGLang's tree keeps the host copies of nodes that are on the device, so a full host tier
  serves nothing more; ours lets those give way. So the host has room for everything here.
- *A use counts once.* SGLang counts an insert that no request stands for at each call, ours too: none shows here. The
  threshold is 1, as with write_through.
- *Waiting.* SGLang's tree backs up when a step ends (`flush_pending_backups`), ours at once: both are asked to flush
  and to settle after each step.
- *Who frees duplicates.* SGLang's tree does, ours leaves them to the caller: see `seam.trees.put`.
"""

from __future__ import annotations

import random
import tempfile
import unittest
from array import array
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase
from typing_extensions import override

from sglang.srt.mem_cache.hicache.assemble import assemble_cache
from sglang.srt.mem_cache.hicache.cpu.support import install_cpu_support
from sglang.srt.mem_cache.hicache.device.pools import Geometry, MhaGeometry, MlaGeometry, build_device_pool
from sglang.srt.mem_cache.hicache.runtime import standalone_runtime
from sglang.srt.mem_cache.hicache.seam.features import SINCE_0_5_23
from sglang.srt.mem_cache.hicache.seam.trees import UNIFIED, load_params, make_tree, put
from sglang.srt.mem_cache.hicache.settings import HiCacheSettings, ShardGroup
from sglang.srt.mem_cache.layouts import IdentityLayout, PoolKind
from support.caches import page_bytes, page_prefixes, page_views

assert SINCE_0_5_23, "conftest.py leaves this file out beside an older release"
register_cpu_ci(est_time=40, suite="base-a-test-cpu")

PAGE, DEVICE_PAGES, STEPS = 4, 24, 250
GEOMETRIES: dict[PoolKind, Geometry] = {
    PoolKind.MHA: MhaGeometry(heads=1, head_dim=4, dtype=torch.float32),
    PoolKind.MLA: MlaGeometry(kv_lora_rank=8, qk_rope_head_dim=8, dtype=torch.float32),
}


class Side:
    """One cache with pools of its own."""

    def __init__(self, kind: PoolKind, server_args: Any | None) -> None:  # noqa: ANN401
        self.pool = build_device_pool(
            kind, tokens=DEVICE_PAGES * PAGE, page_size=PAGE, layers=2, geometry=GEOMETRIES[kind]
        )
        self.allocator = PagedTokenToKVPoolAllocator(
            DEVICE_PAGES * PAGE, PAGE, self.pool.dtype, "cpu", self.pool, need_sort=False
        )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=ReqToTokenPool(size=1, max_context_len=8, device="cpu", enable_memory_saver=False),
            token_to_kv_pool_allocator=self.allocator,
            page_size=PAGE,
            tp_cache_group=dist.group.WORLD,
            eviction_policy="lru",
        )
        self.cache: Any  # ours or SGLang's: the calls of both are those of the release
        if server_args is None:
            self.cache = assemble_cache(
                params,
                layout=IdentityLayout(page_size=PAGE),
                settings=HiCacheSettings(host_ratio=40.0, load_back_threshold=1),
                group=ShardGroup(),
            )
        else:
            self.cache = make_tree(UNIFIED, params, server_args)
            self.cache.load_back_threshold = 1
        self.locks: list[Any] = []

    def seen(self) -> tuple[int, ...]:
        """What a scheduler can see of the cache at any time."""
        cache = self.cache
        return cache.evictable_size(), cache.protected_size(), self.allocator.available_size(), len(self.locks)

    def settle(self) -> None:
        """The end of a step, when all copies have ended."""
        self.cache.flush_pending_backups()
        self.cache.check_hicache_events()

    def match(self, tokens: array[int]) -> tuple[int, int]:
        """Tokens on the device and on the host. Raises `AssertionError` for wrong bytes."""
        found = self._match(tokens)
        self._check(tokens, self.cache.path_device_indices(found.last_device_node))
        return found.device_prefix_len, found.host_hit_length

    def serve(self, tokens: array[int], *, hold: bool) -> tuple[int, ...]:
        """A request, from its match to its insert; with `hold` its lock stays."""
        cache, found = self.cache, self._match(tokens)
        node, loaded = found.last_device_node, 0
        if found.host_hit_length:
            loaded, node = cache.init_load_back(load_params(found))
        cache.ready_to_load_host_cache()
        prefix = cache.path_device_indices(node)
        self._check(tokens, prefix)
        lock = cache.lock(node)
        need = len(tokens) - len(prefix)
        evict_from_tree_cache(cache, need)
        fresh = self.allocator.alloc(need) if need else prefix[:0]
        if fresh is None:
            cache.unlock(lock)
            return found.device_prefix_len, found.host_hit_length, loaded, -1
        self._write(tokens, len(prefix), fresh)
        known = put(cache, RadixKey(tokens), torch.cat([prefix, fresh]), own_from=len(prefix))
        if hold:
            self.locks.append(lock)
        else:
            cache.unlock(lock)
        return found.device_prefix_len, found.host_hit_length, loaded, known

    def _match(self, tokens: array[int]) -> Any:  # noqa: ANN401  # SGLang's
        return self.cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens)))

    def _write(self, tokens: array[int], first: int, slots: torch.Tensor) -> None:
        prefixes = page_prefixes(tokens, PAGE)[first // PAGE :]
        for prefix, page in zip(prefixes, (slots[::PAGE] // PAGE).tolist(), strict=True):
            for number, pages in enumerate(page_views(self.pool)):
                pages[page] = page_bytes(prefix, number, pages.shape[1])

    def _check(self, tokens: array[int], slots: torch.Tensor) -> None:
        views = page_views(self.pool)
        for prefix, page in zip(page_prefixes(tokens, PAGE), (slots[::PAGE] // PAGE).tolist(), strict=False):
            for number, pages in enumerate(views):
                expected = page_bytes(prefix, number, pages.shape[1])
                assert (pages[page] == expected).all(), f"{type(self.cache).__name__}: page {page} has wrong KV"


class TestIdentityMatchesUnified(CustomTestCase):
    @classmethod
    @override
    def setUpClass(cls) -> None:
        super().setUpClass()
        install_cpu_support()
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        dist.init_process_group("gloo", init_method=f"file://{Path(folder.name) / 'store'}", rank=0, world_size=1)
        cls.addClassCleanup(dist.destroy_process_group)

    def test_the_two_answer_every_call_alike(self) -> None:
        loaded = evicted = 0
        for seed, kind in enumerate((PoolKind.MLA, PoolKind.MHA) * 3):
            with self.subTest(kind=kind, seed=seed):
                more = self._drive(kind, random.Random(seed))
                loaded, evicted = loaded + more[0], evicted + more[1]
        self.assertGreater(loaded, 0)
        self.assertGreater(evicted, 0)

    def _drive(self, kind: PoolKind, rng: random.Random) -> tuple[int, int]:
        loaded = evicted = 0
        with standalone_runtime(
            page_size=PAGE,
            hicache_ratio=40.0,
            hicache_size=0,
            hicache_mem_layout="layer_first",
            hicache_write_policy="write_through",
        ) as server_args:
            sides = [Side(kind, None), Side(kind, server_args)]
            for step in range(STEPS):
                tokens = array("q", [page * 10 + at for page in _pages(rng) for at in range(PAGE)])
                action = rng.choice(("serve", "serve", "serve", "match", "evict", "unlock", "touch"))
                count, hold = rng.randrange(1, 4 * PAGE), rng.random() < 0.2
                answers = [_perform(side, action, tokens, count, hold=hold) for side in sides]
                where = f"step {step}, {action} {tokens.tolist()}"
                self.assertEqual(answers[0], answers[1], where)
                self.assertEqual(sides[0].seen(), sides[1].seen(), where)
                loaded += answers[0][2] if action == "serve" else 0
                evicted += answers[0][0] if action == "evict" else 0
            for side in sides:
                side.cache.release_host_resources()
        return loaded, evicted


def _pages(rng: random.Random) -> list[int]:
    return [rng.randrange(3) for _ in range(rng.randrange(1, 6))]


def _perform(side: Side, action: str, tokens: array[int], count: int, *, hold: bool) -> tuple[int, ...]:
    answer: tuple[int, ...] = ()
    if action == "serve":
        answer = side.serve(tokens, hold=hold and len(side.locks) < 3)
    elif action == "match":
        answer = side.match(tokens)
    elif action == "evict":
        answer = (side.cache.evict(EvictParams(num_tokens=count)).num_tokens_evicted,)
    elif action == "touch":
        side.cache.touch_prefix(RadixKey(tokens))
    elif side.locks:
        side.cache.unlock(side.locks.pop(0))
    side.settle()
    return answer


if __name__ == "__main__":
    unittest.main()
