"""The design's required cases for CP node metadata, write mapping and load mapping, at the level of plans.

Expected values come from the design's own token-wise rules (masks over whole slot tensors), not from pages.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.test.ci.ci_register import register_cpu_ci

from sglang.srt.mem_cache.layouts import (
    BackupPlan,
    CpHiCacheNodeMetadata,
    CpSharedKVLayout,
    CpSharedLayout,
)
from sglang.srt.mem_cache.layouts.pages import page_array, pages_of_tokens, tokens_of_pages

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

PAGE = 4


def _make_metadata(lanes: list[int], host_pages: list[int], rank: int = 0, cp_size: int = 2) -> CpHiCacheNodeMetadata:
    return CpHiCacheNodeMetadata(
        page_size=PAGE,
        cp_size=cp_size,
        cp_rank=rank,
        lanes=np.array(lanes, dtype=np.int16),
        host_pages=page_array(host_pages),
    )


def _back_up(
    slots: torch.Tensor, layout: CpSharedLayout, first_host_page: int
) -> tuple[BackupPlan, CpHiCacheNodeMetadata]:
    plan = layout.plan_backup(pages_of_tokens(slots, layout.page_size))
    return plan, layout.finish_backup(plan, np.arange(first_host_page, first_host_page + plan.owned_pages))


@st.composite
def _nodes(draw: st.DrawFn) -> tuple[CpSharedLayout, torch.Tensor]:
    """A rank's strategy and a node's slots: any pages in any order."""
    page_size = draw(st.sampled_from([1, 16, 64]))
    cp_size = draw(st.integers(1, 16))
    layout = CpSharedLayout(page_size=page_size, shard_size=cp_size, shard_rank=draw(st.integers(0, cp_size - 1)))
    pages = draw(st.lists(st.integers(cp_size, 20 * cp_size), min_size=1, max_size=40, unique=True))
    return layout, tokens_of_pages(page_array(pages), page_size)


class TestMetadataSplit:
    def test_a_page_aligned_split_divides_positions_and_host_indices_and_rebases_the_child(self) -> None:
        parent, child = _make_metadata([0, 1, 0, 1, 0], [7, 5, 6]).split(2 * PAGE)
        assert (parent.logical_len, child.logical_len) == (8, 12)
        assert parent.owned_positions.tolist() == [0, 1, 2, 3]
        assert parent.host_indices.tolist() == [28, 29, 30, 31]
        assert child.owned_positions.tolist() == [0, 1, 2, 3, 8, 9, 10, 11]
        assert child.host_indices.tolist() == [20, 21, 22, 23, 24, 25, 26, 27]

    def test_a_split_at_zero_gives_an_empty_parent_and_the_whole_child(self) -> None:
        node = _make_metadata([0, 1, 0], [7, 5])
        parent, child = node.split(0)
        assert parent.logical_len == 0
        assert parent.owned_positions.numel() == parent.host_indices.numel() == 0
        assert child.logical_len == node.logical_len
        assert child.owned_positions.tolist() == node.owned_positions.tolist()
        assert child.host_indices.tolist() == node.host_indices.tolist()

    def test_a_split_at_the_end_gives_the_whole_parent_and_an_empty_child(self) -> None:
        node = _make_metadata([0, 1, 0], [7, 5])
        parent, child = node.split(node.logical_len)
        assert parent.host_indices.tolist() == node.host_indices.tolist()
        assert child.logical_len == child.owned_positions.numel() == 0

    def test_a_split_of_a_node_that_this_rank_owns_nothing_of_keeps_the_lengths(self) -> None:
        parent, child = _make_metadata([1, 1, 1], []).split(PAGE)
        assert (parent.logical_len, child.logical_len) == (4, 8)
        assert parent.pages_per_lane == (0, 1)
        assert child.pages_per_lane == (0, 2)
        for half in (parent, child):
            assert half.owned_positions.numel() == half.host_indices.numel() == 0

    def test_a_split_with_owned_positions_on_both_sides_follows_owners_not_the_first_entries(self) -> None:
        parent, child = _make_metadata([1, 1, 0, 0], [7, 5]).split(3 * PAGE)
        assert parent.owned_positions.tolist() == [8, 9, 10, 11]
        assert parent.host_indices.tolist() == [28, 29, 30, 31]
        assert child.owned_positions.tolist() == [0, 1, 2, 3]
        assert child.host_indices.tolist() == [20, 21, 22, 23]

    def test_a_split_with_owned_positions_on_one_side_leaves_the_other_empty(self) -> None:
        parent, child = _make_metadata([1, 0, 0], [7, 5]).split(PAGE)
        assert parent.host_indices.numel() == 0
        assert child.owned_positions.tolist() == list(range(8))

    @pytest.mark.parametrize("split_len", [-PAGE, -1, 13, 12 + PAGE])
    def test_a_split_outside_the_node_raises_value_error_with_value_and_range(self, split_len: int) -> None:
        with pytest.raises(ValueError, match=f"^{re.escape(f'split_len must be in [0, 12], got {split_len}')}$"):
            _make_metadata([0, 1, 0], [7, 5]).split(split_len)

    @pytest.mark.parametrize("split_len", [1, PAGE - 1, PAGE + 1, 11])
    def test_a_split_off_a_page_raises_value_error_with_value_and_page_size(self, split_len: int) -> None:
        message = f"split_len must be a multiple of page_size 4 and >= 0, got {split_len}"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            _make_metadata([0, 1, 0], [7, 5]).split(split_len)

    @given(node=_nodes(), data=st.data())
    def test_every_split_equals_the_mask_over_token_positions(
        self, node: tuple[CpSharedLayout, torch.Tensor], data: st.DataObject
    ) -> None:
        layout, slots = node
        whole = _back_up(slots, layout, 3)[1]
        split_len = data.draw(st.integers(0, len(slots) // layout.page_size)) * layout.page_size
        parent, child = whole.split(split_len)
        mask = whole.owned_positions < split_len
        assert parent.logical_len == split_len
        assert child.logical_len == len(slots) - split_len
        assert torch.equal(parent.owned_positions, whole.owned_positions[mask])
        assert torch.equal(child.owned_positions, whole.owned_positions[~mask] - split_len)
        assert torch.equal(parent.host_indices, whole.host_indices[mask])
        assert torch.equal(child.host_indices, whole.host_indices[~mask])

    @given(node=_nodes())
    def test_positions_and_indices_are_cpu_int64_sorted_in_range_and_of_equal_length(
        self, node: tuple[CpSharedLayout, torch.Tensor]
    ) -> None:
        layout, slots = node
        metadata = _back_up(slots, layout, 3)[1]
        for half in metadata.split(len(slots) // layout.page_size // 2 * layout.page_size):
            positions, indices = half.owned_positions, half.host_indices
            assert positions.dtype == indices.dtype == torch.int64
            assert positions.device.type == indices.device.type == "cpu"
            assert len(positions) == len(indices)
            assert positions.tolist() == sorted(set(positions.tolist()))
            assert all(0 <= position < half.logical_len for position in positions.tolist())


class TestWriteMapping:
    @given(node=_nodes())
    def test_full_logical_slots_need_host_pages_only_for_owned_slots(
        self, node: tuple[CpSharedLayout, torch.Tensor]
    ) -> None:
        layout, slots = node
        plan, metadata = _back_up(slots, layout, 5)
        owned = int(layout.geometry.owned_by_this_rank(slots).sum())
        assert plan.logical_tokens == metadata.logical_len == len(slots)
        assert plan.owned_pages * layout.page_size == owned == len(metadata.host_indices)
        assert plan.demand_pages[layout.lane] == plan.owned_pages

    @given(node=_nodes())
    def test_rows_of_the_transfer_are_those_of_the_geometry(self, node: tuple[CpSharedLayout, torch.Tensor]) -> None:
        layout, slots = node
        plan, metadata = _back_up(slots, layout, 5)
        geometry = CpSharedKVLayout(page_size=layout.page_size, cp_size=layout.lane_count, cp_rank=layout.lane)
        mask = geometry.owned_by_this_rank(slots)
        copies = plan.bind(metadata.host_pages)
        assert torch.equal(
            tokens_of_pages(copies.device_pages(), layout.page_size), geometry.logical_locs_to_physical(slots[mask])
        )
        assert torch.equal(tokens_of_pages(copies.host_pages(), layout.page_size), metadata.host_indices)
        assert torch.equal(metadata.owned_positions, mask.nonzero(as_tuple=True)[0])

    def test_a_node_without_owned_pages_gives_metadata_without_host_pages(self) -> None:
        layout = CpSharedLayout(page_size=PAGE, shard_size=3, shard_rank=2)
        plan, metadata = _back_up(tokens_of_pages(page_array([3, 4, 6]), PAGE), layout, 5)
        assert plan.owned_pages == 0
        assert plan.demand_pages == (2, 1, 0)
        assert metadata.logical_len == 12
        assert metadata.host_pages.size == metadata.host_indices.numel() == metadata.owned_positions.numel() == 0

    def test_a_node_without_owned_pages_still_makes_a_plan_of_its_full_logical_length_with_nothing_to_copy(
        self,
    ) -> None:
        layout = CpSharedLayout(page_size=PAGE, shard_size=3, shard_rank=2)
        plan, metadata = _back_up(tokens_of_pages(page_array([3, 4, 6]), PAGE), layout, 5)
        copies = plan.bind(metadata.host_pages)
        assert plan.logical_tokens == 12
        assert copies.pages == 0
        assert list(copies.runs()) == []

    def test_with_more_ranks_than_pages_each_page_has_one_owner_and_the_others_have_none(self) -> None:
        slots = tokens_of_pages(page_array([21, 18]), PAGE)
        plans = [_back_up(slots, CpSharedLayout(page_size=PAGE, shard_size=16, shard_rank=r), 0)[0] for r in range(16)]
        assert {rank: plan.device_pages.tolist() for rank, plan in enumerate(plans) if plan.owned_pages} == {
            2: [1],
            5: [1],
        }
        assert {plan.demand_pages for plan in plans} == {tuple(int(rank in (2, 5)) for rank in range(16))}


class TestLoadMapping:
    @given(node=_nodes())
    def test_slots_for_the_full_logical_length_of_all_nodes_are_asked_for(
        self, node: tuple[CpSharedLayout, torch.Tensor]
    ) -> None:
        layout, slots = node
        nodes = [_back_up(slots, layout, 5)[1], _back_up(slots[: layout.page_size], layout, 90)[1]]
        lanes = layout.load_lanes(nodes)
        assert len(lanes) * layout.page_size == len(slots) + layout.page_size

    @given(node=_nodes(), data=st.data())
    def test_owned_positions_map_to_newly_allocated_slots_and_then_to_their_rows(
        self, node: tuple[CpSharedLayout, torch.Tensor], data: st.DataObject
    ) -> None:
        layout, slots = node
        whole = _back_up(slots, layout, 5)[1]
        nodes = whole.split(data.draw(st.integers(0, len(slots) // layout.page_size)) * layout.page_size)
        # New slots: other pages of the same lanes, each far away from the old one and from its neighbours.
        shifts = data.draw(st.permutations(range(100, 100 + len(whole.lanes))))
        new_pages = pages_of_tokens(slots, layout.page_size) + layout.lane_count * np.array(shifts) * 21
        new_slots = tokens_of_pages(new_pages, layout.page_size)
        plan = layout.plan_load(nodes, new_pages)

        rows, host_indices, start = [], [], 0
        for part in nodes:
            selected = new_slots[start : start + part.logical_len][part.owned_positions]
            rows.append(layout.geometry.logical_locs_to_physical(selected))
            host_indices.append(part.host_indices)
            start += part.logical_len
        assert torch.equal(tokens_of_pages(plan.copies.device_pages(), layout.page_size), torch.cat(rows))
        assert torch.equal(tokens_of_pages(plan.copies.host_pages(), layout.page_size), torch.cat(host_indices))
        assert plan.logical_tokens == len(slots)
        assert plan.logical_pages == sum(part.logical_len // layout.page_size for part in nodes)

    def test_metadata_without_owned_pages_copies_nothing_but_covers_its_full_logical_length(self) -> None:
        layout = CpSharedLayout(page_size=PAGE, shard_size=3, shard_rank=2)
        metadata = _back_up(tokens_of_pages(page_array([3, 4, 6]), PAGE), layout, 5)[1]
        assert layout.load_lanes([metadata]).tolist() == [0, 1, 0]
        plan = layout.plan_load([metadata], page_array([9, 13, 12]))
        assert plan.logical_tokens == 12
        assert plan.logical_pages == 3
        assert plan.copies.pages == 0
        assert list(plan.copies.runs()) == []

    def test_a_load_of_nodes_with_and_without_owned_pages_copies_those_of_the_first(self) -> None:
        layout = CpSharedLayout(page_size=PAGE, shard_size=3, shard_rank=2)
        without = _back_up(tokens_of_pages(page_array([3, 4]), PAGE), layout, 5)[1]
        owned = _back_up(tokens_of_pages(page_array([5]), PAGE), layout, 5)[1]
        plan = layout.plan_load([without, owned], page_array([6, 7, 17]))
        assert plan.logical_pages == 3
        assert [(run.host_page, run.device_page, run.pages) for run in plan.copies.runs()] == [(5, 5, 1)]
