"""The nine core invariants of the design, one test or more each, in its order."""

from __future__ import annotations

import ast
import inspect
import unittest
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.pool_host import HostKVCache, HostPoolGroup
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.test.ci.ci_register import register_cpu_ci

import sglang.srt.mem_cache.hicache.radix_cache
from sglang.srt.mem_cache.layouts import PoolKind
from support.caches import LAYERS, CacheSpec, CacheTestCase, Rank, chain, page_views
from support.groups import Group, chain_lanes
from support.scheduler_steps import extend, put_chunk, put_end

if TYPE_CHECKING:
    from array import array

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

_PACKAGE = Path(inspect.getfile(sglang.srt.mem_cache.hicache.radix_cache)).parent
_LAYOUT_NAMES = {
    "CpSharedLayout",
    "IdentityLayout",
    "CpHiCacheNodeMetadata",
    "IdentityNodeMetadata",
    "CpSharedKVLayout",
    "cp_size",
    "cp_rank",
}
# What decides, moves and remembers. Flags, server hooks and commands may name the layouts that they select.
_CORE = [
    *_PACKAGE.glob("*.py"),
    *(file for room in ("slots", "host", "copies", "tree", "requests") for file in (_PACKAGE / room).rglob("*.py")),
]


class TestLogicalState(CacheTestCase):
    def test_1_a_nodes_value_is_the_full_logical_slot_tensor_on_every_rank(self) -> None:
        group = Group(CacheSpec())
        request = group.serve(chain(group.spec, 1, 2, 3, 4))
        expected = group.ranks[0].allocator.slots(request.pages)
        for _ in range(2):  # as inserted, and as loaded back
            for rank in group.ranks:
                (node,) = rank.nodes()
                assert node.value is not None
                self.assertEqual((node.value.dtype, len(node.value)), (torch.int64, 16))
                self.assertEqual(node.value.tolist(), expected.tolist())
                self.assertEqual({page % 3 for page in node.slot_pages.tolist()}, {0, 1, 2})
            group.evict_all()
            again = group.serve(chain(group.spec, 1, 2, 3, 4))
            expected = group.ranks[0].allocator.slots(again.pages)

    def test_2_req_to_token_holds_full_logical_slots_through_chunks_decode_and_finish(self) -> None:
        group = Group(CacheSpec(ranks=2, device_pages=16, host_pages=32))
        rows = [_RequestOn(rank, chain(group.spec, 1, 2, 3)) for rank in group.ranks]
        for row in rows:
            row.prefill(until=6)  # a chunk that ends inside a page
            put_chunk(row.req, row.rank.cache, tokens=6)
            row.prefill(until=12)
            row.decode(7)
        group.settle()
        self.assertEqual(rows[0].slots(), rows[1].slots())
        pages = [slot // 4 % 2 for slot in rows[0].slots()[::4]]
        self.assertEqual(pages, [pages[0] ^ (at % 2) for at in range(5)], "owners take turns along the request")
        for row in rows:
            put_end(row.req, row.rank.cache, tokens=11)  # SGLang keeps whole pages only
            self.assertEqual([node.tokens for node in row.rank.nodes()], [4, 4])
        for row in rows:
            row.rank.allocator.free(torch.tensor(row.slots()[12:]))
        group.settle()
        group.check()

    def test_3_matching_and_admission_count_full_logical_tokens(self) -> None:
        group = Group(CacheSpec(ranks=4, device_pages=2))
        self.assertEqual(group.agreed(lambda rank: rank.allocator.available_size()), 2 * 4 * 4)
        group.serve(chain(group.spec, 1, 2, 3))
        for rank in group.ranks:
            key = rank.key(chain(group.spec, 1, 2, 3, 4))
            self.assertEqual(len(rank.cache.match(key).slots), 12)
            self.assertEqual((rank.cache.evictable_size(), rank.cache.protected_size()), (12, 0))
            self.assertEqual(rank.allocator.available_size(), 2 * 4 * 4 - 12)
        eight = group.start(chain(group.spec, 1, 2, 3, 4, 5, 6, 7, 8))
        self.assertIsNotNone(eight, "four ranks of two pages hold eight pages")

    def test_match_ignores_tokens_after_the_last_whole_page(self) -> None:
        group = Group(CacheSpec())
        group.serve(chain(group.spec, 1, 2))
        for rank in group.ranks:
            key = rank.key(chain(group.spec, 1, 2)[:7])
            self.assertEqual(len(rank.cache.match(key).slots), 4)


class TestPhysicalTiers(CacheTestCase):
    def test_4_host_pools_are_sglangs_own_and_see_rows_of_one_rank_only(self) -> None:
        for pool in (PoolKind.MHA, PoolKind.MLA, PoolKind.DSA):
            group = Group(CacheSpec(pool=pool, host_pages=10))
            for root in range(4):
                group.serve(chain(group.spec, root * 10, root * 10 + 1, root * 10 + 2))
            for rank in group.ranks:
                host = rank.cache.token_to_kv_pool_host
                pools = [entry.host_pool for entry in host.entries] if isinstance(host, HostPoolGroup) else [host]
                for own in pools:
                    self.assertIsInstance(own, HostKVCache)
                    self.assertRegex(type(own).__module__, r"^sglang\.srt\.mem_cache\.pool_host\.")
                    self.assertFalse({"layout_strategy", "cp_size"} & set(vars(own)))
                size = group.spec.page_size
                self.assertEqual(host.size, 10 * size, "host memory follows the physical pool, not the logical size")
                for transfers in rank.engine.writes:
                    for transfer in transfers:
                        self.assertLess(int(transfer.host_indices.max()), host.size)
                        self.assertLess(int(transfer.device_indices.max()), (8 + 1) * size)
                        self.assertGreaterEqual(int(transfer.device_indices.min()), size)

    def test_5_nothing_but_the_strategy_knows_which_layout_it_is(self) -> None:
        self.assertGreater(len(_CORE), 30)
        for module in _CORE:
            tree = ast.parse(module.read_text(encoding="utf-8"))
            names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
            names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
            names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
            self.assertFalse(names & _LAYOUT_NAMES, module.name)
            texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
            self.assertFalse(texts & {"cp_shared", "identity"}, module.name)

    def test_6_without_sharding_host_value_holds_one_physical_host_index_a_token(self) -> None:
        group = Group(CacheSpec(layout="identity", ranks=1))
        group.serve(chain(group.spec, 1, 2))
        (rank,) = group.ranks
        (node,) = rank.nodes()
        ((transfer,),) = rank.engine.writes
        assert node.host_value is not None
        self.assertEqual((node.host_value.dtype, node.host_value.device.type), (torch.int64, "cpu"))
        self.assertEqual(node.host_value.tolist(), transfer.host_indices.tolist())
        self.assertEqual(len(node.host_value), node.tokens)

    def test_7_a_sharded_node_never_keeps_its_subset_in_host_value(self) -> None:
        group = Group(CacheSpec())
        group.serve(chain(group.spec, 1, 2, 3, 4))
        group.serve(chain(group.spec, 1, 2, 5))
        for rank in group.ranks:
            for node in rank.nodes():
                self.assertIsNone(node.host_value)
                with self.assertRaisesRegex(TypeError, "host_value is derived from metadata, got Tensor"):
                    node.host_value = torch.arange(4)  # type: ignore[assignment]  # the mistake under test

    def test_8_backup_state_is_explicit_metadata_whose_parts_agree(self) -> None:
        group = Group(CacheSpec(ranks=4))
        group.serve(chain(group.spec, 1, 2, 3, 4, 5, 6))
        group.serve(chain(group.spec, 1, 2, 3))
        for at in range(2):
            nodes = [rank.nodes()[at] for rank in group.ranks]
            parts = [node.metadata for node in nodes]
            positions = sorted(p for part in parts if part is not None for p in part.owned_positions.tolist())
            self.assertEqual(positions, list(range(nodes[0].tokens)), "each token has one owner")
            for node, part in zip(nodes, parts, strict=True):
                assert part is not None
                self.assertEqual(part.logical_len, node.tokens)
                self.assertEqual(len(part.owned_positions), len(part.host_indices))
                for tensor in (part.owned_positions, part.host_indices):
                    self.assertEqual((tensor.dtype, tensor.device.type), (torch.int64, "cpu"))

    def test_9_accounting_reports_logical_tokens_while_bytes_are_this_ranks(self) -> None:
        group = Group(CacheSpec(ranks=4, pool=PoolKind.DSA))
        group.serve(chain(group.spec, 1, 2))
        self.assertEqual(group.agreed(lambda rank: rank.cache.evict(EvictParams(num_tokens=1)).num_tokens_evicted), 128)
        group.serve(chain(group.spec, 1, 2))
        for rank in group.ranks:
            (node,) = rank.nodes()
            assert node.metadata is not None
            page_bytes = sum(pages.shape[1] for pages in page_views(rank.device_pool))
            own_bytes = len(node.metadata.host_pages) * page_bytes
            stats = rank.cache.stats
            self.assertEqual((stats.backups, stats.backed_up_tokens, stats.backed_up_bytes), (1, 128, own_bytes))
            self.assertEqual((stats.loads, stats.loaded_tokens, stats.loaded_bytes), (1, 128, own_bytes))
            self.assertEqual((stats.evicted_device_tokens, stats.zero_owned_backups), (128, int(own_bytes == 0)))
        group.evict_all()
        self.assertEqual(group.agreed(lambda rank: rank.cache.evict_host(1)), 128)
        self.assertEqual(group.agreed(lambda rank: rank.cache.stats.evicted_host_tokens), 128)
        self.assertEqual(LAYERS, group.ranks[0].device_pool.layer_num)


class _RequestOn:
    """One of SGLang's requests on one rank, driven as its scheduler does."""

    def __init__(self, rank: Rank, tokens: array[int]) -> None:
        self.rank = rank
        self.pool = rank.request_rows
        self.req = Req("request", "", tokens, SamplingParams())
        self.req.kv.req_pool_idx = 1
        self.req.last_node = rank.cache.root_node
        self.base = int(chain_lanes(rank, tokens, None, 0, 1)[0])
        self.filled = 0

    def prefill(self, *, until: int) -> None:
        """Slots for the tokens up to `until`, through SGLang's paged interface."""
        first, end = torch.tensor([self.filled]), torch.tensor([until])
        last = torch.tensor([self.slots()[-1] if self.filled else -1])
        slots = self.rank.allocator.alloc_extend(
            first, first, end, end, last, until - self.filled, rotation_bases=[self.base]
        )
        self._append(slots)

    def decode(self, tokens: int) -> None:
        """Slots for generated tokens, one at a time."""
        for token in range(tokens):
            end, last = torch.tensor([self.filled + 1]), torch.tensor([self.slots()[-1]])
            self._append(self.rank.allocator.alloc_decode(end, end, last))
            self.req.output_ids.append(900_000 + token)

    def slots(self) -> list[int]:
        """The request's row of `req_to_token`, as far as it is filled."""
        row: list[int] = self.pool.req_to_token[1, : self.filled].tolist()
        return row

    def _append(self, slots: torch.Tensor | None) -> None:
        assert slots is not None
        self.pool.write((1, slice(self.filled, self.filled + len(slots))), slots)
        self.filled += len(slots)
        self.req.full_untruncated_fill_ids = self.req.origin_input_ids + self.req.output_ids
        extend(self.req, end=min(self.filled, len(self.req.origin_input_ids)))


if __name__ == "__main__":
    unittest.main()
