"""A server knows on the host which pages its requests have: nothing is read back from the device, and nothing is wrong.

Slots and rows are tensors that raise when they are read. A GPU, where there is one, says the same of the same steps.
"""

from __future__ import annotations

import random
import traceback
import unittest
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.plugins import load_plugins
from sglang.test.ci.ci_register import register_cpu_ci
from typing_extensions import override

from sglang.srt.mem_cache.hicache.requests.pages import RequestPages
from sglang.srt.mem_cache.hicache.runtime import standalone_runtime
from sglang.srt.mem_cache.hicache.tree.calls import Insertion
from sglang.srt.mem_cache.layouts import LayoutInvariantError
from support.caches import CacheSpec, CacheTestCase, chain
from support.device_tensors import READS, DeviceReadError, on_device, peek
from support.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

register_cpu_ci(est_time=40, suite="base-a-test-cpu")

PAGE = 4
OURS = ("srt/mem_cache/hicache/", "srt/mem_cache/layouts/")  # in the name of a file


@dataclass(frozen=True, slots=True, kw_only=True)
class OneTokenPages(CacheSpec):
    """Pages of one token, which SGLang allocates another way."""

    @property
    @override
    def page_size(self) -> int:
        """One."""
        return 1


SPECS: dict[str, CacheSpec] = {
    "cp_shared": CacheSpec(host_pages=64),
    "identity": CacheSpec(layout="identity", ranks=1, device_pages=24, host_pages=64),
    "identity, write_back": CacheSpec(layout="identity", ranks=1, device_pages=24, host_pages=64, policy="write_back"),
    "identity, pages of one token": OneTokenPages(layout="identity", ranks=1, device_pages=96, host_pages=256),
}


class RequestPagesTestCase(CacheTestCase):
    @classmethod
    @override
    def setUpClass(cls) -> None:
        super().setUpClass()
        load_plugins()

    def scheduler(self, spec: CacheSpec, **others: Any) -> Scheduler:  # noqa: ANN401
        """A scheduler whose slots cannot be read."""
        self.enterContext(standalone_runtime(page_size=spec.page_size, attention_backend="torch_native", **others))
        return Scheduler(spec, as_device=on_device, values=peek)


def ordinary_life(scheduler: Scheduler, check: Callable[[], None]) -> None:
    """Everything that a request can meet, one after the other."""
    spec = scheduler.spec
    long = chain(CacheSpec(), *range(1, 8))  # 28 tokens
    first = scheduler.start(long)
    check()
    scheduler.decode(6)
    check()
    second = scheduler.start([*long[:18], 7, 7])  # shares a prefix, splits a node
    check()
    scheduler.decode(3)
    check()
    scheduler.finish(first)
    scheduler.settle()
    check()
    chunked = scheduler.start(chain(CacheSpec(), *range(20, 28)), chunk=10)
    check()
    scheduler.go_on(chunked, chunk=10)
    check()
    scheduler.decode(2)
    scheduler.go_on(chunked)
    check()
    scheduler.decode(2)
    scheduler.finish(chunked, insert=False)  # aborted while it decodes
    check()
    aborted = scheduler.start(chain(CacheSpec(), *range(30, 34)), chunk=6)
    scheduler.finish(aborted, insert=False)  # aborted between chunks
    check()
    twins = [scheduler.start(chain(CacheSpec(), 40, 41, 42)) for _ in range(2)]  # the second is served from the tree
    check()
    for request in (*twins, second):
        scheduler.finish(request)
        check()
    scheduler.settle()
    scheduler.cache.evict(EvictParams(num_tokens=24 * PAGE))
    again = scheduler.start(long)  # from the host
    check()
    assert again.host_hit_length, "the host has the prompt"
    scheduler.settle()
    waiting = [scheduler.start(chain(CacheSpec(), 50 + number)) for number in range(3)]
    retracted: list[Any] = []
    while not retracted:
        retracted += scheduler.decode()
        check()
    for request in [*waiting, again]:
        if request not in retracted:
            scheduler.finish(request)
            check()
    scheduler.settle()
    scheduler.flush()
    check()
    scheduler.start(long[: 2 * PAGE + 1])
    check()
    assert scheduler.allocator.available_size() == (24 - 3) * PAGE - (0 if spec.page_size > 1 else -3)


class TestOrdinaryPaths(RequestPagesTestCase):
    def test_no_step_in_the_life_of_a_request_reads_the_device(self) -> None:
        for name, spec in SPECS.items():
            with self.subTest(name):
                scheduler = self.scheduler(spec)
                ordinary_life(scheduler, scheduler.check)
                self.assertEqual(scheduler.mirror.reads, 0)

    def test_no_sequence_of_steps_reads_the_device_or_mistakes_a_page(self) -> None:
        for name, spec in SPECS.items():
            host_hits = retractions = 0
            for seed in range(12):
                with self.subTest(name, seed=seed):
                    scheduler = self.scheduler(spec)
                    _wander(scheduler, random.Random(seed))
                    self.assertEqual(scheduler.mirror.reads, 0)
                    host_hits += scheduler.host_hits
                    retractions += scheduler.retractions
            self.assertGreater(host_hits, 0)
            self.assertGreater(retractions, 0)


def _wander(scheduler: Scheduler, rng: random.Random, steps: int = 100) -> None:
    for _ in range(steps):
        running = list(scheduler.running.reqs) if scheduler.running is not None else []
        room = scheduler.allocator.available_size() + scheduler.cache.evictable_size()
        step = rng.choice(
            ["start", "start", "go on", "decode", "decode", "finish", "abort", "settle", "evict", "flush"]
        )
        chunk = rng.choice([None, 3, 8, 13])
        if step == "start" and len(running) + len(scheduler.chunked) < 5 and room > 32:
            pages = [rng.randrange(3) for _ in range(rng.randrange(1, 7))]
            tokens = chain(CacheSpec(), *(10 * place + page for place, page in enumerate(pages)))
            scheduler.start(tokens[: len(tokens) - rng.randrange(PAGE)], chunk=chunk)
        elif step == "go on" and scheduler.chunked and room > 60:
            scheduler.go_on(rng.choice(scheduler.chunked), chunk=chunk)
        elif step == "decode" and running:
            scheduler.decode(rng.randrange(1, 16))
        elif step in ("finish", "abort") and running:
            scheduler.finish(rng.choice(running), insert=step == "finish")
        elif step == "abort" and scheduler.chunked:
            scheduler.finish(rng.choice(scheduler.chunked), insert=False)
        elif step == "settle":
            scheduler.settle()
        elif step == "evict":
            scheduler.cache.evict(EvictParams(num_tokens=rng.randrange(30)))
        elif step == "flush" and not running and not scheduler.chunked:
            scheduler.flush()
        scheduler.check()


class TestWhatIsNotKnown(RequestPagesTestCase):
    @override
    def setUp(self) -> None:
        super().setUp()
        self.enterContext(standalone_runtime(page_size=PAGE, attention_backend="torch_native"))
        self.scheduler_ = Scheduler(SPECS["cp_shared"])  # may be read

    def test_slots_that_are_no_part_of_a_row_are_read_and_counted_and_the_first_time_logged(self) -> None:
        scheduler = self.scheduler_
        slots = [scheduler.allocator.alloc(2 * PAGE) for _ in range(2)]
        assert slots[0] is not None
        assert slots[1] is not None
        with self.assertLogs("sglang.srt.mem_cache.hicache.requests.pages", "WARNING") as logged:
            scheduler.allocator.free(slots[0])
            scheduler.allocator.free_group_begin()
            scheduler.allocator.free(slots[1])
            scheduler.allocator.free_group_end()
        self.assertEqual(scheduler.mirror.reads, 2)
        self.assertEqual(len(logged.output), 1)
        self.assertIn("sglang:kv_layout_page_reads_total", logged.output[0])
        self.assertEqual(scheduler.allocator.available_size(), 24 * PAGE)

    def test_a_request_whose_slots_were_freed_behind_its_back_is_read_not_guessed(self) -> None:
        scheduler = self.scheduler_
        request = scheduler.start(chain(scheduler.spec, 1, 2))
        other = scheduler.start(chain(scheduler.spec, 3, 4))
        scheduler.decode(PAGE + 1)
        row = scheduler.pool.req_to_token[request.kv.req_pool_idx]
        last = row[3 * PAGE : request.kv.kv_allocated_len].clone()  # a copy says nothing about where it was
        scheduler.allocator.free(last)
        request.kv.kv_allocated_len = request.kv.kv_committed_len = 3 * PAGE
        self.assertIsNone(scheduler.mirror.of(request.kv, request.last_node, 3 * PAGE))
        self.assertIsNotNone(scheduler.mirror.of(other.kv, other.last_node, 3 * PAGE))
        self.assertEqual(scheduler.mirror.reads, 1)
        scheduler.finish(request)
        self.assertGreater(scheduler.mirror.reads, 1)
        scheduler.finish(other)
        scheduler.settle()
        scheduler.check()

    def test_a_part_of_a_row_is_known_by_its_place_whoever_gives_it_back(self) -> None:
        scheduler = self.scheduler_
        request = scheduler.start(chain(scheduler.spec, 1, 2))
        scheduler.decode(2 * PAGE + 1)
        free = scheduler.allocator.available_size()
        scheduler.cache.free_kv_row(request.kv, [(3 * PAGE, request.kv.kv_allocated_len)])
        self.assertEqual(scheduler.allocator.available_size(), free + 2 * PAGE)
        request.kv.kv_allocated_len = request.kv.kv_committed_len = 3 * PAGE
        scheduler.finish(request)
        self.assertEqual(scheduler.mirror.reads, 0)
        scheduler.check()

    def test_thoughts_that_are_not_to_be_cached_are_given_back_without_a_read(self) -> None:
        scheduler = self.scheduler(SPECS["cp_shared"], strip_thinking_cache=True)
        request = scheduler.start(chain(scheduler.spec, 1, 2))
        scheduler.decode(2 * PAGE + 1)
        request.reasoning_tokens = 3
        scheduler.finish(request)
        self.assertEqual([node.tokens for node in scheduler.cache.nodes()], [2 * PAGE])
        self.assertEqual(scheduler.allocator.available_size(), 22 * PAGE)
        self.assertEqual((scheduler.mirror.reads, scheduler.mirror.held_pages), (0, 0))

    def test_what_was_given_back_is_never_given_back_again(self) -> None:
        scheduler = self.scheduler_
        request = scheduler.start(chain(scheduler.spec, 1))
        scheduler.decode(PAGE)
        row = scheduler.pool.req_to_token[request.kv.req_pool_idx]
        scheduler.allocator.free(row[PAGE : 2 * PAGE])
        with self.assertRaisesRegex(LayoutInvariantError, "freed but not in use"):
            scheduler.allocator.free(row[PAGE : 2 * PAGE])

    def test_slots_that_are_no_whole_pages_are_refused_by_insert(self) -> None:
        scheduler = self.scheduler_
        slots = scheduler.allocator.alloc(2 * PAGE)
        assert slots is not None
        key = RadixKey(chain(scheduler.spec, 1, 2))
        for wrong in (5, 4):  # not the first slot of a page; the first of a page
            damaged = slots.clone()
            damaged[wrong] = slots[0]
            with self.assertRaisesRegex(LayoutInvariantError, "page"):
                scheduler.cache.put(Insertion(key=key, value=damaged))
        self.assertEqual(list(scheduler.cache.nodes()), [])


class TestRows(unittest.TestCase):
    """`RequestPages` by itself."""

    @override
    def setUp(self) -> None:
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

        self.pool = ReqToTokenPool(4, 64, "cpu", enable_memory_saver=False)
        self.mirror = RequestPages(self.pool, PAGE)

    def pages(self, *numbers: int) -> Any:  # noqa: ANN401  # numpy
        return np.array(numbers, dtype=np.int64)

    def test_only_views_of_the_table_have_a_place(self) -> None:
        table = self.pool.req_to_token
        self.mirror.record(2, 1, self.pages(7, 8, 9), begins=True)
        for slots in (
            table[2, 4:8].clone(),
            table[2, 4:8].to(torch.int64),
            table[2, 4:12:2],
            table[2:3, 4:8],
            table[3, 4:8],
        ):
            self.assertIsNone(self.mirror.take(slots))
        taken = self.mirror.take(table[2][8:14])
        assert taken is not None
        self.assertEqual(taken.tolist(), [8, 9])
        self.assertEqual(self.mirror.held_pages, 1)
        for slots in (table[2, 8:9], table[2, 0:8], table[2, 12:20]):  # gone; the tree's; beyond
            self.assertIsNone(self.mirror.take(slots))

    def test_a_row_that_grew_unseen_is_unknown_until_it_begins_anew(self) -> None:
        self.mirror.record(1, 0, self.pages(3), begins=True)
        self.mirror.record(1, 2, self.pages(5), begins=False)
        self.assertIsNone(self.mirror.take(self.pool.req_to_token[1, 0:4]))
        self.mirror.record(1, 3, self.pages(6), begins=False)
        self.assertEqual(self.mirror.held_pages, 0)
        self.mirror.record(1, 0, self.pages(4), begins=True)
        self.assertEqual(self.mirror.held_pages, 1)

    def test_a_row_begins_anew_whoever_had_it(self) -> None:
        self.mirror.record(1, 0, self.pages(3, 4), begins=True)
        self.mirror.record(1, 2, self.pages(5), begins=True)
        self.assertIsNone(self.mirror.take(self.pool.req_to_token[1, 0:4]))
        self.assertEqual(self.mirror.held_pages, 1)

    def test_a_row_that_was_cut_goes_on_from_there(self) -> None:
        self.mirror.record(1, 0, self.pages(*range(10, 26)), begins=True)
        self.mirror.take(self.pool.req_to_token[1, 3 * PAGE : 16 * PAGE])
        self.mirror.record(1, 3, self.pages(99), begins=False)
        taken = self.mirror.take(self.pool.req_to_token[1, 0 : 4 * PAGE])
        assert taken is not None
        self.assertEqual(taken.tolist(), [10, 11, 12, 99])


class TestGuard(CacheTestCase):
    """The tensors that raise: without them the tests above would prove nothing."""

    def test_every_way_to_read_a_tensor_of_the_device_raises(self) -> None:
        tensor = on_device(torch.arange(4))
        reads: dict[str, Callable[[], object]] = {
            "cpu": tensor.cpu,
            "to": lambda: tensor.to("cpu", torch.int64),
            "numpy": tensor.numpy,
            "__array__": lambda: np.asarray(tensor),
            "tolist": tensor.tolist,
            "item": lambda: tensor[0].item(),
            "__int__": lambda: int(tensor[0]),
            "__bool__": lambda: bool(tensor[0]),
            "unique": tensor.unique,
            "nonzero": tensor.nonzero,
            "equal": lambda: torch.equal(tensor, torch.arange(4)),
        }
        self.assertLessEqual(set(reads) - {"to"}, READS)
        for name, read in reads.items():
            with self.subTest(name), self.assertRaises(DeviceReadError):
                read()
        for derived in (tensor[1:], tensor.clone(), torch.cat([tensor, tensor]), tensor.to(torch.int32) + 1):
            with self.assertRaises(DeviceReadError):
                derived.tolist()

    def test_without_the_mirror_the_same_steps_are_caught_reading(self) -> None:
        self.enterContext(standalone_runtime(page_size=PAGE, attention_backend="torch_native"))
        scheduler = Scheduler(SPECS["cp_shared"], as_device=on_device, values=peek, mirrored=False)
        with self.assertRaises(DeviceReadError):
            scheduler.start(chain(scheduler.spec, 1, 2))


@contextmanager
def _waits() -> Iterator[list[str]]:
    """Where the host waits for the GPU within the block, a stack each."""
    waits: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda *_others, **_named: waits.append("".join(traceback.format_stack()[-14:-2]))
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode("default")


@unittest.skipUnless(torch.cuda.is_available(), "needs a GPU")
class TestOnAGpu(RequestPagesTestCase):
    def test_nothing_of_ours_makes_the_host_wait(self) -> None:
        for name in ("cp_shared", "identity"):
            with self.subTest(name), standalone_runtime(page_size=PAGE, device="cuda", attention_backend="triton"):
                scheduler = Scheduler(SPECS[name], device="cuda")
                ordinary_life(scheduler, scheduler.check)  # kernels compile, and what is computed is right
                scheduler.cache.release_host_resources()
                self.assertEqual(self._own_waits(Scheduler(SPECS[name], device="cuda")), [])
                blind = Scheduler(SPECS[name], device="cuda", mirrored=False)
                self.assertGreater(len(self._own_waits(blind)), 10, "waits are noticed where there are some")

    def _own_waits(self, scheduler: Scheduler) -> list[str]:
        with _waits() as waits:
            ordinary_life(scheduler, lambda: None)
        scheduler.cache.release_host_resources()  # pinned memory that came back to the system must not stay pinned
        return [wait for wait in waits if any(place in wait for place in OURS)]


if __name__ == "__main__":
    unittest.main()
