"""Real engines: the same answers with every layout, from half the memory a rank, with the host tier at work."""

from __future__ import annotations

from typing import Any

import pytest
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

from support.engines.runs import LOGICAL_TOKENS, engine_run

register_cpu_ci(est_time=480, suite="base-a-test-cpu")

# Float32 sums in another order: another number of ranks, or a prompt computed in other chunks.
ROUNDING = 2e-5
STEPS = ("cold", "again", "shared", "shared again", "short", "short again", "pressure", "after abort", "after flush")
LAYOUTS = (
    *("llama identity", "deepseek identity", "deepseek identity on two ranks"),
    *("deepseek cp_shared", "deepseek host_shared"),
)
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


class TestAnswers(CustomTestCase):
    def test_llama_answers_alike_without_hicache_and_with_identity(self) -> None:
        self._assert_same_answers("llama", "llama identity")

    def test_deepseek_answers_alike_without_hicache_and_with_identity(self) -> None:
        self._assert_same_answers("deepseek", "deepseek identity")

    def test_deepseek_on_two_ranks_answers_alike_without_hicache_and_with_identity(self) -> None:
        self._assert_same_answers("deepseek", "deepseek identity on two ranks")

    def test_deepseek_on_two_ranks_answers_alike_without_hicache_and_with_shared_pages(self) -> None:
        self._assert_same_answers("deepseek", "deepseek cp_shared")

    def test_a_gather_that_returns_one_wrong_page_changes_the_answers(self) -> None:
        right = engine_run("deepseek").results
        wrong = engine_run("deepseek cp_shared", fault="faulty_gather").results
        self.assertGreater(max(_distances(right["cold"], wrong["cold"])), 0.05)

    def test_deepseek_on_two_ranks_answers_alike_from_half_the_host_memory_a_rank(self) -> None:
        self._assert_same_answers("deepseek", "deepseek host_shared")
        (whole, *_), shared = (
            list(engine_run(f"deepseek {name}").starts.values()) for name in ("identity on two ranks", "host_shared")
        )
        for start in shared:
            self.assertEqual((start["layout"], start["group"], start["ranks"]), ("host_shared", "attention_tp", "2"))
            self.assertEqual((start["slots"], start["rows"]), (whole["slots"], whole["rows"]))
            self.assertLess(float(start["host_gb"]), 0.6 * float(whole["host_gb"]))

    def test_an_exchange_that_is_left_out_changes_the_answers(self) -> None:
        right = engine_run("deepseek").results
        wrong = engine_run("deepseek host_shared", fault="faulty_exchange").results
        self.assertLess(max(_distances(right["cold"], wrong["cold"])), ROUNDING)
        self.assertGreater(max(_distances(right["again"], wrong["again"])), 0.1)

    def _assert_same_answers(self, plain: str, other: str) -> None:
        expected, found = engine_run(plain).results, engine_run(other).results
        for step in STEPS:
            with self.subTest(step=step):
                self.assertEqual(
                    [answer["ids"] for answer in found[step]], [answer["ids"] for answer in expected[step]]
                )
                self.assertLess(max(_distances(expected[step], found[step])), ROUNDING)


class TestHostTier(CustomTestCase):
    def test_prompts_that_left_the_device_come_back_from_the_host(self) -> None:
        for name in LAYOUTS:
            with self.subTest(name):
                results = engine_run(name).results
                self.assertEqual(_cached(results["cold"], "host"), [0] * 6)
                # All but the last, unfinished page of each prompt; three prompts fit on the device.
                again = [
                    sum(tiers) for tiers in zip(*(_cached(results["again"], tier) for tier in _TIERS), strict=True)
                ]
                self.assertEqual(again, [256] * 6)
                self.assertGreaterEqual(sum(tokens > 0 for tokens in _cached(results["again"], "host")), 3)
                self.assertGreater(sum(_cached(results["after abort"], "host")), 0)

    def test_requests_were_retracted_and_started_again(self) -> None:
        for name in LAYOUTS:
            with self.subTest(name):
                self.assertGreater(engine_run(name).retractions, 0)  # step "pressure": same answers

    def test_no_step_had_to_read_page_numbers_from_the_device(self) -> None:
        for name in LAYOUTS:
            with self.subTest(name):
                self.assertEqual(engine_run(name).page_reads, 0)

    def test_a_shared_prefix_is_served_from_the_device(self) -> None:
        for name in LAYOUTS:
            with self.subTest(name):
                self.assertGreater(sum(_cached(engine_run(name).results["shared"], "device")), 0)

    def test_aborts_and_a_flush_leave_a_server_that_answers_from_nothing(self) -> None:
        for name in LAYOUTS:
            with self.subTest(name):
                results = engine_run(name).results
                self.assertGreaterEqual(results["aborted"], 3)
                self.assertTrue(results["flushed"])
                for tier in _TIERS:
                    self.assertEqual(_cached(results["after flush"], tier), [0, 0])


class TestMemory(CustomTestCase):
    def test_each_of_two_ranks_keeps_half_the_rows_for_the_same_slots(self) -> None:
        whole = engine_run("deepseek identity").starts[0]
        shared = engine_run("deepseek cp_shared").starts
        self.assertEqual(sorted(shared), [0, 1])
        page_rows = int(whole["page"])
        for start in shared.values():
            self.assertEqual((start["layout"], start["group"], start["ranks"]), ("cp_shared", "attention_tp", "2"))
            self.assertEqual(int(start["slots"]), LOGICAL_TOKENS)
            self.assertEqual(int(whole["slots"]), LOGICAL_TOKENS)
            # Every pool has one page more, for padding.
            row_bytes = float(whole["device_gb"]) / (int(whole["rows"]) + page_rows)
            self.assertAlmostEqual(float(start["device_gb"]) / row_bytes, LOGICAL_TOKENS / 2 + page_rows, places=1)
            self.assertAlmostEqual(float(start["all_host_gb"]), 2 * float(start["host_gb"]))


_TIERS = ("device", "host")


def _cached(answers: list[dict[str, Any]], tier: str) -> list[int]:
    return [answer["cached"].get(tier, 0) for answer in answers]


def _distances(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> list[float]:
    return [
        abs(a - b)
        for one, other in zip(first, second, strict=True)
        for a, b in zip(one["logprobs"], other["logprobs"], strict=True)
    ]
