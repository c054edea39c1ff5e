"""What every layout strategy must do, for `KeyedLayout`."""

from __future__ import annotations

from typing import ClassVar

from keyed_layout import KeyedLayout

from sglang.srt.mem_cache.layouts import CpHiCacheNodeMetadata
from sglang.srt.mem_cache.layouts.testing import LayoutContract, joined, same


class TestKeyedContract(LayoutContract[CpHiCacheNodeMetadata]):
    split_rules: ClassVar = {
        "page_size": same,
        "cp_size": same,
        "cp_rank": same,
        "lanes": joined,
        "host_pages": joined,
    }

    def make_layout(self, *, page_size: int, shard_size: int, shard_rank: int) -> KeyedLayout:
        return KeyedLayout(page_size=page_size, shard_size=shard_size, shard_rank=shard_rank, stripe_pages=3)

    def stated_home(self, slot_page: int, shard_size: int) -> tuple[int, int]:
        row_page, lane = divmod(slot_page, shard_size)
        return lane, row_page
