from __future__ import annotations

import unittest

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

from sglang.srt.mem_cache.hicache.cuda.page_maps import PageMap
from sglang.srt.mem_cache.hicache.cuda.work import Work, divide
from sglang.srt.mem_cache.layouts.plans import CopyPlan

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

LAYERS = 3
HOST, DEVICE = 1 << 20, 1 << 30


def page_map(page_bytes: int, *, first: int, merges: bool, absent: int | None = None) -> PageMap:
    """A kind whose layers lie 2^16 bytes apart on each side, or page by page beside each other on the host."""
    layers = np.arange(LAYERS, dtype=np.int64)
    present = layers != absent
    return PageMap(
        page_bytes=page_bytes,
        host_stride=page_bytes if merges else LAYERS * page_bytes,
        device_stride=page_bytes,
        host_bases=np.where(present, HOST + first + layers * (1 << 16 if merges else page_bytes), 0),
        device_bases=np.where(present, DEVICE + first + layers * (1 << 16), 0),
    )


def moved(work: Work, maps: list[PageMap]) -> list[tuple[int, int]]:
    """Every (host address, device address) of 16 bytes that the work moves, in all layers, in order."""
    found: list[tuple[int, int]] = []
    batch = work.batch(slice(0, LAYERS))
    if batch is not None:
        for host, device, size in zip(batch.host.tolist(), batch.device.tolist(), batch.sizes.tolist(), strict=True):
            found += [(host + at, device + at) for at in range(0, size, 16)]
    if work.pairs is not None:
        table = work.pairs.reshape(-1, 2).tolist()
        pairs = table[len(maps) :]
        for kind, (first, count) in zip(maps, table[: len(maps)], strict=True):
            for host_base, device_base in zip(kind.host_bases.tolist(), kind.device_bases.tolist(), strict=True):
                for host_page, device_page in pairs[first : first + count] if host_base else []:
                    host = host_base + host_page * kind.host_stride
                    device = device_base + device_page * kind.device_stride
                    found += [(host + at, device + at) for at in range(0, kind.page_bytes, 16)]
    return sorted(found)


def wanted(plan: CopyPlan, maps: list[PageMap]) -> list[tuple[int, int]]:
    """The same, page by page from the plan."""
    return sorted(
        (host_base + host * kind.host_stride + at, device_base + device * kind.device_stride + at)
        for kind in maps
        for host_base, device_base in zip(kind.host_bases.tolist(), kind.device_bases.tolist(), strict=True)
        if host_base
        for host, device in zip(plan.host_pages().tolist(), plan.device_pages().tolist(), strict=True)
        for at in range(0, kind.page_bytes, 16)
    )


class TestDivide(CustomTestCase):
    @given(
        pieces=st.lists(st.integers(1, 6), min_size=1, max_size=8),
        seed=st.integers(0, 1 << 16),
        threshold=st.one_of(st.none(), st.integers(0, 512)),
        merges=st.booleans(),
        absent=st.one_of(st.none(), st.integers(0, LAYERS - 1)),
    )
    @settings(max_examples=150, deadline=None)
    def test_every_page_of_every_kind_and_layer_is_moved_exactly_once(
        self, pieces: list[int], seed: int, threshold: int | None, merges: bool, absent: int | None
    ) -> None:
        rng = np.random.default_rng(seed)
        runs = np.split(np.arange(sum(pieces), dtype=np.int64), np.cumsum(pieces)[:-1])
        host, device = (np.concatenate([runs[at] for at in rng.permutation(len(runs))]) for _ in range(2))
        plan = CopyPlan.from_pages(page_size=4, host_pages=host, device_pages=device)
        maps = [page_map(96, first=0, merges=merges), page_map(32, first=1 << 14, merges=merges, absent=absent)]
        self.assertEqual(moved(divide(plan, maps, long_copy_bytes=threshold), maps), wanted(plan, maps))

    def test_a_run_goes_to_a_copy_engine_from_the_threshold_on_for_each_kind_by_its_own_bytes(self) -> None:
        plan = CopyPlan.from_pages(page_size=4, host_pages=np.array([0, 1, 2, 9]), device_pages=np.array([4, 5, 6, 1]))
        maps = [page_map(96, first=0, merges=True), page_map(32, first=1 << 14, merges=True)]
        work = divide(plan, maps, long_copy_bytes=3 * 96)
        self.assertEqual(work.sizes.tolist(), [[288]] * LAYERS)
        assert work.pairs is not None
        self.assertEqual(work.pairs.reshape(-1, 2).tolist(), [[0, 1], [1, 4], [9, 1], [0, 4], [1, 5], [2, 6], [9, 1]])

    def test_pages_that_do_not_join_on_the_host_are_copied_one_by_one(self) -> None:
        plan = CopyPlan.from_pages(page_size=4, host_pages=np.arange(3), device_pages=np.arange(3))
        work = divide(plan, [page_map(96, first=0, merges=False)], long_copy_bytes=0)
        self.assertEqual(work.sizes.tolist(), [[96, 96, 96]] * LAYERS)
        self.assertIsNone(work.pairs)


if __name__ == "__main__":
    unittest.main()
