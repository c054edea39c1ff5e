"""A shard group made of byte arrays: replays plans page by page, token by token, in plain numpy.

It shares no code with any strategy. Where a logical page lies (its *home*: lane and row page) it is told by
the binding, or finds out by asking every rank to back up that one page and seeing who would copy what.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic

import numpy as np

from .errors import LayoutConfigError
from .protocol import KVLayoutStrategy, MetadataT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from .pages import LaneArray, PageArray
    from .plans import BackupPlan, CopyPlan

    Bytes = npt.NDArray[np.uint8]
    Home = tuple[int, int]

TOKEN_BYTES = 8
_MOST_RESERVED_PAGES = 100_000


class SimulatedGroup(Generic[MetadataT]):
    """Device pool, host pool and free lists of every rank of one shard group.

    `layouts` holds one strategy a rank. Each rank has `row_pages` device pages besides padding page 0, and
    `host_pages` host pages; both pools start full of noise. Free pages are handed out in random order, or in
    ascending order if `shuffled` is false. `home` gives the home of a logical page, or is None to find out.
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
        self._ranks = [
            [rank for rank, layout in enumerate(layouts) if layout.lane == lane]
            for lane in range(layouts[0].lane_count)
        ]
        assert all(self._ranks), f"lanes {[lane for lane, ranks in enumerate(self._ranks) if not ranks]} have no rank"
        self.page_size = layouts[0].page_size
        self.row_pages = row_pages
        self.rng = np.random.default_rng(seed)
        self.device = self._noise(len(layouts), (row_pages + 1) * self.page_size)
        self.host = self._noise(len(layouts), host_pages * self.page_size)
        self._home = home if home is not None else self.ask_home
        first = self.first_usable_page()
        usable = first + layouts[0].logical_tokens(row_pages * self.page_size) // self.page_size
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

    def ask_home(self, slot_page: int) -> Home:
        """Lane and row page of a logical page, from what each rank would copy to back it up alone.

        `AssertionError` where the ranks contradict each other.
        """
        copied: dict[int, int] = {}
        for rank, layout in enumerate(self.layouts):
            rows = layout.plan_backup(np.array([slot_page], dtype=np.int64)).device_pages
            if len(rows):
                lane, row = layout.lane, int(rows[0])
                assert len(rows) == 1, f"rank {rank} copies {len(rows)} row pages for logical page {slot_page}"
                assert copied.setdefault(lane, row) == row, f"page {slot_page} has two rows in lane {lane}"
            elif layout.lane in copied:
                raise AssertionError(f"rank {rank} does not copy page {slot_page}, others of its lane do")
        assert len(copied) == 1, f"page {slot_page} must be copied in one lane, is in {sorted(copied)}"
        return next(iter(copied.items()))

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
        for number, page in enumerate(slot_pages):
            lane, row = self.home(int(page))
            for rank in self._ranks[lane]:
                for token in range(self.page_size):
                    self.device[rank, row * self.page_size + token] = content[number * self.page_size + token]
        return content

    def read(self, slot_pages: PageArray) -> list[Bytes]:
        """Content of logical pages, shape ``[pages * page_size, TOKEN_BYTES]``: one result for each copy of a lane."""
        copies = max(len(ranks) for ranks in self._ranks)
        results = [np.zeros((len(slot_pages) * self.page_size, TOKEN_BYTES), dtype=np.uint8) for _ in range(copies)]
        for number, page in enumerate(slot_pages):
            lane, row = self.home(int(page))
            ranks = self._ranks[lane]
            for copy, result in enumerate(results):
                rank = ranks[copy % len(ranks)]
                for token in range(self.page_size):
                    result[number * self.page_size + token] = self.device[rank, row * self.page_size + token]
        return results

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
        """Copy `parts`, one sequence a rank, into logical pages, shape ``[pages]``; no other row may change."""
        for rank, layout in enumerate(self.layouts):
            before = self.device[rank].copy()
            plan = layout.plan_load(parts[rank], slot_pages)
            self._copy(plan.copies, source=self.host[rank], target=self.device[rank], to_host=False)
            homes = [self.home(int(page)) for page in slot_pages]
            rows = np.array([row for lane, row in homes if lane == layout.lane], dtype=np.int64)
            self._check_untouched(before, self.device[rank], rows)

    def _copy(self, plan: CopyPlan, *, source: Bytes, target: Bytes, to_host: bool) -> None:
        for run in plan.runs():
            first_source, first_target = run.host_page, run.device_page
            if to_host:
                first_source, first_target = first_target, first_source
            for token in range(run.pages * self.page_size):
                target[first_target * self.page_size + token] = source[first_source * self.page_size + token]

    def _check_untouched(self, before: Bytes, after: Bytes, pages: PageArray) -> None:
        tokens = {int(token) // self.page_size for token in np.flatnonzero((before != after).any(axis=1))}
        stray = sorted(tokens - {int(page) for page in pages})
        assert not stray, f"a copy changed pages {stray} outside its own {sorted(pages)}"

    def _noise(self, *shape: int) -> Bytes:
        return self.rng.integers(0, 256, size=(*shape, TOKEN_BYTES), dtype=np.uint8)

    def _order(self, pages: range, shuffled: bool) -> list[int]:
        return [int(page) for page in self.rng.permutation(pages)] if shuffled else list(pages)
