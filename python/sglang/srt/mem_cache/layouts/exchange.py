"""Pages that ranks give each other on the device after a load: the part of a plan that needs peers.

Where a rank has on the host only some of the pages that it stores on the device, a load has two steps::

    copies      each rank copies its own pages from its host memory     over its own link, at its own pace
    exchange    the rank that has a page gives it to all that store it   between devices, in one meeting

    three ranks      page of the load    0  1  2  3  4
                     owner               1  1  2  2  0        the same on every rank
                     row page here       7  8  9  4  5        read on the owner, written elsewhere

Owners are equal on all ranks, so all compute the same counts and sizes and pad alike: nobody has to ask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from typing_extensions import override

from .errors import LayoutInvariantError
from .pages import NO_PAGES, LaneArray, PageArray

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class PageExchange:
    """Which rank has each page of a load after the copies, and where the page lies on this rank.

    `owners` are ranks of the shard group, int16, shape ``[pages]``, equal on all ranks. `row_pages`, int64,
    ``[pages]``, are this rank's; 0, the padding page, stands for a page that it does not store. Raises
    `LayoutInvariantError` if they are not as many.
    """

    owners: LaneArray
    row_pages: PageArray

    def __post_init__(self) -> None:
        if len(self.owners) != len(self.row_pages):
            raise LayoutInvariantError(f"{len(self.owners)} owners for {len(self.row_pages)} row pages of an exchange")

    @classmethod
    def concat(cls, exchanges: Sequence[PageExchange]) -> PageExchange:
        """One exchange of all pages, in order."""
        full = [exchange for exchange in exchanges if exchange.pages]
        if not full:
            return NO_EXCHANGE
        return cls(
            owners=np.concatenate([exchange.owners for exchange in full]),
            row_pages=np.concatenate([exchange.row_pages for exchange in full]),
        )

    @property
    def pages(self) -> int:
        """Pages that change hands or stay, on all ranks together; equal on all."""
        return len(self.owners)

    def received_pages(self, rank: int) -> int:
        """Pages that `rank`, whose exchange this is, gets from others."""
        return int(np.count_nonzero((self.owners != rank) & (self.row_pages != 0)))

    @override
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PageExchange):
            return NotImplemented
        return np.array_equal(self.owners, other.owners) and np.array_equal(self.row_pages, other.row_pages)

    __hash__ = None  # type: ignore[assignment]  # compares by content of arrays, so it cannot be a key

    @override
    def __repr__(self) -> str:
        if not self.pages:
            return "NO_EXCHANGE"
        return f"PageExchange(owners={self.owners.tolist()}, row_pages={self.row_pages.tolist()})"


NO_EXCHANGE: Final = PageExchange(owners=np.empty(0, dtype=np.int16), row_pages=NO_PAGES)
"""What a strategy plans whose ranks load all that they store."""
