"""`DcpStripedLayout`: the tokens of a page are dealt to the ranks in turn, as SGLang's ``--dcp-size`` does.

Every rank has a stripe of every page, on the device and on the host, and backs up its own. A page is as many slots as
all ranks' rows of it together: SGLang's allocator has pages of ``--page-size`` times the ranks, its pools of
``--page-size``. With two ranks and pages of four slots::

    slot          0 1 2 3 | 4 5 6 7 | 8 9 10 11 | ...      owner(slot) = slot % ranks
    slot page        0         1          2                 row(slot)   = slot // ranks
    rows, rank 0  0   1     2   3     4   5
    rows, rank 1    0   1     2   3     4   5               row page n is slot page n, of half as many rows
                  reserved

So plans, metadata and lanes are those of `identity`, whose pages are merely narrower, and nobody exchanges anything:
SGLang's attention already reads stripes where they lie.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .checks import refuse_mismatch, refuse_storage, refuse_unknown_pool
from .config import MAX_SHARD_SIZE, LayoutConfig, LayoutEnvironment, check_range
from .errors import LayoutConfigError
from .identity import IdentityLayout, IdentityNodeMetadata

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .pages import LaneArray, PageArray
    from .plans import BackupPlan, LoadPlan


class DcpStripedLayout:
    """A stripe of every page on each rank. Generic parameter: `IdentityNodeMetadata`.

    Shapes, units and errors are those of `KVLayoutStrategy` and `StripedLayout`; below stands what is particular to
    this strategy. Raises `LayoutConfigError` for a page that cannot be dealt out evenly, or an impossible group.
    """

    name = "dcp_striped"
    lane_count = 1
    lane = 0

    def __init__(self, *, page_size: int, shard_size: int, shard_rank: int) -> None:
        check_range("shard_size", shard_size, 1, MAX_SHARD_SIZE)
        check_range("shard_rank", shard_rank, 0, shard_size - 1)
        self._pages = IdentityLayout(page_size=page_size)
        if page_size % shard_size:
            raise LayoutConfigError(
                f"--kv-layout-strategy {self.name}: {shard_size} ranks cannot have equal stripes of a page of "
                f"{page_size} tokens; accepted: a page size that is a multiple of {shard_size}"
            )
        self.page_size = page_size
        self.page_rows = page_size // shard_size
        self.shard_size = shard_size
        self.shard_rank = shard_rank

    @classmethod
    def from_config(cls, config: LayoutConfig) -> DcpStripedLayout:
        """Build from a `LayoutConfig`; it has no settings of its own."""
        config.refuse_unknown_options()
        return cls(page_size=config.page_size, shard_size=config.shard_size, shard_rank=config.shard_rank)

    def validate(self, environment: LayoutEnvironment) -> None:
        """Refuse a storage backend, an unknown pool, and a page size, group or allocator of another geometry."""
        refuse_storage(self.name, environment)
        refuse_unknown_pool(self.name, environment)
        refuse_mismatch(self.name, "page size", self.page_size, environment.page_size)
        refuse_mismatch(self.name, "shard group size", self.shard_size, environment.shard_size)
        refuse_mismatch(self.name, "shard group rank", self.shard_rank, environment.shard_rank)
        refuse_mismatch(self.name, "allocator lanes", self.lane_count, environment.allocator_lanes)

    def logical_tokens(self, physical_tokens: int) -> int:
        """As many slots as all ranks have rows."""
        return physical_tokens * self.shard_size

    def local_rows(self, slots: torch.Tensor) -> torch.Tensor:
        """``slot // ranks`` for this rank's slots, rows of the padding page for all others."""
        slots = slots.to(torch.int64)
        own = slots % self.shard_size == self.shard_rank
        return torch.where(own, slots // self.shard_size, slots % self.page_rows)

    # Pages: `identity`.

    def chain_base(self, first_page: bytes, namespace: str) -> int:
        """There is one lane."""
        return self._pages.chain_base(first_page, namespace)

    def extend_lanes(self, base: int, first_page: int, pages: int) -> LaneArray:
        """Lane 0 for each page."""
        return self._pages.extend_lanes(base, first_page, pages)

    def lanes_of(self, slot_pages: PageArray) -> LaneArray:
        """Lane 0 for each page."""
        return self._pages.lanes_of(slot_pages)

    def plan_backup(self, slot_pages: PageArray) -> BackupPlan:
        """Each rank copies its stripe of every page."""
        return self._pages.plan_backup(slot_pages)

    def finish_backup(self, plan: BackupPlan, host_pages: PageArray) -> IdentityNodeMetadata:
        """Metadata of a node that was given `host_pages`, one a page."""
        return self._pages.finish_backup(plan, host_pages)

    def load_lanes(self, parts: Sequence[IdentityNodeMetadata]) -> LaneArray:
        """Lane 0 for each page of `parts`."""
        return self._pages.load_lanes(parts)

    def plan_load(self, parts: Sequence[IdentityNodeMetadata], slot_pages: PageArray) -> LoadPlan:
        """Each rank copies its stripes back."""
        return self._pages.plan_load(parts, slot_pages)
