"""Our `HiRadixCache` with `IdentityLayout` beside the newest release's own `UnifiedRadixCache`, which is its only tree.

Both are behind SGLang's own requests and batches, in chunks, with aborts and retractions. After each call everything
that a scheduler can see is compared. The KV of each matched slot must be what its prefix says.

Permitted differences, each with its reason, and each seen below:

- *The age of a split node's upper part* (`fifo`, `filo`) and *uses under write_back* (`lfu`, `slru`): ours decides as
  beside the other releases. `support.unified.CorrectedTreeCore` takes both out of SGLang's tree; the other policies are
  compared with its Rust tree as it is.
- *Who gives way on a full host.* With write_through SGLang's tree keeps the host copies of nodes that are on the
  device, so that a full host takes little of what leaves it; ours lets those copies go first. With write_back SGLang's
  does so too, but in the order in which they became such, ours in the order of eviction. So the host has room for
  everything in the comparison.

SGLang's tree submits the backups of a step when the step ends, ours at once: both settle after each step.
"""

from __future__ import annotations

import random
import tempfile
import unittest
from array import array
from collections import Counter
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch.distributed as dist
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.plugins import load_plugins
from sglang.test.ci.ci_register import register_cpu_ci
from typing_extensions import override

from kvlayouts.common.values import EvictionPolicy, WritePolicy
from sglang.srt.mem_cache.hicache.runtime import standalone_runtime
from sglang.srt.mem_cache.hicache.seam.features import SINCE_0_5_23
from sglang.srt.mem_cache.layouts import PoolKind
from support.caches import CacheSpec, CacheTestCase, chain
from support.unified import CORRECTED, RUST, UnifiedScheduler, WritingScheduler

if TYPE_CHECKING:
    from collections.abc import Iterator

assert SINCE_0_5_23, "conftest.py leaves this file out beside an older release"
register_cpu_ci(est_time=40, suite="base-a-test-cpu")

STEPS = 250
POOLS = (PoolKind.MLA, PoolKind.MHA, PoolKind.DSA)
WEIGHTS = {"start": 6, "go on": 4, "decode": 5, "finish": 4, "abort": 1, "match": 5, "evict": 3, "touch": 2, "flush": 1}
AGED, USED = ("fifo", "filo"), ("lfu", "slru")


class Side:
    """One scheduler, with the requests that it runs."""

    def __init__(self, scheduler: WritingScheduler) -> None:
        self.scheduler = scheduler
        self.requests: list[Any] = []

    def perform(self, action: str, tokens: array[int], number: int) -> object:
        """One step; returns what was observed. `number` picks and measures."""
        scheduler, requests, page = self.scheduler, self.requests, self.scheduler.spec.page_size
        if action == "match":
            return scheduler.match(tokens)
        if action == "evict":
            return scheduler.cache.evict(EvictParams(num_tokens=number % (4 * page))).num_tokens_evicted
        if action == "touch":
            cache: Any = scheduler.cache
            return cache.touch_prefix(RadixKey(tokens))
        if action == "start" and scheduler.pool.available_size() and self._fits(len(tokens)):
            requests.append(scheduler.start(tokens, chunk=None if number % 2 else (1 + number % 3) * page))
            return requests[-1].kv.cache_protected_len
        if action == "go on" and scheduler.chunked:
            request = scheduler.chunked[number % len(scheduler.chunked)]
            if self._fits(len(request.origin_input_ids)):
                scheduler.go_on(request, chunk=None if number % 2 else 2 * page)
                return request.kv.cache_protected_len
            return self._end(request, keep=False)
        if action == "decode" and scheduler.running is not None and not scheduler.running.is_empty():
            retracted = scheduler.decode(1 + number % 6)
            self.requests = [request for request in requests if request not in retracted]
            return [request.rid for request in retracted]
        if action in ("finish", "abort") and requests:
            request = requests[number % len(requests)]
            return self._end(request, keep=action == "finish" and request not in scheduler.chunked)
        if action == "flush" and not requests and number % 5 == 0:
            scheduler.flush()
        return None

    def _fits(self, tokens: int) -> bool:
        """As SGLang's admission: with what can be evicted, and a page more for the answer."""
        room = self.scheduler.allocator.available_size() + self.scheduler.cache.evictable_size()
        return int(room) >= tokens + 2 * self.scheduler.spec.page_size

    def _end(self, request: Any, *, keep: bool) -> str:  # noqa: ANN401  # SGLang's
        self.requests.remove(request)
        self.scheduler.finish(request, insert=keep)
        return f"{request.rid} has ended"


class _OneRank(CacheTestCase):
    """A process group of one rank, which SGLang's tree asks for, and the hooks of a server."""

    @classmethod
    @override
    def setUpClass(cls) -> None:
        super().setUpClass()
        load_plugins()
        folder = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=0, world_size=1)
        cls.addClassCleanup(dist.destroy_process_group)


class TestIdentityMatchesUnified(_OneRank):
    def test_the_two_answer_every_call_alike(self) -> None:
        outcomes: Counter[str] = Counter()
        for seed, (policy, eviction) in enumerate(product(get_args(WritePolicy), get_args(EvictionPolicy))):
            corrected = eviction in AGED or (policy == "write_back" and eviction in USED)
            spec = _spec(pool=POOLS[seed % 3], policy=policy, eviction=eviction)
            with self.subTest(policy=policy, eviction=eviction), _both(spec, CORRECTED if corrected else RUST) as sides:
                self._compare(sides, random.Random(seed), outcomes)
        for outcome in ("loaded requests", "retractions", "evicted", "chunks"):
            self.assertGreater(outcomes[outcome], 0, f"no sequence led to {outcome}: {outcomes}")

    def _compare(self, sides: tuple[Side, Side], rng: random.Random, outcomes: Counter[str]) -> None:
        spec = sides[0].scheduler.spec
        for step in range(STEPS):
            (action,) = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))
            pages = [rng.randrange(3) for _ in range(rng.randrange(1, 4 if spec.pool is PoolKind.DSA else 6))]
            tokens, number = chain(spec, *pages) + array("q", [7] * rng.randrange(3)), rng.randrange(1000)
            answers = [side.perform(action, tokens, number) for side in sides]
            for side in sides:
                side.scheduler.settle()
            where = f"step {step}, {action} {number} of pages {pages}"
            self.assertEqual(answers[0], answers[1], where)
            self.assertEqual(sides[0].scheduler.seen(), sides[1].scheduler.seen(), where)
            outcomes["evicted"] += action == "evict" and answers[0] != 0
            outcomes["chunks"] += action == "go on" and answers[0] is not None
        outcomes["loaded requests"] += sides[0].scheduler.host_hits
        outcomes["retractions"] += sides[0].scheduler.retractions


class TestPermittedDifferences(_OneRank):
    """What the comparison leaves out, seen in SGLang's tree and not in ours: tokens on the device and on the host."""

    def test_the_upper_part_of_a_split_node_is_as_young_as_the_split(self) -> None:
        """Pages 1 2 came first, then page 3, then 1 2 was split. Two pages leave: 2, and the older of 1 and 3."""
        seen = _ask(_spec(eviction="fifo"), [(1, 2), (3,), (1,)], evicted_pages=2, matched=(1,))
        self.assertEqual(seen, [(4, 0), (0, 4)])

    def test_a_request_is_a_use_under_write_back(self) -> None:
        """Page 1 was asked for twice, then page 2 once: by uses 2 leaves, by time 1."""
        seen = _ask(_spec(policy="write_back", eviction="lfu"), [(1,), (1,), (2,)], evicted_pages=1, matched=(1,))
        self.assertEqual(seen, [(4, 0), (0, 4)])

    def test_a_full_host_takes_what_leaves_the_device(self) -> None:
        """The copies of pages 0 to 4 fill the host. Page 5, the oldest, leaves the device."""
        mirrors = [(0,), (1,), (2,), (3,), (4,)]
        seen = _ask(_spec(host_pages=5), [*mirrors, (5,), *mirrors], evicted_pages=1, matched=(5,))
        self.assertEqual(seen, [(0, 4), (0, 0)])


def _ask(
    spec: CacheSpec, prompts: list[tuple[int, ...]], *, evicted_pages: int, matched: tuple[int, ...]
) -> list[tuple[int, int]]:
    """What both trees have of `matched` when requests of so many pages have come and gone, and some pages have left."""
    found = []
    with _both(spec, RUST) as sides:
        for scheduler in (side.scheduler for side in sides):
            for pages in prompts:
                scheduler.finish(scheduler.start(chain(spec, *pages)))
                scheduler.settle()
            scheduler.cache.evict(EvictParams(num_tokens=evicted_pages * spec.page_size))
            found.append(scheduler.match(chain(spec, *matched)))
    return found


def _spec(**fields: Any) -> CacheSpec:  # noqa: ANN401  # fields of CacheSpec
    """One rank; the host has room for all that these tests store."""
    return CacheSpec(**{"layout": "identity", "ranks": 1, "device_pages": 24, "host_pages": 600, **fields})


@contextmanager
def _both(spec: CacheSpec, core: str) -> Iterator[tuple[Side, Side]]:
    """Ours and SGLang's, in this order."""
    with standalone_runtime(
        page_size=spec.page_size,
        attention_backend="torch_native",
        hicache_ratio=(spec.host_pages - 0.5) / spec.device_pages,
        hicache_size=0,
        hicache_mem_layout=spec.mem_layout,
        hicache_write_policy=spec.policy,
    ) as server_args:
        schedulers = WritingScheduler(spec), UnifiedScheduler(spec, server_args, core=core)
        try:
            yield Side(schedulers[0]), Side(schedulers[1])
        finally:
            for scheduler in schedulers:
                scheduler.cache.release_host_resources()


if __name__ == "__main__":
    unittest.main()
