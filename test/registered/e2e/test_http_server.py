"""A real HTTP server, started as a user starts it: a config file with the user's flag, answers, metrics, refusals."""

from __future__ import annotations

import contextlib
import os
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
from _engine_run import SAMPLING, prompts
from _runs import environment, is_measured, model, start_lines
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

from sglang.srt.mem_cache.hicache.server.metrics import COUNTERS, GAUGES

register_cpu_ci(est_time=120, suite="base-a-test-cpu")

START_SECONDS = 280
CONFIG = """\
model-path: {model}
served-model-name: tiny
host: 127.0.0.1
port: {port}
device: cpu
dtype: float32
tp-size: {ranks}
page-size: 16
max-total-tokens: 512
max-running-requests: 4
context-length: 512
mem-fraction-static: 0.1
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
enable-nsa-prefill-cp-shared-kv: true
"""
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


class Server:
    """``python -m sglang.launch_server --config FILE`` in a process group of its own."""

    def __init__(self, folder: Path, *flags: str, ranks: int = 2, name: str = "deepseek") -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = folder / f"server-{port}.log"
        config = folder / f"server-{port}.yaml"
        config.write_text(CONFIG.format(model=model(name), port=port, ranks=ranks), encoding="utf-8")
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

    def let_coverage_save(self) -> None:
        """See _saves_coverage. The request after the flush takes every rank, so all have saved when it is answered."""
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
        first = [self._generate(prompt) for prompt in ids]
        again = [self._generate(prompt) for prompt in ids]
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
        self._generate(prompts()["short"][0])
        lines = requests.get(f"{self.server.url}/metrics", timeout=20).text.splitlines()
        capacity = [line for line in lines if line.startswith("sglang:max_total_num_tokens{")]
        self.assertTrue(capacity)
        self.assertEqual({float(line.rsplit(" ", 1)[1]) for line in capacity}, {1024.0})
        ours = [line for line in lines if line.startswith("sglang:kv_layout_")]
        for name in (*GAUGES, *(f"{counter}_total" for counter in COUNTERS)):
            series = [line for line in ours if line.startswith(f"sglang:kv_layout_{name}{{")]
            self.assertEqual(len(series), 2, f"{name}: one series for each of two ranks")
        reads = [line for line in ours if line.startswith("sglang:kv_layout_page_reads_total{")]
        self.assertEqual({float(line.rsplit(" ", 1)[1]) for line in reads}, {0.0})
        slots = [line for line in ours if line.startswith("sglang:kv_layout_device_capacity_tokens{")]
        self.assertEqual({float(line.rsplit(" ", 1)[1]) for line in slots}, {1024.0})

    def _generate(self, ids: list[int]) -> Any:  # noqa: ANN401  # JSON
        return self.server.post("/generate", input_ids=ids, sampling_params=SAMPLING, return_logprob=True)


class TestRefusedServer(CustomTestCase):
    def test_a_pair_that_does_not_fit_ends_the_launch_before_anything_is_spawned(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            server = Server(Path(folder), "--enable-lmcache")
            try:
                self.assertNotEqual(server.process.wait(START_SECONDS), 0)
                self.assertIn(
                    "--enable-nsa-prefill-cp-shared-kv does not go together with --enable-lmcache", server.log
                )
                self.assertNotIn("TP0]", server.log)  # no scheduler has logged
            finally:
                server.stop()


_STARTS = {("cp_shared", "1024", "512")}
