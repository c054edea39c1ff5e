"""`KeyedLayout`: neighbouring pages stay together on one rank, and each page has a key for a storage tier.

With four ranks, stripes of two pages and a chain whose base is lane 1::

    page of the chain    0  1 | 2  3 | 4  5 | 6  7 | 8  9
    lane (owner)         1  1   2  2   3  3   0  0   1  1

A rank stores or fetches the pages of a stripe in one request. Rows, plans and metadata are those of
`CpSharedLayout`, which this strategy asks; only the order of the lanes along a chain is another one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sglang.srt.mem_cache.layouts import CpSharedLayout, LayoutConfigError, LayoutInvariantError, checks
from sglang.srt.mem_cache.layouts.config import check_range

from .keys import LAYOUT, PageKey, check_store

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from sglang.srt.mem_cache.layouts import (
        BackupPlan,
        CpHiCacheNodeMetadata,
        LayoutConfig,
        LayoutEnvironment,
        LoadPlan,
    )
    from sglang.srt.mem_cache.layouts.pages import LaneArray, PageArray

MAX_STRIPE_PAGES = 1024


class KeyedLayout:
    """Pages dealt to the ranks in stripes of `stripe_pages`. Generic parameter: `CpHiCacheNodeMetadata`.

    Raises `LayoutConfigError` for an impossible geometry, stripe or store.
    """

    name = LAYOUT

    def __init__(
        self, *, page_size: int, shard_size: int, shard_rank: int, stripe_pages: int = 4, store: str = "kv"
    ) -> None:
        check_range("--kv-layout-config: stripe_pages", stripe_pages, 1, MAX_STRIPE_PAGES)
        self.dealt = CpSharedLayout(page_size=page_size, shard_size=shard_size, shard_rank=shard_rank)
        self.page_size = page_size
        self.lane_count = shard_size
        self.lane = shard_rank
        self.stripe_pages = stripe_pages
        self.store = check_store(store)

    @classmethod
    def from_config(cls, config: LayoutConfig) -> KeyedLayout:
        """Build from a `LayoutConfig`. Settings: ``stripe_pages`` (default 4) and ``store`` (default "kv")."""
        config.refuse_unknown_options("stripe_pages", "store")
        stripe_pages = config.options.get("stripe_pages", 4)
        store = config.options.get("store", "kv")
        if not isinstance(stripe_pages, int) or isinstance(stripe_pages, bool):
            raise LayoutConfigError(f"--kv-layout-config: stripe_pages must be a whole number, got {stripe_pages!r}")
        if not isinstance(store, str):
            raise LayoutConfigError(f"--kv-layout-config: store must be a string, got {store!r}")
        return cls(
            page_size=config.page_size,
            shard_size=config.shard_size,
            shard_rank=config.shard_rank,
            stripe_pages=stripe_pages,
            store=store,
        )

    # Which lane a page is in.

    def chain_base(self, first_page: bytes, namespace: str) -> int:
        """As `CpSharedLayout`: a hash of the chain's first page."""
        return self.dealt.chain_base(first_page, namespace)

    def extend_lanes(self, base: int, first_page: int, pages: int) -> LaneArray:
        """``(base + page // stripe_pages) % lane_count`` for each page of the chain."""
        chain_pages = np.arange(first_page, first_page + pages, dtype=np.int64)
        return ((base + chain_pages // self.stripe_pages) % self.lane_count).astype(np.int16)

    def lanes_of(self, slot_pages: PageArray) -> LaneArray:
        """Slot pages belong to the ranks in turn, whichever chain uses them."""
        return self.dealt.lanes_of(slot_pages)

    # What the slots are worth.

    def logical_tokens(self, physical_tokens: int) -> int:
        """`lane_count` times the rows of one rank."""
        return self.dealt.logical_tokens(physical_tokens)

    def local_rows(self, slots: torch.Tensor) -> torch.Tensor:
        """Rows of this rank's slots, the padding page for all others."""
        return self.dealt.local_rows(slots)

    # Backup, split and load back.

    def plan_backup(self, slot_pages: PageArray) -> BackupPlan:
        """Each rank copies the pages of its lane."""
        return self.dealt.plan_backup(slot_pages)

    def finish_backup(self, plan: BackupPlan, host_pages: PageArray) -> CpHiCacheNodeMetadata:
        """The lane of each page, and this rank's host pages."""
        return self.dealt.finish_backup(plan, host_pages)

    def load_lanes(self, parts: Sequence[CpHiCacheNodeMetadata]) -> LaneArray:
        """The owners at backup: a page can only come back on the rank that has it."""
        return self.dealt.load_lanes(parts)

    def plan_load(self, parts: Sequence[CpHiCacheNodeMetadata], slot_pages: PageArray) -> LoadPlan:
        """Each rank copies its own host pages to the rows of the new slots."""
        return self.dealt.plan_load(parts, slot_pages)

    # What it works with.

    def validate(self, environment: LayoutEnvironment) -> None:
        """Refuse a storage backend, unknown pools, pools whose content differs by rank, and another geometry."""
        if environment.storage_backend is not None:
            raise LayoutConfigError(
                f"--kv-layout-strategy {self.name} does not support --hicache-storage-backend "
                f"{environment.storage_backend}: it can name its pages, but no storage tier asks it to yet; "
                "drop --hicache-storage-backend (accepted: none)"
            )
        checks.refuse_unknown_pool(self.name, environment)
        checks.refuse_divergent_content(self.name, environment)
        for what, ours, theirs in (
            ("page size", self.page_size, environment.page_size),
            ("shard group size", self.lane_count, environment.shard_size),
            ("shard group rank", self.lane, environment.shard_rank),
            ("allocator lanes", self.lane_count, environment.allocator_lanes),
        ):
            checks.refuse_mismatch(self.name, what, ours, theirs)

    # Storage.

    def page_key(self, page_hash: str, lane: int) -> PageKey:
        """Key of a page in any lane: every rank gives the same answer."""
        check_range("lane", lane, 0, self.lane_count - 1)
        return PageKey(
            page_hash=page_hash,
            store=self.store,
            page_tokens=self.page_size,
            shard=lane,
            shard_count=self.lane_count,
        )

    def storage_keys(self, page_hashes: Sequence[str], lanes: LaneArray) -> list[str]:
        """One key for each page of this rank, in node order; see `StorageAwareLayout`."""
        if len(page_hashes) != len(lanes):
            raise LayoutInvariantError(f"{len(page_hashes)} page hashes for {len(lanes)} pages")
        return [
            str(self.page_key(page_hash, self.lane))
            for page_hash, lane in zip(page_hashes, lanes, strict=True)
            if lane == self.lane
        ]
