"""Our `HiRadixCache` with `IdentityLayout` is observably the same as SGLang 0.5.20's own `HiRadixCache`.

Both are given the same calls. After each, everything that a caller could see is compared: match lengths, host hits,
duplicates, evicted tokens, lock deltas; evictable and protected sizes, free slots and free host memory; every node's
key, tier, host copy, locks, hits and priority. The KV of every matched slot must be what its prefix says.

Where nothing is short, SGLang's class is used as it is, but for one thing: it counts a hit at each insert of a request,
and ours one use a request (`identity.policy.CountsARequestOnce`). Under pressure its faults show, each of which is
first shown here on its own and then corrected in `identity.policy` and `identity.reference`:

- It cannot take back the host copy of a node that is on the device. Once those fill the host, nothing is backed up any
  more and nothing is served from there. Ours gives them up for what leaves the device (`LetsMirrorsGiveWay`).
- To back up n tokens it deletes n tokens of host copies, even if all but one page of that was free.
- For a node larger than the whole host tier it deletes every host copy, and then backs nothing up.
- To load n tokens back it evicts n tokens from the device, even if all but one page of that was free.
- `reset` leaves transfers under way in its records, with all the nodes that they hold. (Nothing that is compared here.)

Deliberate differences: ours counts time in ticks of its own, which order nodes as SGLang's clock does; it protects the
host copies of a load until the load is acknowledged, not only until it is queued; and `is_load_back_event_done` settles
nothing, because it is not called alike on all ranks. None of them shows in these calls.
"""

from __future__ import annotations

import random
import tempfile
import unittest
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, get_args
from unittest import mock

import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase
from typing_extensions import override

from sglang.srt.mem_cache.hicache.accepted import WritePolicy
from sglang.srt.mem_cache.hicache.cpu.support import install_cpu_support
from sglang.srt.mem_cache.hicache.radix_cache import HiRadixCache
from sglang.srt.mem_cache.hicache.tree.copies_ahead import CopiesAhead
from sglang.srt.mem_cache.layouts import PoolKind
from support.identity.content import cached_content_is_right, totals, tree
from support.identity.operations import finish_all, perform
from support.identity.policy import CountsARequestOnce, SGLangHiRadixCache
from support.identity.reference import Case, both_sides
from support.identity.sequences import Kind, Operation, random_operations

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from support.identity.reference import Side

register_cpu_ci(est_time=90, suite="base-a-test-cpu")

EVICTION_POLICIES = ("lru", "lfu", "fifo", "mru", "filo", "priority", "slru")

UNDER_PRESSURE: dict[tuple[PoolKind, int], Case] = {
    (pool, page_size): Case(pool=pool, page_size=page_size, device_pages=device_pages, symbols=symbols, depth=depth)
    for pool, page_size, device_pages, symbols, depth in (
        (PoolKind.MLA, 16, 16, 4, 5),
        (PoolKind.MHA, 4, 18, 4, 6),
        (PoolKind.DSA, 64, 12, 4, 4),
        (PoolKind.MLA, 1, 60, 3, 20),
    )
}
WITHOUT_PRESSURE = {
    (pool, page_size): replace(
        UNDER_PRESSURE[pool, page_size],
        device_pages=device_pages,
        host_ratio=2.0,
        depth=depth,
        symbols=3,
        reference=CountsARequestOnce,
    )
    for pool, page_size, device_pages, depth in (
        (PoolKind.MLA, 16, 500, 4),
        (PoolKind.MHA, 4, 500, 4),
        (PoolKind.DSA, 64, 150, 3),
        (PoolKind.MLA, 1, 9000, 16),
    )
}


def _matrix(sizes: dict[tuple[PoolKind, int], Case]) -> Iterator[Case]:
    """Each write policy with each eviction policy; pools, host layouts and allocators take turns."""
    for number, (write_policy, eviction) in enumerate(product(get_args(WritePolicy), EVICTION_POLICIES)):
        yield replace(
            list(sizes.values())[number % 4],
            write_policy=write_policy,
            eviction=eviction,
            mem_layout=("layer_first", "page_first_direct")[number // 5 % 2],
            lanes=bool(number // 4 % 2),
            host_ratio=(0.7, 2.0)[number // 3 % 2] if sizes is UNDER_PRESSURE else 2.0,
        )


def _assert_alike(ours: Side, theirs: Side, where: str) -> None:
    if totals(ours) != totals(theirs):
        raise AssertionError(f"{where}\n  ours   {totals(ours)}\n  SGLang {totals(theirs)}")
    our_tree, their_tree = tree(ours), tree(theirs)
    if our_tree != their_tree:
        our_only = [node for node in our_tree if node not in their_tree]
        their_only = [node for node in their_tree if node not in our_tree]
        raise AssertionError(f"{where}\n  nodes of ours only   {our_only}\n  nodes of SGLang only {their_only}")


def _compare(case: Case, operations: Sequence[Operation]) -> Counter[str]:
    """Drive both through `operations`, then release everything. Returns how often each outcome was seen."""
    outcomes: Counter[str] = Counter()
    with both_sides(case) as (ours, theirs):
        for step, operation in enumerate(operations):
            where = f"step {step} of {case}: {operation}"
            seen, expected = perform(ours, operation), perform(theirs, operation)
            if seen != expected:
                raise AssertionError(f"{where}\n  ours   {seen}\n  SGLang {expected}")
            _assert_alike(ours, theirs, where)
            outcomes.update(word for word in seen if isinstance(word, str))
        for side in (ours, theirs):
            finish_all(side)
            if not cached_content_is_right(side):
                raise AssertionError(f"{case}: {type(side.cache).__module__} has wrong KV")
        _assert_alike(ours, theirs, f"end of {case}")
        for side in (ours, theirs):
            side.cache.evict(EvictParams(num_tokens=case.device_pages * case.page_size))
            if side.allocator.available_size() != case.device_pages * case.page_size:
                raise AssertionError(f"{case}: {type(side.cache).__module__} lost slots: {totals(side)}")
        _assert_alike(ours, theirs, f"emptied device of {case}")
        if ours.stats is not None:
            outcomes.update({name: getattr(ours.stats, name) for name in ours.stats.__slots__})
    return outcomes


def _after(case: Case, operations: Sequence[Operation]) -> tuple[dict[str, int], dict[str, int]]:
    """Totals of ours and of SGLang after `operations`, which may differ."""
    with both_sides(case) as (ours, theirs):
        for operation in operations:
            perform(ours, operation)
            perform(theirs, operation)
        return totals(ours), totals(theirs)


class _OneRank(CustomTestCase):
    """A process group of one rank, which SGLang's class asks for."""

    _folder: ClassVar[tempfile.TemporaryDirectory[str]]

    @classmethod
    @override
    def setUpClass(cls) -> None:
        install_cpu_support()
        cls._folder = tempfile.TemporaryDirectory()
        store = Path(cls._folder.name) / "store"
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)

    @classmethod
    @override
    def tearDownClass(cls) -> None:
        dist.destroy_process_group()
        cls._folder.cleanup()


class TestIdentityMatchesSGLang(_OneRank):
    def test_without_pressure_the_two_are_the_same(self) -> None:
        outcomes: Counter[str] = Counter()
        for seed, case in enumerate(_matrix(WITHOUT_PRESSURE)):
            outcomes += _compare(case, random_operations(random.Random(seed), case, 120))
        assert outcomes["loaded_tokens"] > 0
        assert outcomes["evicted_host_tokens"] == outcomes["refused_backups"] == outcomes["no room"] == 0

    # Copies ahead of an eviction are not said in terms of SGLang's class: `test_copies_ahead.py` and the model-based
    # test have them. Without them an eviction copies as it goes, and this compares what it does then.
    @mock.patch.object(CopiesAhead, "evicted", new=mock.Mock())
    def test_under_pressure_the_two_are_the_same_but_for_the_faults(self) -> None:
        outcomes: Counter[str] = Counter()
        for seed, case in enumerate(_matrix(UNDER_PRESSURE)):
            outcomes += _compare(case, random_operations(random.Random(100 + seed), case, 500))
        for outcome in (
            "loaded_tokens",
            "refused_loads",
            "refused_backups",
            "evicted_host_tokens",
            "dropped_tokens",
            "no room",
            "no room, retracted",
        ):
            assert outcomes[outcome] > 0, f"no sequence led to {outcome!r}: {outcomes}"

    # Not shrunk: that takes minutes, and the sequences are short.
    @mock.patch.object(CopiesAhead, "evicted", new=mock.Mock())
    @settings(
        max_examples=60,
        phases=(Phase.generate,),
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(data=st.data())
    def test_short_sequences_of_few_keys_are_the_same(self, data: st.DataObject) -> None:
        case = Case(
            page_size=4,
            device_pages=6,
            host_ratio=data.draw(st.sampled_from((0.5, 2.0))),
            write_policy=data.draw(st.sampled_from(get_args(WritePolicy))),
            eviction=data.draw(st.sampled_from(EVICTION_POLICIES)),
            lanes=data.draw(st.booleans()),
        )
        operations = st.builds(
            Operation,
            kind=st.sampled_from(Kind),
            symbols=st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple),
            tail=st.integers(0, 3),
            priority=st.integers(0, 1),
            chunked=st.booleans(),
            quota=st.none() | st.integers(0, 16),
            number=st.integers(0, 15),
        )
        _compare(case, data.draw(st.lists(operations, min_size=8, max_size=30)))


FAULT_CASE = Case(reference=SGLangHiRadixCache, device_pages=8, host_ratio=0.5)  # 8 pages on the device, 5 on the host
FOUR_PAGES_ON_THE_HOST = (
    *(Operation(kind=Kind.INSERT, symbols=(symbol,)) for symbol in (0, 2, 4, 6)),
    Operation(kind=Kind.SETTLE),
    Operation(kind=Kind.EVICT, number=63),
)


class TestFaultsOfSGLang(_OneRank):
    """What the corrected reference corrects, seen in SGLang's own class and not in ours."""

    def test_sglang_deletes_more_host_copies_than_a_backup_needs(self) -> None:
        """Two pages are to be backed up and one is free: one page must go, SGLang lets two go."""
        leaves = (Operation(kind=Kind.SETTLE), Operation(kind=Kind.EVICT, number=63))
        ours, theirs = _after(
            FAULT_CASE, [*FOUR_PAGES_ON_THE_HOST, Operation(kind=Kind.INSERT, symbols=(8, 8)), *leaves]
        )
        assert (ours["free host tokens"], theirs["free host tokens"]) == (0, 16)

    def test_sglang_deletes_every_host_copy_for_a_node_that_cannot_fit(self) -> None:
        """Six pages never fit into five: four copies are lost for nothing."""
        ours, theirs = _after(FAULT_CASE, [*FOUR_PAGES_ON_THE_HOST, Operation(kind=Kind.INSERT, symbols=(8,) * 6)])
        assert (ours["free host tokens"], theirs["free host tokens"]) == (16, 80)

    def test_sglang_keeps_the_copies_of_what_is_on_the_device_and_loses_what_leaves_it(self) -> None:
        """Five mirrors fill the host. A sixth page is used, the first leaves: both can be had from the host."""
        operations = [
            *(Operation(kind=Kind.INSERT, symbols=(symbol,)) for symbol in (0, 2, 4, 6, 8, 10)),
            Operation(kind=Kind.SETTLE),
            *(Operation(kind=Kind.LOCK, symbols=(symbol,)) for symbol in (2, 4, 6, 8, 0)),
            Operation(kind=Kind.EVICT, number=16),
            Operation(kind=Kind.MATCH, symbols=(10,)),
        ]
        with both_sides(FAULT_CASE) as (ours, theirs):
            seen = [[perform(side, operation) for operation in operations][-1] for side in (ours, theirs)]
        assert [tuple(each[:4]) for each in seen] == [
            ("device tokens", 0, "host tokens", 16),
            ("device tokens", 0, "host tokens", 0),
        ]

    def test_sglang_counts_one_request_as_two_uses(self) -> None:
        operations = (
            Operation(kind=Kind.START, symbols=(0, 0), tail=1),
            Operation(kind=Kind.CHUNK, number=2),
            Operation(kind=Kind.FINISH),
        )
        with both_sides(replace(FAULT_CASE, write_policy="write_through_selective")) as (ours, theirs):
            for side in (ours, theirs):
                for operation in operations:
                    perform(side, operation)
            roots: list[Any] = [side.cache.root_node for side in (ours, theirs)]
            hits = [{node.hit_count for node in root.children.values()} for root in roots]
        assert hits == [{1}, {2}]

    def test_sglang_evicts_more_slots_than_a_load_needs(self) -> None:
        """Three pages are to be loaded and two are free: one page must go, SGLang lets three go."""
        operations = [
            Operation(kind=Kind.INSERT, symbols=(0, 0, 0)),
            Operation(kind=Kind.SETTLE),
            Operation(kind=Kind.EVICT, number=48),
            *(Operation(kind=Kind.INSERT, symbols=(symbol,)) for symbol in (2, 4, 6, 8, 10, 12)),
            Operation(kind=Kind.SETTLE),
            Operation(kind=Kind.LOAD_BACK, symbols=(0, 0, 0)),
        ]
        ours, theirs = _after(replace(FAULT_CASE, host_ratio=2.0), operations)
        assert (ours["free slots"], theirs["free slots"]) == (0, 32)
        assert (ours["protected"], theirs["protected"]) == (48, 48)

    def test_sglang_keeps_records_of_transfers_from_before_a_reset(self) -> None:
        with both_sides(FAULT_CASE) as (ours, theirs):
            for side in (ours, theirs):
                perform(side, Operation(kind=Kind.INSERT))
                perform(side, Operation(kind=Kind.RESET))
            assert isinstance(ours.cache, HiRadixCache)
            assert isinstance(theirs.cache, SGLangHiRadixCache)
            assert (len(ours.cache.parts.in_flight.backups), len(theirs.cache.ongoing_write_through)) == (0, 1)


if __name__ == "__main__":
    unittest.main()
