"""All strategies against the contract suite, each with its own plain way to say where a page lies."""

from __future__ import annotations

import itertools
from typing import ClassVar

from sglang.test.ci.ci_register import register_cpu_ci
from typing_extensions import override

from sglang.srt.mem_cache.layouts import (
    CpHiCacheNodeMetadata,
    CpSharedLayout,
    DcpStripedLayout,
    HostSharedLayout,
    IdentityLayout,
    IdentityNodeMetadata,
)
from sglang.srt.mem_cache.layouts.testing import LayoutContract, joined, same

register_cpu_ci(est_time=30, suite="base-a-test-cpu")


class TestIdentityContract(LayoutContract[IdentityNodeMetadata]):
    split_rules: ClassVar = {"page_size": same, "host_pages": joined}

    @override
    def make_layout(self, *, page_size: int, shard_size: int, shard_rank: int) -> IdentityLayout:
        return IdentityLayout(page_size=page_size)

    @override
    def stated_home(self, slot_page: int, shard_size: int) -> tuple[int, int]:
        return 0, slot_page


class TestCpSharedContract(LayoutContract[CpHiCacheNodeMetadata]):
    split_rules: ClassVar = {
        "page_size": same,
        "cp_size": same,
        "cp_rank": same,
        "lanes": joined,
        "host_pages": joined,
    }

    @override
    def make_layout(self, *, page_size: int, shard_size: int, shard_rank: int) -> CpSharedLayout:
        return CpSharedLayout(page_size=page_size, shard_size=shard_size, shard_rank=shard_rank)

    @override
    def stated_home(self, slot_page: int, shard_size: int) -> tuple[int, int]:
        dealt = [0] * shard_size
        ranks = itertools.cycle(range(shard_size))
        for _ in range(slot_page):
            dealt[next(ranks)] += 1
        rank = next(ranks)
        return rank, dealt[rank]


class TestHostSharedContract(LayoutContract[CpHiCacheNodeMetadata]):
    split_rules: ClassVar = TestCpSharedContract.split_rules

    @override
    def make_layout(self, *, page_size: int, shard_size: int, shard_rank: int) -> HostSharedLayout:
        return HostSharedLayout(page_size=page_size, shard_size=shard_size, shard_rank=shard_rank)

    @override
    def stated_home(self, slot_page: int, shard_size: int) -> tuple[int, int]:
        return 0, slot_page


class TestDcpStripedContract(LayoutContract[IdentityNodeMetadata]):
    split_rules: ClassVar = TestIdentityContract.split_rules
    page_sizes: ClassVar = (16, 64)
    shard_sizes: ClassVar = (1, 2, 4, 8, 16)

    @override
    def make_layout(self, *, page_size: int, shard_size: int, shard_rank: int) -> DcpStripedLayout:
        return DcpStripedLayout(page_size=page_size, shard_size=shard_size, shard_rank=shard_rank)

    @override
    def stated_home(self, slot_page: int, shard_size: int) -> tuple[int, int]:
        return 0, slot_page


class TestCpSharedContractWithoutStatedHomes(LayoutContract[CpHiCacheNodeMetadata]):
    """As another distribution would bind it: a factory and the split rules, nothing else."""

    split_rules: ClassVar = TestCpSharedContract.split_rules
    shard_sizes: ClassVar = (1, 2, 3, 5)
    max_examples: ClassVar = 5

    @override
    def make_layout(self, *, page_size: int, shard_size: int, shard_rank: int) -> CpSharedLayout:
        return CpSharedLayout(page_size=page_size, shard_size=shard_size, shard_rank=shard_rank)
