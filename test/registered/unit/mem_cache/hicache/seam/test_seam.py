"""What no signature shows of a release: whose clock, whose layers, who unregisters, who tells the events."""

from __future__ import annotations

import ast
import inspect
import re
import unittest
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.pool_host import HostPoolGroup, base, dsa
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.test.ci.ci_register import register_cpu_ci

import sglang.srt.mem_cache.hicache.seam
from sglang.srt.mem_cache import cache_init_params, memory_pool
from sglang.srt.mem_cache.hicache.copies.cuda.page_maps import page_maps
from sglang.srt.mem_cache.hicache.host.pools import build_host_pool
from sglang.srt.mem_cache.hicache.radix_cache import HiRadixCache
from sglang.srt.mem_cache.hicache.seam.features import SINCE_0_5_23
from sglang.srt.mem_cache.hicache.seam.sglang import event_recorder, release_host_memory
from sglang.srt.mem_cache.layouts import PoolKind
from support.caches import CacheSpec, CacheTestCase, chain
from support.groups import Group

if TYPE_CHECKING:
    from collections.abc import Iterator

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

SEAM = Path(next(iter(sglang.srt.mem_cache.hicache.seam.__path__)))
PACKAGE = SEAM.parent
newest_only = unittest.skipUnless(SINCE_0_5_23, "older releases have no such call")


class TestClock(CacheTestCase):
    @newest_only
    def test_a_touched_prefix_is_the_youngest_by_the_trees_own_clock_on_every_rank(self) -> None:
        group = Group(CacheSpec(ranks=2))
        for page in (1, 2, 3):
            group.serve(chain(group.spec, page))
        calls: list[Any] = group.each(lambda rank: rank.cache)  # older releases have no such call
        for rank, cache in zip(group.ranks, calls, strict=True):
            cache.touch_prefix(rank.key(chain(group.spec, 1)))
        ticks = group.agreed(lambda rank: [node.last_access_time for node in rank.nodes()])
        self.assertTrue(all(isinstance(tick, int) for tick in ticks), ticks)
        self.assertEqual(max(ticks), ticks[0])
        group.each(lambda rank: rank.cache.evict(EvictParams(num_tokens=8)))
        for rank in group.ranks:
            kept = [node.key.token_ids[0] for node in rank.nodes() if node.value is not None]
            self.assertEqual(kept, [1_000])

    def test_no_inherited_method_gives_nodes_a_time(self) -> None:
        taken = []
        for name, method in vars(RadixCache).items():
            if inspect.isfunction(method) and getattr(HiRadixCache, name) is method:
                text = inspect.getsource(method)
                if ("last_access_time" in text or "_match_prefix_helper" in text) and not name.startswith("_"):
                    taken.append(name)
        self.assertEqual(taken, [], "methods of SGLang's that would put a clock of this rank into our nodes")


class TestPools(CacheTestCase):
    @newest_only
    def test_a_layer_without_an_index_has_no_host_layer_and_the_others_theirs(self) -> None:
        page, skipped = 64, [False, True, False]
        fields: dict[str, Any] = {"skip_topk_layers": skipped}  # a field that our stub lacks
        device = memory_pool.DSATokenToKVPool(
            size=4 * page,
            page_size=page,
            kv_lora_rank=4,
            dtype=torch.bfloat16,
            qk_rope_head_dim=2,
            layer_num=3,
            device="cpu",
            index_head_dim=128,
            enable_memory_saver=False,
            kv_cache_dim=6,
            **fields,
        )
        host = build_host_pool(device, page_size=page, mem_layout="layer_first")
        assert isinstance(host, HostPoolGroup)
        index = host.entries[1].host_pool
        buffers = vars(index)["index_k_with_scale_buffer"]
        maps = page_maps(host.entries, page_size=page)
        assert maps is not None
        self.assertEqual(len(buffers), 2, "the host has the layers with an index only")
        self.assertEqual(maps[-1].host_bases.tolist(), [buffers[0].data_ptr(), 0, buffers[1].data_ptr()])

    def test_every_pinned_buffer_is_unregistered_once(self) -> None:
        (rank,) = Group(CacheSpec(ranks=1, pool=PoolKind.DSA)).ranks
        host = rank.cache.token_to_kv_pool_host
        assert isinstance(host, HostPoolGroup)
        pools = [entry.host_pool for entry in host.entries]
        buffers = [pools[0].kv_buffer, vars(pools[1])["index_k_with_scale_buffer"]]
        addresses = [buffer.data_ptr() for buffer in buffers if isinstance(buffer, torch.Tensor)]
        seen: list[int] = []
        unregister = lambda buffer: seen.append(buffer.data_ptr())  # noqa: E731
        ours = "sglang.srt.mem_cache.hicache.seam.sglang_until_0_5_20._cuda_host_unregister"
        for pool in pools:
            pool.pin_memory = True
        with (
            mock.patch.object(base, "_is_cuda", new=True),
            mock.patch.object(dsa, "_is_cuda", new=True),
            mock.patch.object(base, "_cuda_host_unregister", unregister),
            mock.patch.object(dsa, "_cuda_host_unregister", unregister, create=True),
            mock.patch("torch.cuda.is_available", return_value=True),
            mock.patch(ours, unregister) if not SINCE_0_5_23 else mock.patch("torch.cuda.is_available"),
        ):
            for _ in range(2):
                for pool in pools:
                    release_host_memory(pool)
        self.assertEqual(sorted(seen), sorted(addresses))


class TestEvents(CacheTestCase):
    def test_events_are_told_in_the_format_that_the_server_asked_for(self) -> None:
        (rank,) = Group(CacheSpec(ranks=1)).ranks
        fields: dict[str, Any] = {"dynamo_kv_event_format": True} if SINCE_0_5_23 else {}
        params = cache_init_params.CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=rank.allocator,
            page_size=4,
            enable_kv_cache_events=True,
            **fields,
        )
        theirs, ours = RadixCache(params).kv_events, event_recorder(params)
        self.assertTrue(ours.enabled)
        same = {name: value for name, value in vars(theirs).items() if isinstance(value, (bool, int, str))}
        self.assertEqual({name: vars(ours)[name] for name in same}, same)


class TestOnlyTheSeamKnowsReleases(unittest.TestCase):
    def test_nothing_else_of_the_package_or_the_commands_asks_which_release_it_is(self) -> None:
        askers = [
            f"{file.name}: {asked}"
            for folder in (PACKAGE, PACKAGE.parents[3] / "kvlayouts")
            for file in folder.rglob("*.py")
            if not file.is_relative_to(SEAM)
            for asked in _questions(file.read_text(encoding="utf-8"))
        ]
        self.assertEqual(askers, [])

    def test_each_way_to_ask_is_noticed(self) -> None:
        for text in (
            "if SINCE_0_5_23: pass",
            "from x import SINCE_0_5_23 as newest",
            "features.SINCE_0_5_23",
            "version('sglang')",
            "metadata.version('sglang')",
            "sglang.__version__",
            "found = '0.5.23'",
        ):
            self.assertEqual(len(list(_questions(text))), 1, text)


def _questions(text: str) -> Iterator[str]:
    """What a module asks that only the seam may ask."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Name(id=name) | ast.alias(name=name) | ast.Attribute(attr=name) if name.startswith("SINCE_"):
                yield name
            case ast.Attribute(value=ast.Name(id="sglang"), attr="__version__"):
                yield ast.unparse(node)
            case ast.Call(
                func=ast.Name(id="version") | ast.Attribute(attr="version"), args=[ast.Constant(value="sglang")]
            ):
                yield ast.unparse(node)
            case ast.Constant(value=str(words)) if re.fullmatch(r"0\.5\.\d+", words):
                yield words


if __name__ == "__main__":
    unittest.main()
