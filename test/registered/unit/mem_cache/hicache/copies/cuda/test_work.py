from __future__ import annotations

import unittest

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

from sglang.srt.mem_cache.hicache.copies.cuda.page_maps import PageMap
from sglang.srt.mem_cache.hicache.copies.cuda.work import SMALL_COPY_BYTES, Copies, Work, WorkShape, write_pairs
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


def pairs_of(work: Work) -> list[list[int]]:
    """The page pairs that the kernel would read."""
    if work.short is None:
        return []
    table = np.full(2 * work.short.pages + 1, -1, dtype=np.int64)
    pages = write_pairs(work.short, table)
    assert table[-1] == -1
    pairs: list[list[int]] = table[: 2 * pages].reshape(-1, 2).tolist()
    return pairs


def moved(work: Work, copies: Copies | None, maps: list[PageMap]) -> list[tuple[int, int]]:
    """Every (host address, device address) of 16 bytes that is moved, in all layers, in order."""
    found: list[tuple[int, int]] = []
    if copies is not None:
        for host, device, size in zip(copies.host.tolist(), copies.device.tolist(), copies.sizes.tolist(), strict=True):
            found += [(host + at, device + at) for at in range(0, size, 16)]
    for kind in maps:
        for host_base, device_base in zip(kind.host_bases.tolist(), kind.device_bases.tolist(), strict=True):
            for host_page, device_page in pairs_of(work) if host_base else []:
                host = host_base + host_page * kind.host_stride
                device = device_base + device_page * kind.device_stride
                found += [(host + at, device + at) for at in range(0, kind.page_bytes, 16)]
    return sorted(found)


def layers_of(copies: Copies, maps: list[PageMap]) -> list[set[int]]:
    """For each part of the copies, the layers whose memory it writes."""
    starts = np.array([kind.device_bases for kind in maps])
    return [
        {int(np.argwhere((starts <= address) & (address < starts + (1 << 14)))[0][1]) for address in part.tolist()}
        for part in np.split(copies.device, copies.ends[:-1])
    ]


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
        work, copies = divide(plan, maps, threshold)
        self.assertEqual(moved(work, copies, maps), wanted(plan, maps))
        for layer, found in enumerate([] if copies is None else layers_of(copies, maps)):
            self.assertLessEqual(found, {layer})

    def test_a_run_goes_to_the_copy_engines_from_the_threshold_on_with_all_its_kinds(self) -> None:
        plan = CopyPlan.from_pages(page_size=4, host_pages=np.array([0, 1, 2, 9]), device_pages=np.array([4, 5, 6, 1]))
        maps = [page_map(96, first=0, merges=True), page_map(32, first=1 << 14, merges=True)]
        for threshold in (2 * 96 + 1, 3 * 96):
            work, copies = divide(plan, maps, threshold)
            assert copies is not None
            self.assertEqual((copies.sizes.tolist(), [*copies.ends]), ([288, 96] * LAYERS, [2, 4, 6]))
            self.assertEqual(pairs_of(work), [[9, 1]])
        self.assertIsNone(divide(plan, maps, 3 * 96 + 1)[1])

    def test_a_kernel_that_would_save_few_copies_none_of_them_small_is_not_launched(self) -> None:
        plan = CopyPlan.from_pages(page_size=4, host_pages=np.array([0, 1, 2, 8, 9]), device_pages=np.arange(5))
        large, small = SMALL_COPY_BYTES, SMALL_COPY_BYTES // 2
        for sizes, absent, merges, long_run_pages, copies in (
            ((large, large), None, True, 3, 2 * LAYERS),  # one short run, of two kinds
            ((large, large), 1, True, 3, 2 * LAYERS - 1),
            ((large, small), None, True, 3, 2 * LAYERS),  # of two pages, so not small
            ((large, large), None, False, 2, 5 * 2 * LAYERS),  # page by page
        ):
            first, second = sizes
            maps = [
                page_map(first, first=0, merges=merges),
                page_map(second, first=1 << 14, merges=merges, absent=absent),
            ]
            with self.subTest(sizes=sizes, absent=absent, merges=merges):
                threshold = long_run_pages * first
                self.assertIsNone(divide(plan, maps, threshold, copies)[0].short)
                self.assertIsNotNone(divide(plan, maps, threshold, copies - 1)[0].short)
        smaller = [page_map(large, first=0, merges=True), page_map(small - 16, first=1 << 14, merges=True)]
        self.assertIsNotNone(divide(plan, smaller, 3 * large, 1000)[0].short)
        self.assertIsNotNone(divide(plan, smaller[:1], None, 1000)[0].short)

    def test_pages_that_do_not_join_on_the_host_are_copied_one_by_one(self) -> None:
        plan = CopyPlan.from_pages(page_size=4, host_pages=np.arange(3), device_pages=np.arange(3))
        work, copies = divide(plan, [page_map(96, first=0, merges=False)], 0)
        assert copies is not None
        self.assertEqual((copies.sizes.tolist(), [*copies.ends]), ([96] * 3 * LAYERS, [3, 6, 9]))
        self.assertIsNone(work.short)

    def test_an_empty_plan_is_no_work(self) -> None:
        none = np.empty(0, dtype=np.int64)
        work, _ = divide(
            CopyPlan.from_pages(page_size=4, host_pages=none, device_pages=none),
            [page_map(96, first=0, merges=True)],
            0,
        )
        self.assertEqual((work.long, work.short), (None, None))


def divide(
    plan: CopyPlan, maps: list[PageMap], long_copy_bytes: int | None, few_copies: int = 0
) -> tuple[Work, Copies | None]:
    """The work of `plan`, and the copies of the engines."""
    shape = WorkShape(maps, long_copy_bytes=long_copy_bytes, few_copies=few_copies)
    work = shape.divide(plan)
    return work, None if work.long is None else shape.copies(work.long)


if __name__ == "__main__":
    unittest.main()
