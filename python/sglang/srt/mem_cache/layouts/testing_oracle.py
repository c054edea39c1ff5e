"""A shard group made of byte arrays: replays plans page by page, token by token, in plain numpy.

It shares no code with any strategy. Where a logical page lies (its *home*: lane and row page) it is told by
the binding, or finds out by asking every rank for the rows of that one page. Which of a page's tokens a rank has it
asks one page at a time, so that answers to many at once can be held against that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic

import numpy as np
import torch

from .errors import LayoutConfigError
from .facts import host_lanes, page_rows
from .protocol import KVLayoutStrategy, MetadataT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from .pages import LaneArray, PageArray
    from .plans import BackupPlan, CopyPlan, LoadPlan

    Bytes = npt.NDArray[np.uint8]
    Home = tuple[int, int]
    Place = tuple[npt.NDArray[np.intp], PageArray]

TOKEN_BYTES = 8
_MOST_RESERVED_PAGES = 100_000


class SimulatedGroup(Generic[MetadataT]):
    """Device pool, host pool and free lists of every rank of one shard group.

    `layouts` holds one strategy a rank. Each rank has `row_pages` device pages besides padding page 0, and `host_pages`
    host pages; both pools start full of noise. Free pages are handed out in random order, or in ascending order if
    `shuffled` is false. `home` gives the home of a logical page, or is None to find out.
    """

    def __init__(
        self,
        layouts: Sequence[KVLayoutStrategy[MetadataT]],
        *,
        row_pages: int,
        host_pages: int,
        seed: int,
        shuffled: bool = True,
        home: Callable[[int], Home] | None = None,
    ) -> None:
        self.layouts = layouts
        without = set(range(layouts[0].lane_count)) - {layout.lane for layout in layouts}
        assert not without, f"lanes {sorted(without)} have no rank"
        self.page_size = layouts[0].page_size
        self.page_rows = page_rows(layouts[0])
        self.row_pages = row_pages
        self.host_lanes = [host_lanes(layout) for layout in layouts]
        self.rng = np.random.default_rng(seed)
        self.device = self._noise(len(layouts), (row_pages + 1) * self.page_rows)
        self.host = self._noise(len(layouts), host_pages * self.page_rows)
        self._places: dict[int, list[Place]] = {}
        self._home = home if home is not None else self.ask_home
        first = self.first_usable_page()
        usable = first + layouts[0].logical_tokens(row_pages * self.page_rows) // self.page_size
        self.usable_pages = range(first, usable)
        self._free_slots = self._order(self.usable_pages, shuffled)
        self._free_host = [self._order(range(host_pages), shuffled) for _ in layouts]

    # Where pages lie.

    def first_usable_page(self) -> int:
        """The lowest logical page that may be backed up; those below are reserved. `AssertionError` without one."""
        for page in range(_MOST_RESERVED_PAGES):
            try:
                self.layouts[0].plan_backup(np.array([page], dtype=np.int64))
            except LayoutConfigError:
                continue
            return page
        raise AssertionError(f"plan_backup refuses every logical page below {_MOST_RESERVED_PAGES}")

    def places(self, slot_page: int) -> list[Place]:
        """For each rank, which tokens of a logical page it stores, and in which rows; asked for this page alone."""
        if slot_page not in self._places:
            slots = torch.arange(slot_page * self.page_size, (slot_page + 1) * self.page_size)
            by_rank = [layout.local_rows(slots).numpy() for layout in self.layouts]
            stored = [rows >= self.page_rows for rows in by_rank]
            self._places[slot_page] = [(np.flatnonzero(s), rows[s]) for s, rows in zip(stored, by_rank, strict=True)]
        return self._places[slot_page]

    def ask_home(self, slot_page: int) -> Home:
        """Lane and row page of a logical page, from the rows that each rank says it has.

        `AssertionError` where the ranks contradict each other, where a rank has no whole row page, and unless each
        token is on one rank or on all.
        """
        homes: dict[int, int] = {}
        copies = np.zeros(self.page_size, dtype=np.int64)
        for rank, (tokens, rows) in enumerate(self.places(slot_page)):
            copies[tokens] += 1
            if not len(rows):
                continue
            lane, row_page = self.layouts[rank].lane, int(rows[0]) // self.page_rows
            whole = range(row_page * self.page_rows, (row_page + 1) * self.page_rows)
            assert rows.tolist() == list(whole), f"rank {rank} has page {slot_page} in rows {rows}, no whole row page"
            assert homes.setdefault(lane, row_page) == row_page, f"page {slot_page} has two row pages in lane {lane}"
        assert len(homes) == 1, f"page {slot_page} must lie in one lane, is in {sorted(homes)}"
        everywhere = len(self.layouts) if self.layouts[0].lane_count == 1 else 1
        assert set(copies.tolist()) in ({1}, {everywhere}), f"tokens of page {slot_page} are on {copies} ranks"
        return next(iter(homes.items()))

    def home(self, slot_page: int) -> Home:
        """Lane and row page of a logical page."""
        return self._home(slot_page)

    def lanes(self, slot_pages: PageArray) -> list[int]:
        """Lane of each page, by `home`; `slot_pages` has shape ``[pages]``."""
        return [self.home(int(page))[0] for page in slot_pages]

    # Free lists.

    def allocate_slots(self, lanes: LaneArray) -> PageArray:
        """Free logical pages in these lanes, in this order, shape ``[pages]``; `AssertionError` if a lane has none."""
        return np.array([self._take_slot(int(lane)) for lane in lanes], dtype=np.int64)

    def _take_slot(self, lane: int) -> int:
        for position, page in enumerate(self._free_slots):
            if self.home(page)[0] == lane:
                return self._free_slots.pop(position)
        raise AssertionError(f"no logical page of lane {lane} is left: enlarge row_pages")

    def free_slots(self, slot_pages: PageArray) -> None:
        """Give logical pages, shape ``[pages]``, back, and overwrite their rows."""
        self._free_slots.extend(int(page) for page in slot_pages)
        self.write(slot_pages)

    def allocate_host(self, rank: int, pages: int) -> PageArray:
        """Free host pages of one rank, shape ``[pages]``. `AssertionError` if it has not as many left."""
        assert len(self._free_host[rank]) >= pages, f"rank {rank} has no {pages} host pages left"
        return np.array([self._free_host[rank].pop(0) for _ in range(pages)], dtype=np.int64)

    # Content.

    def write(self, slot_pages: PageArray) -> Bytes:
        """Fill logical pages with new content, shape ``[pages * page_size, TOKEN_BYTES]``, and return it."""
        content = self._noise(len(slot_pages) * self.page_size)
        for number, page in enumerate(slot_pages.tolist()):
            own = content[number * self.page_size :]
            for rank, (tokens, rows) in enumerate(self.places(page)):
                self.device[rank, rows] = own[tokens]
        return content

    def check(self, slot_pages: PageArray, content: Bytes, what: str) -> None:
        """Fail unless every rank has the bytes that it stores of `content`, ``[pages * page_size, TOKEN_BYTES]``."""
        for number, page in enumerate(slot_pages.tolist()):
            own = content[number * self.page_size :]
            for rank, (tokens, rows) in enumerate(self.places(page)):
                np.testing.assert_array_equal(
                    self.device[rank, rows], own[tokens], err_msg=f"{what}: page {page} on rank {rank}"
                )

    def stored_pages(self, rank: int, slot_pages: PageArray) -> list[int]:
        """Row pages of a rank for those of `slot_pages`, shape ``[pages]``, of which it stores anything."""
        found = [self.places(page)[rank][1] for page in slot_pages.tolist()]
        return [int(rows[0]) // self.page_rows for rows in found if len(rows)]

    # Plans.

    def backup(self, slot_pages: PageArray) -> tuple[list[BackupPlan], list[MetadataT]]:
        """Plan, allocate and copy on every rank; nothing but the allocated host pages may change.

        `slot_pages` has shape ``[pages]``; plans and metadata come one a rank.
        """
        plans = [layout.plan_backup(slot_pages) for layout in self.layouts]
        metadata = []
        for rank, (layout, plan) in enumerate(zip(self.layouts, plans, strict=True)):
            host_pages = self.allocate_host(rank, plan.owned_pages)
            before = self.host[rank].copy()
            self._copy(plan.bind(host_pages), source=self.device[rank], target=self.host[rank], to_host=True)
            self._check_untouched(before, self.host[rank], host_pages)
            metadata.append(layout.finish_backup(plan, host_pages))
        return plans, metadata

    def load(self, parts: Sequence[Sequence[MetadataT]], slot_pages: PageArray) -> None:
        """Bring `parts`, one sequence a rank, to logical pages, shape ``[pages]``; no other row may change.

        First each rank's copies, then the exchange. `AssertionError` if the ranks disagree about it, or if a rank is
        to give a page that its own copies did not bring.
        """
        plans = [layout.plan_load(own, slot_pages) for layout, own in zip(self.layouts, parts, strict=True)]
        before = self.device.copy()
        for rank, plan in enumerate(plans):
            self._copy(plan.copies, source=self.host[rank], target=self.device[rank], to_host=False)
        self._exchange(plans)
        for rank in range(len(plans)):
            stored = np.array(self.stored_pages(rank, slot_pages), dtype=np.int64)
            self._check_untouched(before[rank], self.device[rank], stored)

    def _exchange(self, plans: Sequence[LoadPlan]) -> None:
        """Page by page, from the device of its owner to all others that have a row page for it."""
        owners = plans[0].exchange.owners.tolist()
        for rank, plan in enumerate(plans):
            found = plan.exchange.owners.tolist()
            assert len(found) == len(owners), f"rank {rank} exchanges {len(found)} pages, rank 0 {len(owners)}"
            assert found == owners, f"rank {rank} names the owners {found}, rank 0 {owners}"
        brought = [set(plan.copies.device_pages().tolist()) for plan in plans]
        rows = [plan.exchange.row_pages.tolist() for plan in plans]
        pages = self.device.reshape(len(plans), -1, self.page_rows * TOKEN_BYTES)
        for number, owner in enumerate(owners):
            assert 0 <= owner < len(plans), f"page {number} of an exchange is on rank {owner} of {len(plans)}"
            own = rows[owner][number]
            assert own in brought[owner], f"rank {owner} is to give row page {own}, which its copies did not bring"
            for rank in range(len(plans)):
                if rank != owner and rows[rank][number]:
                    pages[rank, rows[rank][number]] = pages[owner, own]

    def _copy(self, plan: CopyPlan, *, source: Bytes, target: Bytes, to_host: bool) -> None:
        for run in plan.runs():
            first_source, first_target = run.host_page, run.device_page
            if to_host:
                first_source, first_target = first_target, first_source
            for row in range(run.pages * self.page_rows):
                target[first_target * self.page_rows + row] = source[first_source * self.page_rows + row]

    def _check_untouched(self, before: Bytes, after: Bytes, pages: PageArray) -> None:
        changed = {int(row) // self.page_rows for row in np.flatnonzero((before != after).any(axis=1))}
        stray = sorted(changed - {int(page) for page in pages})
        assert not stray, f"a copy changed pages {stray} outside its own {sorted(pages)}"

    def _noise(self, *shape: int) -> Bytes:
        return self.rng.integers(0, 256, size=(*shape, TOKEN_BYTES), dtype=np.uint8)

    def _order(self, pages: range, shuffled: bool) -> list[int]:
        return [int(page) for page in self.rng.permutation(pages)] if shuffled else list(pages)
