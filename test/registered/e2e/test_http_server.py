"""A real HTTP server, started as a user starts it: a config file with the user's flag, answers, metrics, refusals."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import requests
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase
from typing_extensions import override

from sglang.srt.mem_cache.hicache.server.metrics import COUNTERS, GAUGES, INTERVAL_SECONDS, PER_RANK, PREFIX
from support.engines.engine_run import SAMPLING, prompts
from support.engines.runs import environment, is_measured, model, start_lines
from support.scrape import Scrape, legends

register_cpu_ci(est_time=240, suite="base-a-test-cpu")

START_SECONDS = 280
PROMPT_TOKENS = 200
BOARD = Path(__file__).parents[3] / "docs" / "grafana-dashboard.json"
CONFIG = """\
model-path: {model}
served-model-name: tiny
host: 127.0.0.1
port: {port}
device: cpu
dtype: float32
tp-size: {ranks}
page-size: 16
max-total-tokens: {rows}
max-running-requests: 4
context-length: 512
mem-fraction-static: 0.3
attention-backend: torch_native
cuda-graph-backend-decode: disabled
cuda-graph-backend-prefill: disabled
skip-server-warmup: true
enable-metrics: true
enable-cache-report: true
enable-hierarchical-cache: true
hicache-ratio: 4.0
hicache-io-backend: direct
hicache-mem-layout: layer_first
{strategy}
"""
LOGICAL_TOKENS = 1024
STRATEGIES = {"cp_shared": "enable-nsa-prefill-cp-shared-kv: true", "identity": "kv-layout-strategy: identity"}
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


class Server:
    """``python -m sglang.launch_server --config FILE`` in a process group of its own."""

    def __init__(self, folder: Path, *flags: str, ranks: int = 2, layout: str = "cp_shared") -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = folder / f"server-{port}.log"
        config = folder / f"server-{port}.yaml"
        settings = {"model": model("deepseek"), "port": port, "ranks": ranks, "strategy": STRATEGIES[layout]}
        rows = LOGICAL_TOKENS // (ranks if layout == "cp_shared" else 1)
        config.write_text(CONFIG.format(rows=rows, **settings), encoding="utf-8")
        command = [sys.executable, "-m", "sglang.launch_server", "--config", str(config), *flags]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                command, env=environment(ranks), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    @property
    def log(self) -> str:
        """Everything logged so far."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def wait_until_it_answers(self) -> None:
        """Poll the health endpoint; `AssertionError` with the end of the log if the server ends or takes too long."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(requests.ConnectionError, requests.Timeout):
                if requests.get(f"{self.url}/health", timeout=5).ok:
                    return
            time.sleep(0.5)
        raise AssertionError(f"the server does not answer:\n{self.log[-4000:]}")

    def post(self, path: str, **body: Any) -> Any:  # noqa: ANN401  # JSON
        """The answer to a POST request."""
        response = requests.post(f"{self.url}{path}", json=body, timeout=60)
        response.raise_for_status()
        return response.json()

    def generate(self, ids: list[int]) -> Any:  # noqa: ANN401  # JSON
        """The answer to one prompt."""
        return self.post("/generate", input_ids=ids, sampling_params=SAMPLING, return_logprob=True)

    def scrape(self) -> Scrape:
        """What the metrics say when what the cache has done is published, which takes a second at most."""
        deadline = time.monotonic() + 2 * INTERVAL_SECONDS + 5
        while True:
            scrape = Scrape(requests.get(f"{self.url}/metrics", timeout=20).text)
            held = scrape.total(f"{PREFIX}host_used_tokens")
            if held == scrape.total("sglang:hicache_backup_tokens_total") or time.monotonic() > deadline:
                return scrape
            time.sleep(0.2)

    def let_coverage_save(self) -> None:
        """See `saves_coverage`. The request after the flush takes every rank, so all have saved when it is answered."""
        requests.post(f"{self.url}/flush_cache", timeout=60).raise_for_status()
        self.post("/generate", input_ids=prompts()["short"][0], sampling_params=SAMPLING)

    def stop(self) -> None:
        """End the server and all that it started."""
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(self.process.pid, signal.SIGTERM)
            self.process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(20)


class TestServer(CustomTestCase):
    server: ClassVar[Server]

    @classmethod
    @override
    def setUpClass(cls) -> None:
        super().setUpClass()
        folder = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.server = Server(folder)
        cls.addClassCleanup(cls.server.stop)
        cls.server.wait_until_it_answers()
        if is_measured():
            cls.addClassCleanup(cls.server.let_coverage_save)

    def test_it_generates_completes_and_serves_from_the_host_tier(self) -> None:
        ids = prompts()["long"]
        first = [self.server.generate(prompt) for prompt in ids]
        again = [self.server.generate(prompt) for prompt in ids]
        for one, other in zip(first, again, strict=True):
            self.assertEqual(one["output_ids"], other["output_ids"])
        served = [answer["meta_info"]["cached_tokens_details"]["host"] for answer in again]
        self.assertGreater(sum(served), 0)
        completion = self.server.post("/v1/completions", model="tiny", prompt="hello", max_tokens=4, temperature=0)
        self.assertEqual(completion["usage"]["completion_tokens"], 4)

    def test_the_log_says_at_the_start_what_the_layout_has(self) -> None:
        starts = start_lines(self.server.log)
        self.assertEqual({(start["layout"], start["slots"], start["rows"]) for start in starts.values()}, _STARTS)

    def test_metrics_count_the_slots_of_all_ranks(self) -> None:
        self.server.generate(prompts()["short"][0])
        scrape = self.server.scrape()
        for name in ("max_total_num_tokens", "kv_layout_device_capacity_tokens"):
            self.assertEqual({value for _, value in scrape.series[f"sglang:{name}"]}, {LOGICAL_TOKENS}, name)
        for name in (*GAUGES, *COUNTERS):
            series = scrape.by_rank(PREFIX + name) or scrape.by_rank(f"{PREFIX}{name}_total")
            self.assertEqual(sorted(series), ["0", "1"] if name in PER_RANK else ["0"], name)
        self.assertEqual(scrape.by_rank(f"{PREFIX}page_reads_total"), {"0": 0.0, "1": 0.0})


class TestMetricsOfOneAndTwoRanks(CustomTestCase):
    """Eight prompts, twice: on the device there is room for five."""

    ranks = (("identity", 1), ("identity", 2), ("cp_shared", 2))

    def test_tokens_are_those_that_were_served_and_bytes_those_of_each_rank(self) -> None:
        found = {server: self._serve(*server) for server in self.ranks}
        alone = found["identity", 1]
        pages_tokens = 8 * (PROMPT_TOKENS // 16) * 16
        all_bytes = alone.by_rank("sglang:load_back_bytes_total")["0"]
        self.assertGreater(all_bytes, 0)
        for (layout, ranks), scrape in found.items():
            with self.subTest(layout=layout, ranks=ranks):
                self.assertEqual(scrape.total("sglang:hicache_backup_tokens_total"), pages_tokens)
                self.assertEqual(scrape.total(f"{PREFIX}host_used_tokens"), pages_tokens)
                self.assertEqual(
                    scrape.total("sglang:hicache_host_total_tokens"), scrape.total(f"{PREFIX}host_capacity_tokens")
                )
                self.assertEqual(scrape.total(f"{PREFIX}refused_backups_total"), 0)
                for name in ("sglang:load_back_bytes_total", "sglang:hicache_backup_bytes_total"):
                    of_ranks = scrape.by_rank(name)
                    self.assertEqual(sorted(of_ranks), [str(rank) for rank in range(ranks)])
                    self.assertEqual(sum(of_ranks.values()), all_bytes * (ranks if layout == "identity" else 1), name)
                for title, lines in legends(json.loads(BOARD.read_text(encoding="utf-8")), scrape).items():
                    self.assertEqual(len(lines), len(set(lines)), title)

    def _serve(self, layout: str, ranks: int) -> Scrape:
        rng = random.Random(2)
        asked = [[rng.randrange(256) for _ in range(PROMPT_TOKENS)] for _ in range(8)]
        with tempfile.TemporaryDirectory() as folder:
            server = Server(Path(folder), ranks=ranks, layout=layout)
            try:
                server.wait_until_it_answers()
                answers = [server.generate(ids) for _ in range(2) for ids in asked]
                scrape = server.scrape()
            finally:
                server.stop()
        served = [answer["meta_info"]["cached_tokens_details"] for answer in answers]
        tokens = sum(details["host"] for details in served if details)
        self.assertGreater(tokens, 0)
        self.assertEqual(scrape.total("sglang:load_back_tokens_total"), tokens, f"{layout} on {ranks} ranks")
        return scrape


class TestRefusedServer(CustomTestCase):
    def test_a_pair_that_does_not_fit_ends_the_launch_before_anything_is_spawned(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            # A pair that SGLang takes, or refuses when schedulers have started: another one it may refuse before ours.
            server = Server(Path(folder), "--enable-streaming-session")
            try:
                self.assertNotEqual(server.process.wait(START_SECONDS), 0)
                self.assertIn(
                    "--enable-nsa-prefill-cp-shared-kv does not go together with --enable-streaming-session", server.log
                )
                self.assertNotIn("TP0]", server.log)  # no scheduler has logged
            finally:
                server.stop()


_STARTS = {("cp_shared", "1024", "512")}
