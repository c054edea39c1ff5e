"""The part of the contract suite that is about the host: who keeps a page there, how many fit, what ranks exchange."""

from __future__ import annotations

import numpy as np

from .capabilities import has_host_lanes
from .owner_check import refuse_shared_host_lanes
from .protocol import MetadataT
from .testing_harness import LayoutCase, LayoutHarness
from .testing_metadata import check_equal_arrays


class HostContract(LayoutHarness[MetadataT]):
    """Tests that `LayoutContract` has."""

    def test_each_host_lane_is_one_ranks_or_every_rank_keeps_all(self) -> None:
        for case in self._corners():
            lanes = self._group(case).host_lanes
            counts, own = {each.count for each in lanes}, [each.own for each in lanes]
            assert len(counts) == 1, f"{case}: ranks count {counts} host lanes"
            count = counts.pop()
            kept = sorted(lane for lane in own if lane is not None)
            assert kept == list(range(count)) or (count == 1 and own == [0] * len(own)), (
                f"{case}: ranks back up host lanes {own}; each of {count} must be backed up by exactly one rank"
            )
            refuse_shared_host_lanes("as a server asks at start", lanes)

    def test_no_host_lane_takes_more_than_it_was_admitted_for(self) -> None:
        """A ledger of so few pages a lane that not every node fits, kept as a cache keeps it."""

        def check(case: LayoutCase) -> None:
            group = self._group(case)
            capacity = max(case.node_pages)
            booked = np.zeros(group.host_lanes[0].count, dtype=np.int64)
            taken = [0] * case.shard_size
            for slots in self._chain_slots(group, case):
                plans = [layout.plan_backup(slots) for layout in group.layouts]
                demand = np.array(plans[0].demand_pages)
                assert demand.shape == booked.shape, f"{case}: demand in {len(demand)} of {len(booked)} host lanes"
                if (booked + demand > capacity).any():
                    continue
                booked += demand
                for rank, (plan, lanes) in enumerate(zip(plans, group.host_lanes, strict=True)):
                    taken[rank] += plan.owned_pages
                    room = 0 if lanes.own is None else int(booked[lanes.own])
                    assert taken[rank] == room <= capacity, (
                        f"{case}: rank {rank} takes {taken[rank]} host pages, its lane was admitted for {room}"
                    )

        self._for_all_cases(check)

    def test_ranks_exchange_what_they_store_and_do_not_load(self) -> None:
        def check(case: LayoutCase) -> None:
            group, stored = self._stored(case)
            fresh = group.allocate_slots(group.layouts[0].load_lanes(stored[0]))
            homes = [group.home(int(page)) for page in fresh]
            plans = [layout.plan_load(nodes, fresh) for layout, nodes in zip(group.layouts, stored, strict=True)]
            for rank, (layout, plan) in enumerate(zip(group.layouts, plans, strict=True)):
                exchange = plan.exchange
                assert exchange.pages in (0, len(fresh)), f"{case}: {exchange.pages} of {len(fresh)} pages exchanged"
                check_equal_arrays(exchange.owners, plans[0].exchange.owners, f"{case}: owners on rank {rank}")
                if not has_host_lanes(layout):
                    assert not exchange.pages, f"{case}: an exchange, but no host lanes: nobody would perform it"
                wanted = {row for lane, row in homes if lane == layout.lane}
                loaded = set(plan.copies.device_pages().tolist())
                received = set(exchange.row_pages[exchange.owners != rank].tolist())
                assert wanted <= loaded | received, f"{case}: rank {rank} lacks row pages {wanted - loaded - received}"
                if exchange.pages:
                    here = [row if lane == layout.lane else 0 for lane, row in homes]
                    check_equal_arrays(exchange.row_pages, here, f"{case}: row pages of rank {rank}")

        self._for_all_cases(check)
