"""The contract suite: bind it to a strategy, here or in another distribution, and run pytest.

    class TestMyLayout(LayoutContract[MyMetadata]):
        split_rules = {"page_size": same, "host_pages": joined}

        def make_layout(self, *, page_size: int, shard_size: int, shard_rank: int) -> MyLayout:
            return MyLayout(...)

That is all. Each test builds one strategy for every rank of a group and holds them against
`testing_oracle.SimulatedGroup`, which replays their plans on byte arrays. Needs numpy, pytest and hypothesis
(the extra ``dev`` of this distribution) and not SGLang.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import numpy as np
import pytest

from .capabilities import deals_in_turn, has_host_lanes
from .errors import LayoutConfigError, LayoutInvariantError
from .protocol import MetadataT
from .testing_harness import LayoutCase, spans
from .testing_host import HostContract
from .testing_metadata import (
    SplitRule,
    check_equal_arrays,
    check_equal_metadata,
    check_own_memory,
    joined,
    same,
    stored_arrays,
    stored_fields,
    summed,
)
from .testing_oracle import SimulatedGroup
from .testing_owners import OwnerContract

__all__ = ["LayoutCase", "LayoutContract", "SimulatedGroup", "SplitRule", "joined", "same", "summed"]


class LayoutContract(OwnerContract[MetadataT], HostContract[MetadataT]):
    """What every layout strategy must do. Subclass it in a test module under a name that starts with ``Test``."""

    # Where pages lie.

    def test_reserved_pages_are_refused_and_the_others_fill_every_pool_once(self) -> None:
        for case in self._corners():
            row_pages = 5
            group = self._group(case, row_pages=row_pages)
            homes = [group.ask_home(page) for page in group.usable_pages]
            lanes = group.layouts[0].lane_count
            assert len(set(homes)) == len(homes), f"{case}: two logical pages share a row page"
            assert set(homes) == {(lane, row) for lane in range(lanes) for row in range(1, row_pages + 1)}, (
                f"{case}: pages {group.usable_pages} must fill row pages 1 .. {row_pages} of every lane (0 is padding)"
            )
            for page, layout in itertools.product(range(group.usable_pages[0]), group.layouts):
                usable = group.usable_pages[-1]
                one = layout.plan_backup(np.array([usable], dtype=np.int64))
                metadata = layout.finish_backup(one, np.arange(one.owned_pages, dtype=np.int64))
                with pytest.raises(LayoutConfigError):
                    layout.plan_load([metadata], np.array([page], dtype=np.int64))
                for pages in ([page], [usable, page], [page, usable]):
                    with pytest.raises(LayoutConfigError):
                        layout.plan_backup(np.array(pages, dtype=np.int64))

    def test_pages_lie_where_the_binding_says(self) -> None:
        for case in self._corners():
            group = self._group(case, row_pages=5)
            for page in group.usable_pages:
                stated = self.stated_home(page, case.shard_size)
                assert stated in (None, group.ask_home(page)), f"{case}: page {page} is not at {stated}"

    def test_lanes_of_existing_pages_are_their_owners(self) -> None:
        def check(case: LayoutCase) -> None:
            group = self._group(case)
            pages = group.rng.permutation(np.array(group.usable_pages, dtype=np.int64))[:40]
            for layout in group.layouts:
                check_equal_arrays(layout.lanes_of(pages), group.lanes(pages), f"{case}: lanes_of")

        self._for_all_cases(check)

    def test_lanes_of_a_chain_start_at_its_base_and_can_be_computed_piece_by_piece(self) -> None:
        def check(case: LayoutCase) -> None:
            layout = self._layouts(case)[0]
            total = sum(case.node_pages)
            for base in range(layout.lane_count):
                whole = layout.extend_lanes(base, 0, total)
                assert len(whole) == total
                assert int(whole[0]) == base
                assert set(whole.tolist()) <= set(range(layout.lane_count))
                pieces = [layout.extend_lanes(base, at, n) for at, n in spans(case.node_pages)]
                check_equal_arrays(np.concatenate(pieces), whole, f"{case}: extend_lanes in pieces")

        self._for_all_cases(check)

    def test_a_strategy_that_says_so_deals_pages_in_turn(self) -> None:
        def check(case: LayoutCase) -> None:
            group = self._group(case)
            layout, lanes = group.layouts[0], group.layouts[0].lane_count
            if not deals_in_turn(layout):
                return
            pages = np.array(group.usable_pages, dtype=np.int64)
            check_equal_arrays(layout.lanes_of(pages), pages % lanes, f"{case}: lanes_of")
            for base in range(lanes):
                chain = (base + np.arange(sum(case.node_pages))) % lanes
                check_equal_arrays(layout.extend_lanes(base, 0, len(chain)), chain, f"{case}: extend_lanes")

        self._for_all_cases(check)

    # Agreement.

    def test_all_ranks_answer_alike(self) -> None:
        def check(case: LayoutCase) -> None:
            group = self._group(case)
            prompt, namespace = case.seed.to_bytes(8, "little"), f"adapter {case.seed % 3}"
            bases = {layout.chain_base(prompt, namespace) for layout in group.layouts}
            assert len(bases) == 1, f"{case}: chain_base differs between ranks: {bases}"
            assert bases <= set(range(group.layouts[0].lane_count))
            assert len({layout.logical_tokens(640) for layout in group.layouts}) == 1
            slots = self._chain_slots(group, case)
            plans, metadata = group.backup(np.concatenate(slots))
            parts = [data.split(case.page_size) for data in metadata]
            fresh = group.allocate_slots(group.layouts[0].load_lanes(parts[0]))
            answers = [
                (
                    layout.lane_count,
                    group.host_lanes[0].count,
                    layout.lanes_of(fresh).tolist(),
                    layout.extend_lanes(0, 3, 9).tolist(),
                    plan.lanes.tolist(),
                    plan.demand_pages,
                    plan.logical_tokens,
                    [(part.logical_len, part.pages_per_lane) for part in (data, *pair)],
                    layout.load_lanes(pair).tolist(),
                    layout.plan_load(pair, fresh).logical_pages,
                    layout.plan_load(pair, fresh).logical_tokens,
                    layout.plan_load(pair, fresh).exchange.owners.tolist(),
                )
                for layout, plan, data, pair in zip(group.layouts, plans, metadata, parts, strict=True)
            ]
            for rank, answer in enumerate(answers):
                assert answer == answers[0], f"{case}: rank {rank} answers {answer}, rank 0 {answers[0]}"

        self._for_all_cases(check)

    def test_namespaces_of_any_text_have_a_base(self) -> None:
        for case in self._corners():
            layout = self._layouts(case)[0]
            for namespace in ("", "x" * 1000, "\u00e9\u4e2d", "\ud800"):
                assert 0 <= layout.chain_base(b"", namespace) < layout.lane_count

    # Backup.

    def test_pages_of_a_backup_are_disjoint_between_lanes_and_cover_the_node(self) -> None:
        def check(case: LayoutCase) -> None:
            group = self._group(case)
            for slots in self._chain_slots(group, case):
                homes = [group.home(int(page)) for page in slots]
                owners = group.layouts[0].plan_backup(slots).lanes
                if not has_host_lanes(group.layouts[0]):
                    check_equal_arrays(owners, [lane for lane, _ in homes], f"{case}: lanes")
                for layout, lanes in zip(group.layouts, group.host_lanes, strict=True):
                    plan = layout.plan_backup(slots)
                    expected = [row for owner, (_, row) in zip(owners, homes, strict=True) if owner == lanes.own]
                    check_equal_arrays(plan.device_pages, expected, f"{case}: rows of host lane {lanes.own}")
                    check_equal_arrays(plan.lanes, owners, f"{case}: host lanes")
                    assert plan.logical_tokens == len(slots) * case.page_size

        self._for_all_cases(check)

    def test_demand_is_what_each_lane_really_copies(self) -> None:
        def check(case: LayoutCase) -> None:
            group = self._group(case)
            slots = np.concatenate(self._chain_slots(group, case))
            plans, metadata = group.backup(slots)
            owners = plans[0].lanes.tolist()
            counts = [owners.count(lane) for lane in range(group.host_lanes[0].count)]
            assert sum(counts) == len(slots), f"{case}: owners {owners} of {len(counts)} host lanes"
            for lanes, plan, data in zip(group.host_lanes, plans, metadata, strict=True):
                copies = plan.bind(np.arange(plan.owned_pages, dtype=np.int64))
                own = 0 if lanes.own is None else counts[lanes.own]
                assert list(plan.demand_pages) == counts, f"{case}: demand"
                assert list(data.pages_per_lane) == counts, f"{case}: pages held"
                assert own == plan.owned_pages == copies.pages == len(data.host_pages)
                assert data.logical_len == len(slots) * case.page_size

        self._for_all_cases(check)

    def test_a_backup_given_another_number_of_host_pages_raises(self) -> None:
        for case in self._corners():
            group = self._group(case)
            slots = np.concatenate(self._chain_slots(group, case))
            for layout in group.layouts:
                plan = layout.plan_backup(slots)
                for pages in {plan.owned_pages + 1, max(plan.owned_pages - 1, 0)} - {plan.owned_pages}:
                    with pytest.raises(LayoutInvariantError):
                        layout.finish_backup(plan, np.arange(pages, dtype=np.int64))

    # Bytes.

    def test_bytes_come_back_at_the_same_positions(self) -> None:
        def check(case: LayoutCase) -> None:
            group = self._group(case)
            slots = self._chain_slots(group, case)
            content = [group.write(pages) for pages in slots]
            stored = [group.backup(pages)[1] for pages in slots]
            for pages in slots:
                group.free_slots(pages)
            parts = [self._cut(group, [node[rank] for node in stored]) for rank in range(case.shard_size)]
            fresh = group.allocate_slots(group.layouts[0].load_lanes(parts[0]))
            group.load(parts, fresh)
            group.check(fresh, np.concatenate(content), f"{case}: bytes after load-back")

        self._for_all_cases(check)

    def test_a_load_tells_how_many_slots_it_fills(self) -> None:
        for case in self._corners():
            group, stored = self._stored(case)
            fresh = group.allocate_slots(group.layouts[0].load_lanes(stored[0]))
            for layout, nodes in zip(group.layouts, stored, strict=True):
                plan = layout.plan_load(nodes, fresh)
                assert plan.logical_pages == sum(case.node_pages)
                assert plan.logical_tokens == sum(case.node_pages) * case.page_size

    def test_a_load_into_wrong_lanes_or_a_wrong_number_of_slots_raises_on_every_rank(self) -> None:
        def check(case: LayoutCase) -> None:
            group, stored = self._stored(case)
            right = group.layouts[0].load_lanes(stored[0])
            fresh = group.allocate_slots(right)
            wrong = [fresh[:-1], np.concatenate([fresh, group.allocate_slots(right[:1])])]
            if group.layouts[0].lane_count > 1:
                other = fresh.copy()
                at = int(group.rng.integers(len(fresh)))
                other[at] = group.allocate_slots((right[at : at + 1] + 1) % group.layouts[0].lane_count)[0]
                wrong.append(other)
            for layout, nodes in zip(group.layouts, stored, strict=True):
                for slots in wrong:
                    with pytest.raises(LayoutInvariantError):
                        layout.plan_load(nodes, slots)

        self._for_all_cases(check)

    def test_no_parts_raise(self) -> None:
        for case in self._corners():
            for layout in self._layouts(case):
                with pytest.raises(LayoutConfigError):
                    layout.load_lanes([])
                with pytest.raises(LayoutConfigError):
                    layout.plan_load([], np.empty(0, dtype=np.int64))

    # Split.

    def test_the_parts_of_a_node_are_what_backups_of_the_parts_would_be(self) -> None:
        def check(case: LayoutCase) -> None:
            group = self._group(case)
            slots = np.concatenate(self._chain_slots(group, case))
            _, metadata = group.backup(slots)
            for layout, whole in zip(group.layouts, metadata, strict=True):
                taken = 0
                for at, pages in spans(case.node_pages):
                    plan = layout.plan_backup(slots[at : at + pages])
                    host_pages = whole.host_pages[taken : taken + plan.owned_pages]
                    part = whole.split(at * case.page_size)[1].split(pages * case.page_size)[0]
                    check_equal_metadata(part, layout.finish_backup(plan, host_pages), f"{case}: part at {at}")
                    taken += plan.owned_pages

        self._for_all_cases(check)

    def test_the_halves_of_every_split_have_the_right_lengths_and_host_pages(self) -> None:
        for case in self._corners():
            group = self._group(case)
            plans, metadata = group.backup(np.concatenate(self._chain_slots(group, case)))
            owners = plans[0].lanes.tolist()
            for lanes, node in zip(group.host_lanes, metadata, strict=True):
                for pages in range(len(owners) + 1):
                    first, second = node.split(pages * case.page_size)
                    owned = 0 if lanes.own is None else owners[:pages].count(lanes.own)
                    assert first.logical_len == pages * case.page_size
                    assert second.logical_len == node.logical_len - first.logical_len
                    check_equal_arrays(first.host_pages, node.host_pages[:owned], f"{case}: first half at {pages}")
                    check_equal_arrays(second.host_pages, node.host_pages[owned:], f"{case}: second half at {pages}")

    def test_the_owner_pattern_survives_split_and_load(self) -> None:
        def check(case: LayoutCase) -> None:
            group, stored = self._stored(case)
            pattern = group.layouts[0].load_lanes(stored[0])
            parts = [self._cut(group, nodes) for nodes in stored]
            fresh = group.allocate_slots(pattern)
            group.load(parts, fresh)
            for rank, layout in enumerate(group.layouts):
                check_equal_arrays(layout.load_lanes(parts[rank]), pattern, f"{case}: after split")
                check_equal_arrays(layout.lanes_of(fresh), pattern, f"{case}: lanes after load")

        self._for_all_cases(check)

    def test_a_split_outside_the_node_or_off_a_page_raises_value_error(self) -> None:
        for case in self._corners():
            _, stored = self._stored(case)
            for node in (nodes[0] for nodes in stored):
                wrong = {-case.page_size, -1, node.logical_len + 1, node.logical_len + case.page_size}
                if case.page_size > 1:
                    wrong |= {1, case.page_size - 1, node.logical_len - 1}
                for split_len in sorted(wrong):
                    with pytest.raises(ValueError, match=str(split_len)):
                        node.split(split_len)

    def test_every_metadata_field_has_a_split_rule_and_keeps_it(self) -> None:
        for case in self._corners():
            _, stored = self._stored(case)
            for nodes in stored:
                whole = stored_fields(nodes[0])
                missing, stale = set(whole) - set(self.split_rules), set(self.split_rules) - set(whole)
                assert not missing, f"decide a split rule for metadata fields {sorted(missing)} in split_rules"
                assert not stale, f"split_rules names {sorted(stale)}, which the metadata does not store"
                for pages in range(case.node_pages[0] + 1):
                    first, second = (stored_fields(half) for half in nodes[0].split(pages * case.page_size))
                    for name, rule in self.split_rules.items():
                        assert rule(whole[name], first[name], second[name]), (
                            f"{case}: field {name!r} breaks its rule at {pages} pages: "
                            f"{whole[name]} -> {first[name]}, {second[name]}"
                        )

    # Memory and looks.

    def test_metadata_keeps_no_other_memory_alive(self) -> None:
        for case in self._corners():
            group = self._group(case)
            slots = np.concatenate(self._chain_slots(group, case))
            for rank, layout in enumerate(group.layouts):
                plan = layout.plan_backup(slots)
                check_own_memory(f"{case}: plan_backup", plan.lanes, plan.device_pages, arguments=[slots])
                host_pages = group.allocate_host(rank, plan.owned_pages + 2)[1:-1]
                data = layout.finish_backup(plan, host_pages)
                first, second = data.split(case.page_size)
                check_own_memory(f"{case}: finish_backup", *stored_arrays(data), arguments=[slots, host_pages])
                check_own_memory(
                    f"{case}: split", *stored_arrays(first), *stored_arrays(second), arguments=stored_arrays(data)
                )

    def test_plans_print_and_compare_by_content(self) -> None:
        for case in self._corners():
            group, stored = self._stored(case)
            fresh = group.allocate_slots(group.layouts[0].load_lanes(stored[0]))
            for layout, nodes in zip(group.layouts, stored, strict=True):
                backup, load = layout.plan_backup(fresh), layout.plan_load(nodes, fresh)
                assert backup == layout.plan_backup(fresh.copy())
                assert load == layout.plan_load(nodes, fresh.copy())
                assert backup != layout.plan_backup(fresh[:-1])
                assert load != replace(load, logical_pages=load.logical_pages + 1)
                assert copy.deepcopy(backup) == backup
                assert repr(backup.demand_pages) in repr(backup)
                assert repr(load.copies) in repr(load)

    def test_a_legacy_host_value_names_every_token_or_is_none(self) -> None:
        for case in self._corners():
            _, stored = self._stored(case)
            for node in (node for nodes in stored for node in nodes):
                value = node.legacy_host_value
                if value is not None:
                    assert value.device.type == "cpu"
                    tokens = [page * case.page_size + at for page in node.host_pages for at in range(case.page_size)]
                    assert value.tolist() == tokens
                    assert len(tokens) == node.logical_len, f"{case}: one index a token, or None"
