from __future__ import annotations

import random
import unittest
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.test.ci.ci_register import register_cpu_ci

from sglang.srt.mem_cache.layouts import LayoutInvariantError, PoolKind
from support.caches import CacheSpec, CacheTestCase, chain
from support.groups import Group

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable

    from support.caches import Rank

register_cpu_ci(est_time=60, suite="base-a-test-cpu")

RANKS = 4


class Traffic:
    """Random requests over a few chains that share prefixes, some running at a time, with acks late at random."""

    def __init__(self, spec: CacheSpec, seed: int) -> None:
        self.random = random.Random(seed)
        self.group = Group(spec)
        self.group.hold()
        self.hits = self.host_hits = self.refused = 0

    def step(self) -> None:
        """One random event, the same on all ranks, but for which copies end where."""
        group, choice = self.group, self.random.random()
        if choice < 0.45 and len(group.running) < 3:
            self._start()
        elif choice < 0.75 and group.running:
            group.finish(self.random.choice(group.running))
        elif choice < 0.80 and group.running:
            group.abort(self.random.choice(group.running))
        elif choice < 0.85:
            tokens = self.random.randrange(1, 6) * group.spec.page_size
            group.agreed(lambda rank: rank.cache.evict(EvictParams(num_tokens=tokens)).num_tokens_evicted)
        elif choice < 0.86:
            group.agreed(lambda rank: rank.cache.evict_host(group.spec.page_size))
        for rank in group.ranks:
            rank.engine.finish_writes(self.random.choice((0, 0, 1, 3)))
            rank.engine.finish_loads(self.random.choice((0, 0, 1)))
        group.settle()

    def _start(self) -> None:
        request = self.group.start(self._tokens(), self.random.choice((None, None, "adapter")))
        if request is None:
            self.refused += 1
            return
        self.hits += request.device_pages
        self.host_hits += request.host_pages

    def _tokens(self) -> array[int]:
        root, pages = self.random.randrange(5), self.random.randrange(1, 9)
        branch = self.random.randrange(3)
        return chain(self.group.spec, *(root * 100 + (at if at < 3 else at + 10 * branch) for at in range(pages)))


class TestRanksInLockstep(CacheTestCase):
    def _drive(self, spec: CacheSpec, *, steps: int, seed: int) -> Traffic:
        traffic = Traffic(spec, seed)
        for step in range(steps):
            traffic.step()
            try:
                traffic.group.check()
            except AssertionError as error:
                raise AssertionError(f"after step {step} of seed {seed} of {spec}") from error
        self.assertGreater(traffic.hits, 0)
        self.assertGreater(traffic.host_hits, 0)
        self.assertEqual(traffic.group.lockstep.calls, [steps + 1] * spec.ranks, "a rank reduced more or less often")
        return traffic

    def test_trees_and_ledgers_stay_equal_when_every_rank_sees_its_acks_at_another_time(self) -> None:
        for seed in range(3):
            traffic = self._drive(_spec(), steps=250, seed=seed)
            late = traffic.group.agreed(lambda rank: rank.cache.stats.late_backups)
            waits = traffic.group.each(lambda rank: rank.engine.waits)
            self.assertTrue(late or not any(waits), "the scheduler waited for a copy that nothing needed")

    def test_they_stay_equal_with_every_policy_and_pool(self) -> None:
        cases = (
            (PoolKind.MHA, "page_first_direct", "write_through_selective", "lfu"),
            (PoolKind.DSA, "layer_first", "write_through", "slru"),
            (PoolKind.MLA, "layer_first", "write_back", "lru"),
            (PoolKind.DSA, "page_first_direct", "write_back", "priority"),
        )
        for seed, (pool, mem_layout, policy, eviction) in enumerate(cases):
            with self.subTest(pool=pool, policy=policy):
                self._drive(
                    _spec(pool=pool, mem_layout=mem_layout, policy=policy, eviction=eviction), steps=250, seed=seed
                )

    def test_they_stay_equal_with_identity_and_under_host_pressure(self) -> None:
        self._drive(_spec(layout="identity", device_pages=20, host_pages=30), steps=200, seed=1)
        self._drive(_spec(layout="identity", device_pages=20, host_pages=12, policy="write_back"), steps=200, seed=2)
        tight = self._drive(_spec(device_pages=5, host_pages=4), steps=200, seed=3)
        self.assertGreater(tight.refused, 0)
        self._drive(_spec(device_pages=6, host_pages=3, policy="write_back"), steps=200, seed=4)

    def test_they_stay_equal_when_one_host_pool_is_smaller(self) -> None:
        traffic = Traffic(_spec(), seed=5)
        traffic.group = Group(_spec(), host_pages=[9, 7, 12, 8])
        traffic.group.hold()
        for _ in range(150):
            traffic.step()
            traffic.group.check()
        self.assertEqual({rank.controller.ledger.capacity_pages for rank in traffic.group.ranks}, {7})


class TestAcknowledgements(CacheTestCase):
    def test_no_rank_settles_before_the_slowest(self) -> None:
        group = Group(_spec())
        group.hold()
        for root in range(3):
            request = group.start(chain(group.spec, root * 10, root * 10 + 1))
            assert request is not None
            group.finish(request)
        for rank, finished in zip(group.ranks, (3, 1, 2, 2), strict=True):
            rank.engine.finish_writes(finished)
        group.settle()
        self.assertEqual([len(rank.controller.ack_write_queue) for rank in group.ranks], [2] * RANKS)
        self.assertEqual([sorted(rank.cache.parts.in_flight.backups) for rank in group.ranks], [[3, 4]] * RANKS)
        for rank in group.ranks:
            self.assertEqual([node.lock_ref for node in rank.nodes()], [0, 1, 1])
        group.check()

    def test_a_rank_with_nothing_ready_takes_part_in_the_one_reduction(self) -> None:
        group = Group(_spec())
        group.hold(1)
        request = group.start(chain(group.spec, 1, 2))
        assert request is not None
        group.finish(request)
        calls = list(group.lockstep.calls)
        group.settle()
        group.settle()
        self.assertEqual(group.lockstep.calls, [count + 2 for count in calls])
        self.assertEqual([len(rank.controller.ack_write_queue) for rank in group.ranks], [1] * RANKS)
        group.release(1)
        group.settle()
        self.assertEqual([len(rank.controller.ack_write_queue) for rank in group.ranks], [0] * RANKS)

    def test_a_load_stays_locked_and_protected_until_the_slowest_rank_has_it(self) -> None:
        group = Group(_spec())
        group.serve(chain(group.spec, 1, 2, 3))
        group.evict_all()
        group.hold(2)
        request = group.start(chain(group.spec, 1, 2, 3))
        assert request is not None
        group.finish(request)
        group.settle()
        for rank in group.ranks:
            (node,) = rank.nodes()
            self.assertEqual((node.lock_ref, node.host_ref_counter), (1, 1))
            self.assertEqual(rank.cache.evict(EvictParams(num_tokens=99)).num_tokens_evicted, 0)
            self.assertEqual(rank.cache.evict_host(99), 0)
        group.release(2)
        group.settle()
        for rank in group.ranks:
            (node,) = rank.nodes()
            self.assertEqual((node.lock_ref, node.host_ref_counter), (0, 0))
        group.check()

    def test_a_page_under_backup_is_not_evicted_before_its_copy_has_run(self) -> None:
        group = Group(_spec())
        group.hold()
        request = group.start(chain(group.spec, 1, 2, 3, 4))
        assert request is not None
        group.finish(request)
        self.assertEqual(group.agreed(lambda rank: rank.cache.evict(EvictParams(num_tokens=99)).num_tokens_evicted), 0)
        group.release()
        group.settle()
        group.evict_all()
        again = group.start(chain(group.spec, 1, 2, 3, 4))
        assert again is not None
        self.assertEqual((again.device_pages, again.host_pages), (0, 4))  # start() has compared the bytes

    def test_an_ack_that_nobody_waits_for_is_a_loud_error(self) -> None:
        group = Group(_spec())
        group.serve(chain(group.spec, 1))
        for rank in group.ranks:
            with self.assertRaisesRegex(LayoutInvariantError, "ack for backup 77, but under way are"):
                rank.cache.parts.in_flight.end_backup(77)
            with self.assertRaisesRegex(LayoutInvariantError, "ack for load 78, but under way are"):
                rank.cache.parts.in_flight.end_load(78)


class TestDigest(CacheTestCase):
    def test_every_piece_of_mirrored_state_changes_the_digest(self) -> None:
        def first(rank: Rank) -> Any:  # noqa: ANN401  # whatever field is changed
            return rank.nodes()[0]

        changes: dict[str, Callable[[Rank], object]] = {
            "locks": lambda rank: setattr(first(rank), "lock_ref", 1),
            "host protection": lambda rank: rank.accounting.host_copies.hold(first(rank)),
            "hits": lambda rank: setattr(first(rank), "hit_count", 9),
            "priority": lambda rank: setattr(first(rank), "priority", 9),
            "time": lambda rank: setattr(first(rank), "last_access_time", 9),
            "age": lambda rank: setattr(first(rank), "creation_time", 9),
            "salt": lambda rank: setattr(first(rank).key, "cache_salt", "salt"),
            "id": lambda rank: setattr(first(rank), "id", 9),
            "slots": lambda rank: setattr(first(rank), "slot_pages", first(rank).slot_pages[::-1]),
            "device tier": lambda rank: setattr(first(rank), "value", None),
            "host tier": lambda rank: first(rank).clear_metadata(),
            "owners": lambda rank: setattr(first(rank), "metadata", rank.nodes()[1].metadata),
            "key": lambda rank: setattr(first(rank), "key", rank.key(chain(rank.spec, 8, 9))),
            "namespace": lambda rank: setattr(first(rank), "key", rank.key(first(rank).key.token_ids, "other")),
            "parent": lambda rank: setattr(first(rank), "parent", rank.nodes()[1]),
            "evictable": lambda rank: setattr(rank.accounting, "evictable_tokens", 1),
            "protected": lambda rank: setattr(rank.accounting, "protected_tokens", 1),
            "free slots": lambda rank: rank.allocator.alloc(4),
            "ledger": lambda rank: rank.controller.ledger.clear(),
            "backups": lambda rank: rank.cache.parts.in_flight.begin_backup(first(rank), locked=False),
            "loads": lambda rank: rank.cache.parts.in_flight.begin_load(first(rank), rank.cache.root_node),
        }
        for name, change in changes.items():
            with self.subTest(name):
                group = Group(_spec())
                group.serve(chain(group.spec, 1, 2))
                group.serve(chain(group.spec, 3, 4, 5))
                self.assertEqual(len(set(group.digests())), 1)
                change(group.ranks[0])
                self.assertEqual(len(set(group.digests())), 2)

    def test_which_host_pages_a_rank_was_given_does_not_matter(self) -> None:
        group = Group(_spec(), host_pages=[12, 10, 10, 10])
        self.assertIsNotNone(group.ranks[0].cache.token_to_kv_pool_host.alloc(4))
        group.ranks[0].controller._surplus_pages -= 1  # noqa: SLF001  # the page is not the ledger's to count
        group.serve(chain(group.spec, 1, 2, 3, 4))
        pages = [node.metadata.host_pages.tolist() for rank in group.ranks for node in rank.nodes() if node.metadata]
        self.assertEqual(pages, [[1], [0], [0], [0]])
        self.assertEqual(len(set(group.digests())), 1)


def _spec(**changes: object) -> CacheSpec:
    fields: dict[str, object] = {"ranks": RANKS, "device_pages": 7, "host_pages": 10, **changes}
    return CacheSpec(**fields)  # type: ignore[arg-type]  # each caller's keywords are fields of CacheSpec


if __name__ == "__main__":
    unittest.main()
