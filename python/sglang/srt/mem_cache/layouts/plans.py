"""Plans: what is to be copied, as frozen data that can be printed, compared and replayed without a GPU.

A strategy makes plans; the transfer engine performs them. A copy is described in *runs*, stretches of
pages that are neighbours on both sides, because one long copy is cheaper than many short ones::

    host pages     7  8  9  4        runs: (host 7, device 20, 3 pages)
    device pages  20 21 22 30              (host 4, device 30, 1 page)

`BackupPlan` exists before host memory is allocated: it says what the node demands of *every* rank, so
that all ranks decide alike. Bound to the host pages that were allocated it becomes a `CopyPlan`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from .errors import LayoutInvariantError
from .exchange import NO_EXCHANGE, PageExchange
from .pages import NO_PAGES, LaneArray, PageArray

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_BREAK = np.ones(1, dtype=np.bool_)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRun:
    """`pages` neighbouring pages from `host_page` and `device_page` on (direction: the plan's user)."""

    host_page: int
    device_page: int
    pages: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class CopyPlan:
    """Pairs of host page and device row page of one rank, coalesced into runs.

    `host_starts`, `device_starts` and `lengths` are int64 arrays of shape ``[runs]``. Device pages are
    *row* pages of this rank's pool; how many rows one has is the pool's to say. The order of the pairs is the order of
    the pages in the node.
    """

    page_size: int
    host_starts: PageArray
    device_starts: PageArray
    lengths: PageArray

    @classmethod
    def from_pages(cls, *, page_size: int, host_pages: PageArray, device_pages: PageArray) -> CopyPlan:
        """Coalesce page pairs, both of shape ``[pages]``; `LayoutInvariantError` if lengths differ."""
        pages = len(host_pages)
        if pages != len(device_pages):
            raise LayoutInvariantError(f"{pages} host pages cannot be paired with {len(device_pages)} device pages")
        if not pages:
            return cls(page_size=page_size, host_starts=NO_PAGES, device_starts=NO_PAGES, lengths=NO_PAGES)
        follows = (host_pages[1:] - host_pages[:-1] == 1) & (device_pages[1:] - device_pages[:-1] == 1)
        bounds = np.flatnonzero(np.concatenate((_BREAK, ~follows, _BREAK)))
        firsts = bounds[:-1]
        return cls(
            page_size=page_size,
            host_starts=host_pages[firsts],
            device_starts=device_pages[firsts],
            lengths=bounds[1:] - firsts,
        )

    @classmethod
    def concat(cls, plans: Sequence[CopyPlan], *, page_size: int) -> CopyPlan:
        """One plan that performs `plans` in order; runs are not merged across plans.

        Raises `LayoutInvariantError` if a plan has another page size.
        """
        for plan in plans:
            if plan.page_size != page_size:
                raise LayoutInvariantError(f"a plan of page_size {plan.page_size} cannot join one of {page_size}")
        return cls(
            page_size=page_size,
            host_starts=np.concatenate([NO_PAGES, *(p.host_starts for p in plans)]),
            device_starts=np.concatenate([NO_PAGES, *(p.device_starts for p in plans)]),
            lengths=np.concatenate([NO_PAGES, *(p.lengths for p in plans)]),
        )

    @property
    def pages(self) -> int:
        """Pages that this rank copies; 0 where it owns nothing."""
        return int(self.lengths.sum())

    @property
    def tokens(self) -> int:
        """Tokens of the pages that this rank copies, of which it may have a part."""
        return self.pages * self.page_size

    def runs(self) -> Iterator[CopyRun]:
        """The runs one by one."""
        for host, device, pages in zip(self.host_starts, self.device_starts, self.lengths, strict=True):
            yield CopyRun(host_page=int(host), device_page=int(device), pages=int(pages))

    def host_pages(self) -> PageArray:
        """Every host page, shape ``[pages]``."""
        return _expand(self.host_starts, self.lengths)

    def device_pages(self) -> PageArray:
        """Every device row page, shape ``[pages]``."""
        return _expand(self.device_starts, self.lengths)

    @override
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CopyPlan):
            return NotImplemented
        return (
            self.page_size == other.page_size
            and np.array_equal(self.host_starts, other.host_starts)
            and np.array_equal(self.device_starts, other.device_starts)
            and np.array_equal(self.lengths, other.lengths)
        )

    __hash__ = None  # type: ignore[assignment]  # compares by content of arrays, so it cannot be a key

    @override
    def __repr__(self) -> str:
        runs = ", ".join(f"host {r.host_page} <-> device {r.device_page} x{r.pages}" for r in self.runs())
        return f"CopyPlan(page_size={self.page_size}, pages={self.pages}, runs=[{runs}])"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BackupPlan:
    """What backing up one node asks of every rank, and what this rank copies.

    `lanes` is the owner on the host of each of the node's pages, `demand_pages` the host pages that each owner needs;
    both are equal on all ranks. `device_pages` are the row pages that this rank backs up, in node order.
    """

    page_size: int
    lanes: LaneArray
    demand_pages: tuple[int, ...]
    device_pages: PageArray

    @property
    def logical_pages(self) -> int:
        """Pages of the node, whoever owns them."""
        return len(self.lanes)

    @property
    def logical_tokens(self) -> int:
        """Tokens of the node, whoever owns them: the unit of locks, quotas and metrics."""
        return self.logical_pages * self.page_size

    @property
    def owned_pages(self) -> int:
        """Host pages that this rank must allocate."""
        return len(self.device_pages)

    def bind(self, host_pages: PageArray) -> CopyPlan:
        """The copy into `host_pages`, shape ``[owned_pages]``, in node order."""
        return CopyPlan.from_pages(page_size=self.page_size, host_pages=host_pages, device_pages=self.device_pages)

    @override
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BackupPlan):
            return NotImplemented
        return (
            self.page_size == other.page_size
            and self.demand_pages == other.demand_pages
            and np.array_equal(self.lanes, other.lanes)
            and np.array_equal(self.device_pages, other.device_pages)
        )

    __hash__ = None  # type: ignore[assignment]  # compares by content of arrays, so it cannot be a key


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """What brings several nodes back. `logical_pages` are those of all of them, equal on all ranks.

    This rank copies `copies`; then, layer by layer, all ranks perform `exchange`.
    """

    page_size: int
    logical_pages: int
    copies: CopyPlan
    exchange: PageExchange = field(default_factory=lambda: NO_EXCHANGE)

    @property
    def logical_tokens(self) -> int:
        """Tokens brought back, whoever owns them."""
        return self.logical_pages * self.page_size


def _expand(starts: PageArray, lengths: PageArray) -> PageArray:
    """``[start, start + 1, ...]`` for each run, in one array of shape ``[sum(lengths)]``."""
    expanded = np.repeat(starts - np.cumsum(lengths) + lengths, lengths)
    expanded += np.arange(len(expanded), dtype=np.int64)
    return expanded
