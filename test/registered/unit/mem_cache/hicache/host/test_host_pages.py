"""The host pool's free list by page, and keys cut to whole pages without a copy."""

from __future__ import annotations

import unittest
from array import array

import numpy as np
import torch
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.test.ci.ci_register import register_cpu_ci

from sglang.srt.mem_cache.hicache.tree.radix_tree import whole_pages_of
from sglang.srt.mem_cache.layouts import PoolKind
from sglang.srt.mem_cache.layouts.errors import LayoutInvariantError
from support.caches import CacheSpec, CacheTestCase
from support.groups import Group

register_cpu_ci(est_time=5, suite="base-a-test-cpu")


class TestHostPages(CacheTestCase):
    def test_the_pool_answers_from_the_list_of_pages_whoever_asks(self) -> None:
        for pool in (PoolKind.MLA, PoolKind.DSA):
            with self.subTest(pool=pool):
                rank = Group(CacheSpec(ranks=1, pool=pool, host_pages=10)).ranks[0]
                size, host, pages = rank.spec.page_size, rank.cache.token_to_kv_pool_host, rank.controller.host_pages
                self.assertEqual((pages.free, host.available_size()), (10, 10 * size))
                tokens = host.alloc(3 * size)
                assert tokens is not None
                self.assertEqual(tokens.tolist(), list(range(3 * size)))
                self.assertEqual((pages.free, host.available_size()), (7, 7 * size))
                taken = pages.take(2)
                assert taken is not None
                self.assertEqual((taken.tolist(), host.available_size()), ([3, 4], 5 * size))
                self.assertEqual(host.free(tokens), 3 * size)
                self.assertEqual(pages.free, 8)
                self.assertIsNone(host.alloc(9 * size))
                host.clear()
                self.assertEqual((pages.free, host.available_size()), (10, 10 * size))

    def test_pages_that_are_free_or_given_twice_are_refused_with_nothing_changed(self) -> None:
        rank = Group(CacheSpec(ranks=1, host_pages=10)).ranks[0]
        pages = rank.controller.host_pages
        taken = pages.take(3)
        assert taken is not None
        for wrong in ([0, 1, 2, 3], [0, 0], [9], [-1], [-10, -9], [0, 10]):
            with self.assertRaisesRegex(LayoutInvariantError, "not in use or comes twice"):
                pages.give(np.array(wrong, dtype=np.int64))
        with self.assertRaisesRegex(LayoutInvariantError, "not in use or comes twice"):
            rank.cache.token_to_kv_pool_host.free(torch.arange(16, 20))
        self.assertEqual(pages.free, 7)
        pages.give(taken)
        self.assertEqual(pages.free, 10)


class TestKeys(CacheTestCase):
    def test_a_key_is_cut_to_whole_pages_as_sglang_does_it(self) -> None:
        for bigram in (False, True):
            for tokens in range(12):
                key = RadixKey(array("q", range(tokens)), "namespace", bigram, cache_salt="salt")
                ours, theirs = whole_pages_of(key, 4), key.page_aligned(4)
                self.assertEqual(ours[:].token_ids, theirs.token_ids)
                self.assertEqual(
                    (len(ours), ours.extra_key, ours.cache_salt, ours.is_bigram),
                    (len(theirs), theirs.extra_key, theirs.cache_salt, theirs.is_bigram),
                )


if __name__ == "__main__":
    unittest.main()
