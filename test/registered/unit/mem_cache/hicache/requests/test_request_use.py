"""One request is one use of what it reads and writes, however often SGLang's scheduler puts it into the tree."""

from __future__ import annotations

import gc
import unittest
from typing import TYPE_CHECKING, Any

from sglang.srt.plugins import load_plugins
from sglang.test.ci.ci_register import register_cpu_ci
from typing_extensions import override

from sglang.srt.mem_cache.hicache.runtime import standalone_runtime
from support.caches import CacheSpec, CacheTestCase, chain
from support.scheduler import Scheduler

if TYPE_CHECKING:
    from array import array

register_cpu_ci(est_time=15, suite="base-a-test-cpu")


class TestOneRequestIsOneUse(CacheTestCase):
    @classmethod
    @override
    def setUpClass(cls) -> None:
        super().setUpClass()
        load_plugins()
        cls.enterClassContext(standalone_runtime(page_size=4, attention_backend="torch_native"))

    def test_prompts_that_were_asked_once_are_not_copied_under_write_through_selective(self) -> None:
        for layout in ("cp_shared", "identity"):
            scheduler = _scheduler(layout)
            for number in range(5):
                _ask(scheduler, _prompt(scheduler, number))
            self.assertEqual(scheduler.cache.stats.backed_up_tokens, 0)
            self.assertEqual(_hits(scheduler), {1})
            _ask(scheduler, _prompt(scheduler, 0))
            self.assertEqual(scheduler.cache.stats.backed_up_tokens, 12)

    def test_each_eviction_order_and_policy_counts_alike(self) -> None:
        for policy in ("write_through", "write_through_selective", "write_back"):
            for eviction in ("lru", "lfu", "slru"):
                with self.subTest(policy=policy, eviction=eviction):
                    scheduler = _scheduler("cp_shared", policy=policy, eviction=eviction)
                    for times in range(1, 4):
                        _ask(scheduler, _prompt(scheduler, 0))
                        self.assertEqual(set(_hits_of(scheduler, _prompt(scheduler, 0))), {times})

    def test_a_prompt_in_chunks_is_used_once(self) -> None:
        scheduler = _scheduler("cp_shared")
        prompt = chain(scheduler.spec, *range(6))
        for times in (1, 2):
            request = scheduler.start(prompt, chunk=8)
            while request in scheduler.chunked:
                scheduler.go_on(request, chunk=8)
            _end(scheduler, request)
            self.assertEqual(set(_hits_of(scheduler, prompt)), {times})

    def test_what_another_request_has_split_meanwhile_is_used_once_by_each(self) -> None:
        scheduler = _scheduler("cp_shared")
        first = scheduler.start(chain(scheduler.spec, 1, 2, 3, 4))
        second = scheduler.start(chain(scheduler.spec, 1, 2, 9))
        _end(scheduler, first)
        _end(scheduler, second)
        self.assertEqual(_hits_of(scheduler, chain(scheduler.spec, 1, 2)), [2])
        self.assertEqual(_hits_of(scheduler, chain(scheduler.spec, 1, 2, 3, 4)), [2, 1])
        self.assertEqual(_hits_of(scheduler, chain(scheduler.spec, 1, 2, 9)), [2, 1])

    def test_the_answer_is_a_use_of_its_own_pages_only(self) -> None:
        scheduler = _scheduler("cp_shared")
        request = scheduler.start(_prompt(scheduler, 0))
        scheduler.decode(9)
        answer = list(request.output_ids)
        _end(scheduler, request)
        self.assertEqual(_hits_of(scheduler, [*_prompt(scheduler, 0), *answer[:8]]), [1, 1])

    def test_a_request_that_was_retracted_and_comes_back_is_still_one_use(self) -> None:
        # Too short to be loaded, so it is computed again.
        scheduler = _scheduler("cp_shared", policy="write_through", device_pages=3, load_back_pages=50)
        requests = [scheduler.start(_prompt(scheduler, number)) for number in range(2)]
        retracted: list[Any] = []
        while not retracted:
            retracted = scheduler.decode()
        (again,) = retracted
        (other,) = [request for request in requests if request is not again]
        _end(scheduler, other)
        again.init_next_round_input(scheduler.cache)
        again.lock_receipt = scheduler.cache.inc_lock_ref(again.last_node)
        scheduler._prefill([again], None)  # noqa: SLF001  # as `start`, for a request that exists
        _end(scheduler, again)
        self.assertEqual(set(_hits_of(scheduler, again.origin_input_ids)), {1})

    def test_a_node_that_is_computed_again_was_used(self) -> None:
        scheduler = _scheduler("cp_shared", policy="write_through", load_back_pages=5)  # too short to be loaded
        prompt = _prompt(scheduler, 0)
        for times in (1, 2, 3):
            _ask(scheduler, prompt)
            self.assertEqual(set(_hits_of(scheduler, prompt)), {times})
            scheduler.cache.parts.device_room.evict_until(lambda _, __: False)  # everything leaves the device

    def test_nothing_is_remembered_of_requests_that_have_ended_or_were_aborted(self) -> None:
        scheduler = _scheduler("cp_shared")
        for number in range(4):
            request = scheduler.start(_prompt(scheduler, number))
            scheduler.finish(request, insert=bool(number % 2))
        del request
        scheduler.running = None
        gc.collect()
        requests = scheduler.cache.requests
        assert requests is not None
        self.assertEqual(len(requests._uses._uses), 0)  # noqa: SLF001  # what would grow


def _scheduler(layout: str, **changes: Any) -> Scheduler:  # noqa: ANN401  # fields of CacheSpec
    fields: dict[str, Any] = {"policy": "write_through_selective", "device_pages": 24, "host_pages": 32, **changes}
    return Scheduler(CacheSpec(layout=layout, ranks=1 if layout == "identity" else 3, **fields))


def _prompt(scheduler: Scheduler, number: int) -> array[int]:
    return chain(scheduler.spec, *(10 * (number + 1) + page for page in range(3)))


def _ask(scheduler: Scheduler, prompt: array[int]) -> None:
    _end(scheduler, scheduler.start(prompt))


def _end(scheduler: Scheduler, request: Any) -> None:  # noqa: ANN401  # SGLang's Req
    scheduler.finish(request)
    scheduler.settle()


def _hits(scheduler: Scheduler) -> set[int]:
    return {node.hit_count for node in scheduler.cache.nodes()}


def _hits_of(scheduler: Scheduler, tokens: Any) -> list[int]:  # noqa: ANN401  # of a chain
    """Hits of the nodes that hold the whole pages of `tokens`, first to last."""
    size, path, at = scheduler.spec.page_size, [], 0
    node = scheduler.cache.root_node
    tokens = list(tokens)[: len(tokens) // size * size]
    while at < len(tokens):
        node = next(
            child for child in node.children.values() if list(child.key.token_ids[:size]) == tokens[at : at + size]
        )
        path.append(node.hit_count)
        at += node.tokens
    return path


if __name__ == "__main__":
    unittest.main()
