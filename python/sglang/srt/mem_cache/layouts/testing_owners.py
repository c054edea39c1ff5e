"""The part of the contract suite that is about owners: one for each page, whoever is asked.

A server adds up what the ranks have of a page, so a second copy is as wrong as none (see `owners`).
"""

from __future__ import annotations

import numpy as np
import torch

from .owner_check import refuse_shared_owners
from .protocol import MetadataT
from .testing_harness import LayoutCase, LayoutHarness
from .testing_metadata import check_equal_arrays


class OwnerContract(LayoutHarness[MetadataT]):
    """Tests that `LayoutContract` has."""

    def test_each_lane_is_one_ranks_or_every_rank_stores_all(self) -> None:
        for case in self._corners():
            layouts = self._layouts(case)
            counts, lanes = [layout.lane_count for layout in layouts], [layout.lane for layout in layouts]
            assert set(counts) in ({1}, {case.shard_size}), f"{case}: ranks count {counts} lanes"
            assert sorted(lanes) == (sorted(range(case.shard_size)) if counts[0] > 1 else [0] * case.shard_size), (
                f"{case}: ranks store lanes {lanes}; each of {counts[0]} must be stored by exactly one rank"
            )
            refuse_shared_owners(layouts)  # what a server asks at start

    def test_a_slot_has_a_row_on_its_owner_and_a_row_of_the_padding_page_elsewhere(self) -> None:
        def check(case: LayoutCase) -> None:
            group = self._group(case)
            pages = np.array(group.usable_pages, dtype=np.int64)
            slots = torch.from_numpy(pages[:, None] * case.page_size + np.arange(case.page_size))
            homes = np.array([group.home(int(page)) for page in pages])
            reserved = torch.arange(group.usable_pages[0] * case.page_size)
            for rank, layout in enumerate(group.layouts):
                rows = layout.local_rows(slots)
                assert rows.shape == slots.shape
                assert rows.dtype == torch.int64
                assert (layout.local_rows(reserved).numpy() < group.page_rows).all(), f"{case}: rows of reserved slots"
                here = rows.numpy() >= group.page_rows
                own = layout.lanes_of(pages) == layout.lane
                check_equal_arrays(here.sum(axis=1), own * group.page_rows, f"{case}: rows that rank {rank} stores")
                row_pages = rows.numpy()[here].reshape(-1, group.page_rows) // group.page_rows
                expected = np.repeat(homes[own, 1:], group.page_rows, axis=1)
                check_equal_arrays(row_pages, expected, f"{case}: row pages of rank {rank}")
                assert (rows.numpy() >= 0).all()

        self._for_all_cases(check)
