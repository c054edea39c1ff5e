"""`CpSharedKVLayout`: the bijection between logical slots and (owner, physical row).

Pages are dealt to the ranks of the shard group in turn. With ``page_size = 2`` and ``cp_size = 3``::

    slot    0 1 | 2 3 | 4 5 | 6 7 | 8 9 | 10 11 | 12 13 | ...
    page     0     1     2     3     4      5       6
    owner    0     1     2     0     1      2       0
    row     0 1   0 1   0 1   2 3   2 3    2 3     4 5
           `--- reserved ---'

    owner(slot) = (slot // page_size) % cp_size
    row(slot)   = (slot // (page_size * cp_size)) * page_size + slot % page_size

The first `cp_size` pages are reserved: they are row page 0 of each rank, which SGLang's pools use as
padding. SGLang 0.5.23's ``PageInterleavePlacement`` computes the same mapping.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from .config import MAX_SHARD_SIZE, check_range
from .errors import LayoutConfigError

if TYPE_CHECKING:
    from .pages import LaneArray, PageArray

IndexT = TypeVar("IndexT", torch.Tensor, "np.ndarray[tuple[int, ...], np.dtype[np.int64]]")
"""An index tensor or array of int64; results have the same kind, shape and device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpSharedKVLayout:
    """Slot, owner and row arithmetic of one rank; pure, stateless, no device synchronisation.

    Raises `LayoutConfigError` if a size is below 1 or `cp_rank` is outside the group.
    """

    page_size: int
    cp_size: int
    cp_rank: int = 0

    def __post_init__(self) -> None:
        check_range("page_size", self.page_size, 1)
        check_range("cp_size", self.cp_size, 1, MAX_SHARD_SIZE)
        check_range("cp_rank", self.cp_rank, 0, self.cp_size - 1)

    @property
    def reserved_pages(self) -> int:
        """Logical pages below this one are padding and never handed out."""
        return self.cp_size

    @property
    def reserved_slots(self) -> int:
        """Slots below this one are padding and never handed out."""
        return self.cp_size * self.page_size

    # Token-wise, on tensors (any device) or arrays.

    def owner(self, slots: IndexT) -> IndexT:
        """Rank that stores each slot, same shape as `slots`."""
        return (slots // self.page_size) % self.cp_size

    def owned_by_this_rank(self, slots: IndexT) -> IndexT:
        """Boolean mask of the slots that `cp_rank` stores, same shape as `slots`."""
        mask: IndexT = self.owner(slots) == self.cp_rank
        return mask

    def logical_locs_to_physical(self, slots: IndexT) -> IndexT:
        """Row of each slot in its owner's pool, same shape as `slots`. Does not check its input."""
        return (slots // self.reserved_slots) * self.page_size + slots % self.page_size

    def local_rows(self, slots: torch.Tensor) -> torch.Tensor:
        """Row of each slot that `cp_rank` stores, a row of the padding page for all others.

        int64, same shape and device as `slots`; nothing waits for the device.
        """
        slots = slots.to(torch.int64)
        rows = self.logical_locs_to_physical(slots)
        return torch.where(self.owned_by_this_rank(slots), rows, slots % self.page_size)

    def physical_to_logical(self, rows: IndexT, owner: int) -> IndexT:
        """Slot of each row of rank `owner`, same shape as `rows`: the inverse of `logical_locs_to_physical`.

        Raises `LayoutConfigError` if `owner` is outside the group.
        """
        check_range("owner", owner, 0, self.cp_size - 1)
        pages = rows // self.page_size
        return (pages * self.cp_size + owner) * self.page_size + rows % self.page_size

    # Page-wise, on host arrays: what strategies use.

    def page_owners(self, slot_pages: PageArray) -> LaneArray:
        """Owner of each logical page, int16, shape ``[pages]``."""
        return self.owners_and_rows(slot_pages)[0]

    def row_pages(self, slot_pages: PageArray) -> PageArray:
        """Row page of each logical page in its owner's pool, shape ``[pages]``."""
        return slot_pages // self.cp_size

    def owners_and_rows(self, slot_pages: PageArray) -> tuple[LaneArray, PageArray]:
        """`page_owners` and `row_pages` at once, each ``[pages]``, by one division: numpy's remainder takes longer."""
        rows = slot_pages // self.cp_size
        return (slot_pages - rows * self.cp_size).astype(np.int16), rows

    def pages_of_rows(self, row_pages: PageArray, owner: int) -> PageArray:
        """Logical pages of the row pages of rank `owner`, shape ``[pages]``.

        Raises `LayoutConfigError` if `owner` is outside the group.
        """
        check_range("owner", owner, 0, self.cp_size - 1)
        return row_pages * self.cp_size + owner

    def check_slot_pages(self, slot_pages: PageArray) -> None:
        """Raise `LayoutConfigError` if any of the logical pages, shape ``[pages]``, is a reserved one."""
        refuse_reserved_pages(slot_pages, self.reserved_pages)


def refuse_reserved_pages(slot_pages: PageArray, reserved_pages: int) -> None:
    """Raise `LayoutConfigError` if any of the logical pages, shape ``[pages]``, lies below `reserved_pages`."""
    if slot_pages.size and int(slot_pages.min()) < reserved_pages:
        raise LayoutConfigError(
            f"slot page must be >= {reserved_pages} (pages below are reserved), got {int(slot_pages.min())}"
        )
