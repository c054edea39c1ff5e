"""`IdentityLayout`: every rank holds every page, as SGLang's own HiCache does.

A slot is a row, one lane, one host page a device page. This is the layout that changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .checks import refuse_mismatch, refuse_storage, refuse_unknown_pool
from .config import LayoutConfig, LayoutEnvironment, check_range
from .errors import LayoutConfigError, LayoutInvariantError
from .owner_and_row import refuse_reserved_pages
from .pages import LaneArray, PageArray, page_array, tokens_of_pages, whole_pages
from .plans import BackupPlan, CopyPlan, LoadPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

RESERVED_PAGES = 1  # row page 0 is SGLang's padding


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IdentityNodeMetadata:
    """Host pages of a node, one for each of its pages: int64, shape ``[pages]``."""

    page_size: int
    host_pages: PageArray

    @property
    def logical_len(self) -> int:
        """Tokens of the node."""
        return len(self.host_pages) * self.page_size

    @property
    def pages_per_lane(self) -> tuple[int, ...]:
        """One lane that holds every page."""
        return (len(self.host_pages),)

    @property
    def legacy_host_value(self) -> torch.Tensor:
        """Physical host indices, one a token: int64, CPU, shape ``[logical_len]``."""
        return tokens_of_pages(self.host_pages, self.page_size)

    def split(self, split_len: int) -> tuple[IdentityNodeMetadata, IdentityNodeMetadata]:
        """The first `split_len` tokens and the rest; see `NodeMetadata.split`."""
        check_range("split_len", split_len, 0, self.logical_len)
        pages = whole_pages(split_len, self.page_size, "split_len")
        return (
            IdentityNodeMetadata(page_size=self.page_size, host_pages=self.host_pages[:pages].copy()),
            IdentityNodeMetadata(page_size=self.page_size, host_pages=self.host_pages[pages:].copy()),
        )


class IdentityLayout:
    """Every page on every rank. Generic parameter of the contract: `IdentityNodeMetadata`.

    Shapes, units and errors are those of `KVLayoutStrategy`; below stands what is particular to this strategy.
    Raises `LayoutConfigError` for a page size below 1.
    """

    name = "identity"
    lane_count = 1
    lane = 0

    def __init__(self, *, page_size: int) -> None:
        check_range("page_size", page_size, 1)
        self.page_size = page_size

    @classmethod
    def from_config(cls, config: LayoutConfig) -> IdentityLayout:
        """Build from a `LayoutConfig`; a shard group of any size is fine, since nothing is shared out."""
        config.refuse_unknown_options()
        return cls(page_size=config.page_size)

    def validate(self, environment: LayoutEnvironment) -> None:
        """Refuse a storage backend, an unknown pool, another page size or a sharded allocator."""
        refuse_storage(self.name, environment)
        refuse_unknown_pool(self.name, environment)
        refuse_mismatch(self.name, "page size", self.page_size, environment.page_size)
        refuse_mismatch(self.name, "allocator lanes", self.lane_count, environment.allocator_lanes)

    def logical_tokens(self, physical_tokens: int) -> int:
        """As many slots as rows."""
        return physical_tokens

    def chain_base(self, first_page: bytes, namespace: str) -> int:
        """There is one lane."""
        return 0

    def extend_lanes(self, base: int, first_page: int, pages: int) -> LaneArray:
        """Lane 0 for each page."""
        return np.zeros(pages, dtype=np.int16)

    def lanes_of(self, slot_pages: PageArray) -> LaneArray:
        """Lane 0 for each page."""
        return np.zeros(len(slot_pages), dtype=np.int16)

    def local_rows(self, slots: torch.Tensor) -> torch.Tensor:
        """The slots themselves."""
        return slots.long()

    def plan_backup(self, slot_pages: PageArray) -> BackupPlan:
        """Copy every page from the row page of the same number."""
        refuse_reserved_pages(slot_pages, RESERVED_PAGES)
        return BackupPlan(
            page_size=self.page_size,
            lanes=self.lanes_of(slot_pages),
            demand_pages=(len(slot_pages),),
            device_pages=page_array(slot_pages),  # a plan outlives the call; the argument may be a view
        )

    def finish_backup(self, plan: BackupPlan, host_pages: PageArray) -> IdentityNodeMetadata:
        """Metadata of a node that was given `host_pages`, one a page."""
        if len(host_pages) != plan.owned_pages:
            raise LayoutInvariantError(f"backup of {plan.owned_pages} pages was given {len(host_pages)} host pages")
        return IdentityNodeMetadata(page_size=self.page_size, host_pages=page_array(host_pages))

    def load_lanes(self, parts: Sequence[IdentityNodeMetadata]) -> LaneArray:
        """Lane 0 for each page of `parts`."""
        return np.zeros(len(_host_pages(parts)), dtype=np.int16)

    def plan_load(self, parts: Sequence[IdentityNodeMetadata], slot_pages: PageArray) -> LoadPlan:
        """Copy every host page to the row page of the new slot page's number."""
        refuse_reserved_pages(slot_pages, RESERVED_PAGES)
        host_pages = _host_pages(parts)
        return LoadPlan(
            page_size=self.page_size,
            logical_pages=len(host_pages),
            copies=CopyPlan.from_pages(page_size=self.page_size, host_pages=host_pages, device_pages=slot_pages),
        )


def _host_pages(parts: Sequence[IdentityNodeMetadata]) -> PageArray:
    if not parts:
        raise LayoutConfigError("parts must hold >= 1 metadata objects, got 0")
    return np.concatenate([part.host_pages for part in parts])
