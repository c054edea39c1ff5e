"""`kvlayouts bench`: what its figures mean, and that what it compares does the same."""

from __future__ import annotations

import io
import json
import signal
import sys
import unittest
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from dataclasses import replace
from datetime import UTC, datetime
from itertools import permutations
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
from rich.console import Console
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase
from typing_extensions import override

from kvlayouts import main as command
from kvlayouts.bench import deferred, requests, tree_sizes
from kvlayouts.bench import run as bench_run
from kvlayouts.bench.config import BENCHES, BenchConfig
from kvlayouts.bench.figures import Figure, bounded, compared
from kvlayouts.bench.plans import (
    TokenwiseMetadata,
    bench_metadata,
    bench_plan,
    metadata_figure,
    pagewise_cycle,
    rows_of,
    tokenwise_cycle,
)
from kvlayouts.bench.report import print_figures, to_json
from kvlayouts.bench.run import RUNNERS
from kvlayouts.bench.runs import run_share
from kvlayouts.bench.sglang_subjects import SGLANG_TREES
from kvlayouts.bench.subjects import sizes_for
from kvlayouts.bench.timing import alternating
from kvlayouts.bench.tree_sizes import TreeTimes, bench_evict, bench_scale, growth_exponent
from kvlayouts.common.errors import InputError
from kvlayouts.common.trace import DEFAULT_TRACE, Trace, TraceRequest, read_trace
from sglang.srt.mem_cache.hicache.cpu.support import install_cpu_support
from sglang.srt.mem_cache.layouts import CpSharedLayout
from sglang.srt.mem_cache.layouts.errors import LayoutInvariantError
from sglang.srt.mem_cache.layouts.identity import IdentityNodeMetadata
from sglang.srt.mem_cache.layouts.pages import tokens_of_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    import torch

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

CONFIG = BenchConfig(trace=DEFAULT_TRACE, only=("plan",), quick=True)


class TestFigures(CustomTestCase):
    def test_a_ratio_is_the_median_of_the_rounds_ratios(self) -> None:
        figure = compared("b", "c", [1, 10, 3], [2, 1, 3], unit="ms", baseline_name="other", at_most=0.9)
        self.assertEqual((figure.value, figure.baseline, figure.ratio, figure.passed), (3, 2, 1, False))
        self.assertTrue(compared("b", "c", [1, 10, 3], [2, 1, 3], unit="ms", baseline_name="other", at_most=1.0).passed)

    def test_a_bound_is_reached_or_missed(self) -> None:
        self.assertEqual([bounded("b", "c", value, unit="x", at_most=2).passed for value in (2.0, 2.1)], [True, False])

    def test_the_growth_of_a_power_law_is_its_exponent(self) -> None:
        sizes = [1_000, 10_000, 100_000]
        for exponent in (0.0, 0.5, 1.0):
            self.assertAlmostEqual(growth_exponent(sizes, [3 * n**exponent for n in sizes]), exponent)

    def test_run_shares_count_pages_and_not_runs(self) -> None:
        lengths = [np.array([1, 1, 1, 1]), np.array([4, 16])]
        shares = [run_share(lengths, least) for least in (1, 4, 16, 64)]
        self.assertEqual(shares, [100, 100 * 20 / 24, 100 * 16 / 24, 0])

    def test_where_nothing_was_copied_no_share_is_given(self) -> None:
        self.assertIsNone(run_share([], 1))


class TestPlanning(CustomTestCase):
    def test_by_page_and_by_token_the_same_rows_are_copied_on_every_rank(self) -> None:
        rng = np.random.default_rng(0)
        for rank in range(3):
            layout = CpSharedLayout(page_size=4, shard_size=3, shard_rank=rank)
            slot_pages = 3 + rng.permutation(30).astype(np.int64)[:20]
            new_pages = slot_pages + 30
            host_pages = rng.permutation(40).astype(np.int64)[: int((slot_pages % 3 == rank).sum())]
            by_page = rows_of(pagewise_cycle(layout, slot_pages, host_pages, new_pages))
            by_token = tokenwise_cycle(
                layout.geometry, *(tokens_of_pages(pages, 4) for pages in (slot_pages, host_pages, new_pages))
            )
            for ours, theirs in zip(by_page, by_token, strict=True):
                self.assertEqual(ours.tolist(), theirs.tolist())

    def test_the_token_wise_split_rebases_positions(self) -> None:
        positions, hosts = tokens_of_pages(np.array([0, 2]), 4), tokens_of_pages(np.array([7, 5]), 4)
        first, rest = TokenwiseMetadata(logical_len=12, owned_positions=positions, host_indices=hosts).split(8)
        self.assertEqual((first.logical_len, first.owned_positions.tolist()), (8, [0, 1, 2, 3]))
        self.assertEqual((rest.logical_len, rest.owned_positions.tolist()), (4, [0, 1, 2, 3]))
        self.assertEqual(rest.host_indices.tolist(), [20, 21, 22, 23])

    def test_planning_is_measured_and_judged(self) -> None:
        steps: list[tuple[str, int, int]] = []
        trace = read_trace(DEFAULT_TRACE, max_requests=1)
        (figure,) = bench_plan(CONFIG, trace, lambda *step: steps.append(step))
        self.assertEqual(steps, [("plan", 1, 1)])
        assert figure.ratio is not None
        self.assertEqual(figure.passed, figure.ratio <= 0.05)
        self.assertLess(figure.ratio, 0.5, "by page is faster by far, however busy the machine is")


class TestNothingToDivideBy(CustomTestCase):
    """Traces of a user's own: too short, or without a prefix that comes twice."""

    def test_prompts_that_share_nothing_give_times_and_no_ratio_of_tokens_found(self) -> None:
        trace = read_trace(DEFAULT_TRACE, max_requests=2)
        names = *SGLANG_TREES, requests.IDENTITY, *requests.SHARED, requests.BY_TOKEN
        for found, ratio in ((0, None), (64, 1.0)):
            subjects = {name: mock.Mock(serve=mock.Mock(return_value=found)) for name in names}
            with (
                mock.patch.object(requests, "_subjects", lambda *_, made=subjects: made),
                mock.patch.object(requests, "subjects_runtime", nullcontext),
                mock.patch.object(requests, "no_collection", nullcontext),
            ):
                figures = requests.bench_requests(CONFIG, trace, lambda *_: None)
            hits = [figure for figure in figures if figure.case.endswith("tokens found in the cache")]
            self.assertEqual([(figure.value, figure.ratio) for figure in hits], (len(names) - 2) * [(2 * found, ratio)])
            self.assertEqual(sum(figure.unit == "ms" for figure in figures), len(names) - 1)

    def test_a_trace_without_a_whole_page_has_no_metadata_to_measure(self) -> None:
        prompt = TraceRequest(timestamp_ms=0, prompt_tokens=30, block_ids=(0,))
        trace = Trace(name="short", requests=(prompt,), block_tokens=512)
        install_cpu_support()
        figures = bench_metadata(CONFIG, trace, lambda *_: None)
        self.assertEqual([(figure.value, figure.ratio, figure.passed) for figure in figures], 2 * [(None, None, None)])
        self.assertIn("of 0 tokens in 0 nodes", figures[0].case)

    def test_metadata_is_the_objects_with_their_arrays(self) -> None:
        def figure(*pages: int) -> Figure:
            held = [IdentityNodeMetadata(page_size=64, host_pages=np.arange(n)) for n in pages]
            return metadata_figure("identity", 1, held)

        first, second = (figure(*pages).value for pages in ((10,), (20,)))
        assert first is not None
        assert second is not None
        self.assertAlmostEqual(20 * 64 * second - 10 * 64 * first, 10 * 8)
        self.assertGreater(10 * 64 * first - 10 * 8, sys.getsizeof(np.array([])))
        self.assertEqual(figure(10, 10).value, first)


class TestDeferred(CustomTestCase):
    """What the two forms of an item differ in: that, and nothing else."""

    def _reductions(self, make: Callable[[], AbstractContextManager[deferred.Forms]]) -> dict[str, list[torch.Tensor]]:
        """Tensors that two calls of each form reduce."""
        reduced: dict[str, list[torch.Tensor]] = {"ours": [], "naive": []}
        group = mock.Mock()
        with mock.patch.object(deferred, "_one_rank_group", return_value=group), make() as forms:
            for name, form in (("ours", forms.ours), ("naive", forms.naive)):
                group.allreduce.reset_mock()
                self.assertEqual([form(), form()], 2 * [deferred.COUNTS])
                reduced[name] += [call.args[0][0] for call in group.allreduce.call_args_list]
        return reduced

    def test_kept_tensors_are_measured_on_one_reduction_in_both_forms(self) -> None:
        reduced = self._reductions(deferred.kept_tensors)
        for name, kept in (("ours", True), ("naive", False)):
            first, second = reduced[name]
            self.assertEqual((len(first), len(second), first is second), (2, 2, kept))

    def test_a_joint_reduction_is_measured_on_kept_tensors_in_both_forms(self) -> None:
        reduced = self._reductions(deferred.joint_reductions)
        self.assertEqual([len(tensor) for tensor in reduced["ours"]], [2, 2])
        self.assertEqual([len(tensor) for tensor in reduced["naive"]], [1, 1, 1, 1])
        self.assertEqual([len(set(map(id, tensors))) for tensors in reduced.values()], [1, 1])

    def test_copies_queue_and_only_submission_is_measured(self) -> None:
        now = 100.0

        def sleep(seconds: float) -> None:
            nonlocal now
            now += seconds

        clock = SimpleNamespace(perf_counter=lambda: now, sleep=sleep)
        whole = deferred.BACKUPS * deferred.COPY_SECONDS
        install_cpu_support()
        with mock.patch.object(deferred, "time", clock), deferred.acknowledgements() as forms:
            for form, measured, rest in ((forms.ours, 0, whole), (forms.naive, whole, 0)):
                for work, expected in ((form, measured), (forms.after, rest)):
                    before = now
                    work()
                    self.assertAlmostEqual(now - before, expected, delta=0.1 * whole)
            with pytest.raises(LayoutInvariantError, match="32 backups had 0 acks"):
                forms.after()

    def test_what_follows_a_form_is_outside_of_its_time(self) -> None:
        now = 0

        def takes(seconds: int) -> Callable[[], None]:
            def work() -> None:
                nonlocal now
                now += seconds

            return work

        work = {"ours": takes(1), "naive": takes(2)}
        seconds = alternating(work, rounds=2, repeats=3, clock=lambda: now, after=takes(1_000))
        self.assertEqual((seconds, now), ({"ours": [1, 1], "naive": [2, 2]}, 3 + 2 * 3 * 3 + 6 * 1_000))


class TestTreeSizes(CustomTestCase):
    """Eviction and growth are read off the same trees; neither may go by the other's name."""

    @override
    def setUp(self) -> None:
        micros = {"match": 1.0, "evict device": 2.0, "evict host": 3.0}
        replaced = {
            "OurSubject": mock.MagicMock(),
            "subjects_runtime": lambda _: nullcontext(),
            "_time_ours": lambda _, sizes: [TreeTimes(leaves=leaves, micros=micros) for leaves in sizes],
            "SGLANG": {
                "SGLang HiRadixCache": (mock.MagicMock(), CONFIG.tree_sizes[-1]),
                "SGLang UnifiedRadixCache": (mock.MagicMock(), 1_000),
            },
            "_take_turns": lambda *_: {"evict": 1.0},
        }
        for name, instead in replaced.items():
            self.enterContext(mock.patch.object(tree_sizes, name, instead))

    def test_progress_and_figures_have_the_name_that_was_chosen(self) -> None:
        trace = read_trace(DEFAULT_TRACE, max_requests=1)
        totals = {"scale": sum(CONFIG.tree_sizes), "evict": 2 * sum(CONFIG.tree_sizes) + 1_000}
        for order in permutations({"evict": bench_evict, "scale": bench_scale}.items()):
            with mock.patch.object(tree_sizes, "_measured", {}):
                for name, bench in order:  # the second finds the trees measured
                    steps: list[tuple[str, int, int]] = []
                    figures = bench(CONFIG, trace, lambda *step, into=steps: into.append(step))
                    self.assertEqual({step[0] for step in steps}, {name})
                    self.assertEqual(steps[-1], (name, totals[name], totals[name]))
                    self.assertEqual([step[1] for step in steps], sorted({step[1] for step in steps}))
                    self.assertEqual({figure.bench for figure in figures}, {name})


class TestReport(CustomTestCase):
    FIGURE = Figure(
        bench="plan", case="one node", value=0.5, unit="ms", baseline=2, baseline_name="token", ratio=0.25,
        goal="ratio <= 0.3", passed=True,
    )  # fmt: skip

    def _printed(self, figures: Sequence[Figure]) -> str:
        out = io.StringIO()
        print_figures(Console(file=out, width=140), figures)
        return out.getvalue()

    def test_the_table_has_both_values_the_ratio_and_the_goal(self) -> None:
        text = self._printed([self.FIGURE])
        for word in ("one node", "0.5 ms", "2 ms", "0.25", "token", "ratio <= 0.3", "1 of 1 goals reached"):
            self.assertIn(word, text)

    def test_a_missed_goal_is_said_in_words(self) -> None:
        text = self._printed([self.FIGURE, replace(self.FIGURE, passed=False)])
        self.assertIn("MISSED", text)
        self.assertIn("1 of 2 goals reached", text)

    def test_where_there_was_nothing_the_row_says_so_and_the_json_has_null(self) -> None:
        nothing = Figure(bench="runs", case="loads", value=None, unit="%", baseline_name="one run a copy")
        (row,) = (line for line in self._printed([self.FIGURE, nothing]).splitlines() if line.startswith("runs"))
        self.assertEqual(row.split(), ["runs", "loads", "none"])
        self.assertIsNone(json.loads(json.dumps(to_json(CONFIG, "t", [nothing])))["figures"][0]["value"])

    def test_the_json_names_trace_and_figures_but_no_path_of_this_machine(self) -> None:
        text = json.dumps(to_json(CONFIG, "trace.jsonl", [self.FIGURE]))
        self.assertEqual(json.loads(text)["figures"][0]["ratio"], 0.25)
        self.assertEqual(json.loads(text)["config"]["trace"], "trace.jsonl")
        ended = datetime.fromisoformat(json.loads(text)["ended"])
        self.assertLess(abs((datetime.now(UTC) - ended).total_seconds()), 60)
        self.assertNotIn(str(DEFAULT_TRACE.parent), text)


class TestCommand(CustomTestCase):
    def test_every_name_has_a_benchmark(self) -> None:
        self.assertEqual(tuple(RUNNERS), BENCHES)

    def test_an_unknown_name_is_refused_with_the_known_ones(self) -> None:
        with pytest.raises(InputError, match=r"--only nothing: unknown; accepted: requests, evict"):
            BenchConfig(trace=DEFAULT_TRACE, only=("nothing",))
        self.assertEqual(command.main(["bench", "--only", "nothing"]), command.EXIT_BAD_INPUT)

    def test_an_interrupt_leaves_the_table_and_the_file_of_what_had_ended(self) -> None:
        def interrupted(*_: object) -> list[Figure]:
            raise KeyboardInterrupt

        def terminated(*_: object) -> list[Figure]:
            signal.raise_signal(signal.SIGTERM)
            return []

        for ends, wanted in ((interrupted, 130), (terminated, 143)):
            status, found, table = self.ended_by(ends)
            self.assertEqual((status, found["not_run"]), (wanted, ["deferred"]))
            self.assertEqual([one["case"] for one in found["figures"]], ["c"])
            self.assertIn("1.097", table)
            self.assertIn("0 of 0 goals reached; not run: deferred\n", table)

    def ended_by(self, ends: Callable[..., list[Figure]]) -> tuple[int, dict[str, Any], str]:
        """Exit status, JSON and table where the second of two benchmarks does not come to its end."""
        figure = Figure(bench="plan", case="c", value=1.5, unit="ms", baseline=1.0, ratio=1.09678)
        runners = {**RUNNERS, "plan": lambda *_: [figure], "deferred": ends}
        with TemporaryDirectory() as folder, mock.patch.object(bench_run, "RUNNERS", runners):
            target = Path(folder) / "bench.json"
            table = io.StringIO()
            with (
                mock.patch.object(bench_run, "_one_rank", nullcontext),
                redirect_stdout(table),
                redirect_stderr(io.StringIO()),
            ):
                status = command.main(["bench", "--only", "plan", "--only", "deferred", "--json", str(target)])
            return status, json.loads(target.read_text(encoding="utf-8")), table.getvalue()

    def test_pools_have_room_for_the_longest_prompt(self) -> None:
        for tokens, wanted in ((1_000, 262_144), (300_000, 337_920)):
            blocks = list(range(-(-tokens // 512)))
            request = {"timestamp": 0, "input_length": tokens, "output_length": 1, "hash_ids": blocks}
            with TemporaryDirectory() as folder:
                trace = Path(folder) / "trace.jsonl"
                trace.write_text(json.dumps(request), encoding="utf-8")
                self.assertEqual(sizes_for(read_trace(trace), 8).device_tokens, wanted)

    def test_fewer_than_five_rounds_are_refused(self) -> None:
        with pytest.raises(InputError, match=r"--rounds 4: must be at least 5"):
            BenchConfig(trace=DEFAULT_TRACE, rounds=4)


if __name__ == "__main__":
    unittest.main()
