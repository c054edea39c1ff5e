"""The part of the contract suite that is about owners: one for each page, whoever is asked.

A server adds up what the ranks have of a page, so a second copy is as wrong as none (see `owners`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from .capabilities import shares_pools
from .owners import refuse_shared_owners
from .protocol import MetadataT
from .testing_harness import LayoutCase, LayoutHarness
from .testing_metadata import check_equal_arrays

if TYPE_CHECKING:
    from collections.abc import Callable


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
            if group.layouts[0].lane_count == 1:
                return  # its rows are its slots
            pages = np.array(group.usable_pages, dtype=np.int64)
            within = np.arange(case.page_size)
            slots = torch.from_numpy(pages[:, None] * case.page_size + within)
            homes = np.array([group.home(int(page)) for page in pages])
            reserved = torch.arange(group.usable_pages[0] * case.page_size)
            for rank, layout in enumerate(group.layouts):
                local_rows = _local_rows(layout)
                if local_rows is None:
                    continue
                rows = local_rows(slots)
                assert rows.shape == slots.shape
                assert rows.dtype == torch.int64
                own = homes[:, 0] == layout.lane
                expected = homes[:, 1:] * case.page_size + within
                check_equal_arrays(rows.numpy()[own], expected[own], f"{case}: rows of rank {rank}")
                for elsewhere in (rows.numpy()[~own], local_rows(reserved).numpy()):
                    assert ((elsewhere >= 0) & (elsewhere < case.page_size)).all(), (
                        f"{case}: rank {rank} has rows for slots that it does not store, not of the padding page"
                    )

        self._for_all_cases(check)


def _local_rows(layout: object) -> Callable[[torch.Tensor], torch.Tensor] | None:
    return layout.local_rows if shares_pools(layout) else None
