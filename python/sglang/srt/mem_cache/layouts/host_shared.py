"""`HostSharedLayout`: every rank keeps every page on the device, and the group keeps each page once on the host.

The device is SGLang's own: slots are rows, nothing is gathered when attention reads. The host holds N times as many
pages, and each rank's link to its host carries one N-th of them, both ways. A load has two steps: each rank copies its
own pages, then the ranks give them to each other. With three ranks::

    slot page            4  5  6  7  8  9 10 ...        row page: the same number, on every rank
    owner on the host    1  2  0  1  2  0  1            the rank that backs it up, and loads it again: page % ranks
    loaded by rank 0           6        9               from its host memory
    received by rank 0   4  5     7  8    10            from their owners, layer by layer

An owner follows from where the page lay when it was backed up, and stays with the host copy: the metadata is that of
`cp_shared`, with owners on the host in place of lanes. Any slot will do for a load, since every rank has every row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .checks import refuse_divergent_content, refuse_mismatch, refuse_storage, refuse_unknown_pool
from .cp_shared import CpHiCacheNodeMetadata
from .errors import LayoutConfigError, LayoutInvariantError
from .exchange import NO_EXCHANGE, PageExchange
from .identity import RESERVED_PAGES, IdentityLayout
from .owner_and_row import CpSharedKVLayout, refuse_reserved_pages
from .pages import page_array
from .plans import BackupPlan, CopyPlan, LoadPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from .config import LayoutConfig, LayoutEnvironment
    from .pages import LaneArray, PageArray


class HostSharedLayout:
    """All pages on every device, each page once on the host. Generic parameter: `CpHiCacheNodeMetadata`.

    Shapes, units and errors are those of `KVLayoutStrategy` and `HostLanesLayout`; below stands what is particular to
    this strategy. Raises `LayoutConfigError` for an impossible geometry.
    """

    name = "host_shared"
    lane_count = 1
    lane = 0

    def __init__(self, *, page_size: int, shard_size: int, shard_rank: int) -> None:
        self._device = IdentityLayout(page_size=page_size)
        self._host = CpSharedKVLayout(page_size=page_size, cp_size=shard_size, cp_rank=shard_rank)
        self.page_size = page_size
        self.host_lane_count = shard_size
        self.host_lane = shard_rank

    @classmethod
    def from_config(cls, config: LayoutConfig) -> HostSharedLayout:
        """Build from a `LayoutConfig`; it has no settings of its own."""
        config.refuse_unknown_options()
        return cls(page_size=config.page_size, shard_size=config.shard_size, shard_rank=config.shard_rank)

    def validate(self, environment: LayoutEnvironment) -> None:
        """Refuse a storage backend, an unknown pool, content that differs by rank, another geometry and group."""
        refuse_storage(self.name, environment)
        refuse_unknown_pool(self.name, environment)
        refuse_divergent_content(self.name, environment)
        refuse_mismatch(self.name, "page size", self.page_size, environment.page_size)
        refuse_mismatch(self.name, "shard group size", self.host_lane_count, environment.shard_size)
        refuse_mismatch(self.name, "shard group rank", self.host_lane, environment.shard_rank)
        refuse_mismatch(self.name, "allocator lanes", self.lane_count, environment.allocator_lanes)

    # On the device: `identity`.

    def logical_tokens(self, physical_tokens: int) -> int:
        """As many slots as rows."""
        return self._device.logical_tokens(physical_tokens)

    def chain_base(self, first_page: bytes, namespace: str) -> int:
        """There is one lane."""
        return self._device.chain_base(first_page, namespace)

    def extend_lanes(self, base: int, first_page: int, pages: int) -> LaneArray:
        """Lane 0 for each page."""
        return self._device.extend_lanes(base, first_page, pages)

    def lanes_of(self, slot_pages: PageArray) -> LaneArray:
        """Lane 0 for each page."""
        return self._device.lanes_of(slot_pages)

    def local_rows(self, slots: torch.Tensor) -> torch.Tensor:
        """The slots themselves."""
        return self._device.local_rows(slots)

    # On the host: each page once.

    def plan_backup(self, slot_pages: PageArray) -> BackupPlan:
        """Each rank copies the pages that it owns on the host."""
        refuse_reserved_pages(slot_pages, RESERVED_PAGES)
        owners = self._host.page_owners(slot_pages)
        demand: list[int] = np.bincount(owners, minlength=self.host_lane_count).tolist()
        return BackupPlan(
            page_size=self.page_size,
            lanes=owners,
            demand_pages=tuple(demand),
            device_pages=slot_pages[owners == self.host_lane],
        )

    def finish_backup(self, plan: BackupPlan, host_pages: PageArray) -> CpHiCacheNodeMetadata:
        """Metadata of a node whose pages of this rank were given `host_pages`."""
        return CpHiCacheNodeMetadata(
            page_size=self.page_size,
            cp_size=self.host_lane_count,
            cp_rank=self.host_lane,
            lanes=plan.lanes,
            host_pages=page_array(host_pages),
        )

    def load_lanes(self, parts: Sequence[CpHiCacheNodeMetadata]) -> LaneArray:
        """Lane 0 for each page of `parts`."""
        return np.zeros(len(_owners(parts)), dtype=np.int16)

    def plan_load(self, parts: Sequence[CpHiCacheNodeMetadata], slot_pages: PageArray) -> LoadPlan:
        """Each rank copies its own pages, and all of them exchange what they have."""
        refuse_reserved_pages(slot_pages, RESERVED_PAGES)
        owners = _owners(parts)
        if len(owners) != len(slot_pages):
            raise LayoutInvariantError(f"a load of {len(owners)} pages was given {len(slot_pages)} new slot pages")
        return LoadPlan(
            page_size=self.page_size,
            logical_pages=len(owners),
            copies=CopyPlan.from_pages(
                page_size=self.page_size,
                host_pages=np.concatenate([part.host_pages for part in parts]),
                device_pages=slot_pages[owners == self.host_lane],
            ),
            exchange=PageExchange(owners=owners, row_pages=page_array(slot_pages))
            if self.host_lane_count > 1
            else NO_EXCHANGE,
        )


def _owners(parts: Sequence[CpHiCacheNodeMetadata]) -> LaneArray:
    if not parts:
        raise LayoutConfigError("parts must hold >= 1 metadata objects, got 0")
    return np.concatenate([part.lanes for part in parts])
