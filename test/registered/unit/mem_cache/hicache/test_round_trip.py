"""Insert, back up, evict, overwrite, match, load back, compare: every pool, host layout, policy and eviction order."""

from __future__ import annotations

import itertools
import unittest
from typing import TYPE_CHECKING, Any, get_args

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.test.ci.ci_register import register_cpu_ci

from sglang.srt.mem_cache.hicache.accepted import WritePolicy
from sglang.srt.mem_cache.hicache.assemble import assemble_cache
from sglang.srt.mem_cache.hicache.settings import ShardGroup
from sglang.srt.mem_cache.hicache.tree.calls import Insertion
from sglang.srt.mem_cache.layouts import PoolKind
from support.caches import CacheSpec, CacheTestCase, chain, make_device_pool, make_layout, make_params, make_settings
from support.groups import Group

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache.radix_cache import HiRadixCache
    from sglang.srt.mem_cache.hicache.tree.node import LayoutTreeNode

register_cpu_ci(est_time=60, suite="base-a-test-cpu")

POOLS = (PoolKind.MHA, PoolKind.MLA, PoolKind.DSA)
HOST_LAYOUTS = ("layer_first", "page_first_direct")
EVICTION_POLICIES = ("lru", "lfu", "fifo", "mru", "filo", "priority", "slru")


class TestRoundTrip(CacheTestCase):
    def test_identity_returns_every_byte_with_every_pool_host_layout_and_policy(self) -> None:
        for pool, mem_layout, policy in itertools.product(POOLS, HOST_LAYOUTS, get_args(WritePolicy)):
            self._round_trip(
                CacheSpec(
                    layout="identity",
                    pool=pool,
                    mem_layout=mem_layout,
                    policy=policy,
                    device_pages=16,
                    host_pages=32,
                )
            )

    def test_three_ranks_return_every_byte_with_every_pool_host_layout_and_policy(self) -> None:
        for pool, mem_layout, policy in itertools.product(POOLS, HOST_LAYOUTS, get_args(WritePolicy)):
            self._round_trip(CacheSpec(pool=pool, mem_layout=mem_layout, policy=policy))

    def test_every_eviction_order_returns_every_byte(self) -> None:
        for layout, eviction in itertools.product(("identity", "cp_shared"), EVICTION_POLICIES):
            self._round_trip(CacheSpec(layout=layout, eviction=eviction, device_pages=16, host_pages=32))

    def _round_trip(self, spec: CacheSpec) -> None:
        with self.subTest(spec=spec):
            group = Group(spec)
            chains = (chain(spec, 1, 2, 3, 4), chain(spec, 1, 2, 5), chain(spec, 7))
            for tokens in chains * 2:  # twice: write_through_selective backs up at the second hit
                group.serve(tokens)
                group.check()
            group.evict_all()
            group.check()
            self.assertEqual(group.ranks[0].allocator.available_size(), group.ranks[0].allocator.size)
            for tokens, host_pages in zip(chains, (4, 1, 1), strict=True):
                request = group.start(tokens)  # compares the bytes of device and host hits
                assert request is not None
                self.assertEqual(request.host_pages, host_pages)
                self.assertEqual(request.prefix_pages, len(tokens) // spec.page_size)
                group.check()
                group.finish(request)
                group.settle()
                group.check()
            self._count_acks(group)

    def _count_acks(self, group: Group) -> None:
        """Every rank submitted the same number of copies, one for each ack, whatever it owns."""
        submitted = {(len(rank.engine.writes), len(rank.engine.loads)) for rank in group.ranks}
        self.assertEqual(len(submitted), 1)
        self.assertEqual(submitted.pop()[1], 3)
        for rank in group.ranks:
            self.assertEqual((rank.controller.ack_write_queue, rank.controller.ack_load_queue), ([], []))
            self.assertEqual((rank.cache.parts.in_flight.backups, rank.cache.parts.in_flight.loads), ({}, {}))

    def test_namespaces_share_no_kv(self) -> None:
        group = Group(CacheSpec())
        group.serve(chain(group.spec, 1, 2), "adapter")
        other = group.start(chain(group.spec, 1, 2), "other")
        assert other is not None
        self.assertEqual(other.prefix_pages, 0)
        same = group.start(chain(group.spec, 1, 2), "adapter")
        assert same is not None
        self.assertEqual(same.prefix_pages, 2)

    def test_bigram_keys_of_eagle_count_one_token_less(self) -> None:
        group = Group(CacheSpec(eagle=True))
        tokens = chain(group.spec, 1, 2, 3, 4)[:13]  # twelve bigrams
        for rank in group.ranks:
            rank.cache.put(Insertion(key=rank.key(tokens), value=rank.take(16)))
            for length, matched in ((3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (13, 12)):
                match = rank.cache.match(rank.key(tokens[:length]))
                self.assertEqual(len(match.slots), matched)
        group.settle()
        group.evict_all()
        for rank in group.ranks:
            match = rank.cache.match(rank.key(tokens))
            self.assertEqual(match.host_tokens, 12)
            loaded = rank.cache.load_back(match.host_node)
            self.assertEqual(0 if loaded is None else len(loaded), 12)

    def test_identity_works_with_sglangs_own_allocator(self) -> None:
        spec = CacheSpec(layout="identity", ranks=1)
        pool, layout = make_device_pool(spec), make_layout(spec, 0)
        stock = PagedTokenToKVPoolAllocator(32, 4, torch.bfloat16, "cpu", pool, need_sort=False)
        cache: HiRadixCache[Any] = assemble_cache(
            make_params(spec, stock), layout=layout, settings=make_settings(spec), group=ShardGroup()
        )
        tokens = chain(spec, 1, 2, 3)
        slots = stock.alloc(12)
        assert slots is not None
        cache.put(Insertion(key=RadixKey(tokens), value=slots))
        cache.check_hicache_events()
        self.assertEqual(cache.evict(EvictParams(num_tokens=1)).num_tokens_evicted, 12)
        self.assertEqual(stock.available_size(), 32)
        match = cache.match(RadixKey(tokens))
        loaded = cache.load_back(match.host_node)
        assert loaded is not None
        self.assertEqual(stock.available_size(), 20)


class TestEvictionPolicies(CacheTestCase):
    def test_the_policies_above_are_all_that_sglang_offers(self) -> None:
        for policy in EVICTION_POLICIES:
            Group(CacheSpec(ranks=1, eviction=policy))
        with self.assertRaisesRegex(ValueError, ", ".join(f"'{policy}'" for policy in EVICTION_POLICIES)):
            Group(CacheSpec(ranks=1, eviction="none"))

    def test_leaves_leave_device_and_host_in_the_order_that_sglangs_strategy_gives(self) -> None:
        for eviction in EVICTION_POLICIES:
            with self.subTest(eviction=eviction):
                self._evict_one_by_one(CacheSpec(ranks=2, eviction=eviction, device_pages=16, host_pages=20))

    def _evict_one_by_one(self, spec: CacheSpec) -> None:
        group = Group(spec)
        for page in (1, 2, 3, 4, 5, 2, 4, 4, 1):
            group.serve(chain(spec, page))
        for rank in group.ranks:
            for number, node in enumerate(rank.nodes()):
                node.priority = number * 7 % 5
                rank.accounting.touch(node)  # as an insert with another priority does
        cache = group.ranks[0].cache
        strategy = cache.eviction_strategy
        self.assertEqual(type(strategy).__name__.lower(), f"{spec.eviction}strategy")

        def place(node: LayoutTreeNode[Any]) -> tuple[Any, int]:
            return strategy.get_priority(node), node.id

        for order, evict in (
            (cache.parts.accounting.device_order, lambda: cache.evict(EvictParams(num_tokens=1))),
            (cache.parts.accounting.host_order, lambda: cache.evict_host(1)),
        ):
            left = sorted(order, key=place)
            self.assertEqual(len(left), 5)
            while left:
                self.assertEqual(sorted(order, key=place), left)
                evict()
                self.assertNotIn(left.pop(0), order)


if __name__ == "__main__":
    unittest.main()
