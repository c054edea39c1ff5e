"""Starts engines and servers as a user would, each in a process of its own, one at a time, and kept for all tests."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from support.engines import models

TESTS: Final = Path(__file__).parents[2]
"""The folder that `support` is imported from."""
TIMEOUT_SECONDS: Final = 280
HICACHE: Final[dict[str, Any]] = {
    "enable_hierarchical_cache": True,
    "hicache_ratio": 4.0,
    "hicache_io_backend": "direct",
    "hicache_mem_layout": "layer_first",
    "hicache_write_policy": "write_through",
}
LOGICAL_TOKENS: Final = 1024  # three of the long prompts; the host takes four times as many

# Rows of a rank, so that every configuration has LOGICAL_TOKENS slots.
SPECS: Final[dict[str, dict[str, Any]]] = {
    "llama": {"model": "llama", "tp_size": 1, "max_total_tokens": LOGICAL_TOKENS},
    "llama identity": {
        "model": "llama",
        "tp_size": 1,
        "max_total_tokens": LOGICAL_TOKENS,
        "kv_layout_strategy": "identity",
        **HICACHE,
    },
    "deepseek": {"model": "deepseek", "tp_size": 2, "max_total_tokens": LOGICAL_TOKENS},
    "deepseek identity": {
        "model": "deepseek",
        "tp_size": 1,
        "max_total_tokens": LOGICAL_TOKENS,
        "kv_layout_strategy": "identity",
        **HICACHE,
    },
    "deepseek identity on two ranks": {
        "model": "deepseek",
        "tp_size": 2,
        "max_total_tokens": LOGICAL_TOKENS,
        "kv_layout_strategy": "identity",
        **HICACHE,
    },
    "deepseek cp_shared": {
        "model": "deepseek",
        "tp_size": 2,
        "max_total_tokens": LOGICAL_TOKENS // 2,
        "kv_layout_strategy": "cp_shared",
        **HICACHE,
    },
    "deepseek host_shared": {
        "model": "deepseek",
        "tp_size": 2,
        "max_total_tokens": LOGICAL_TOKENS,
        "kv_layout_strategy": "host_shared",
        **HICACHE,
        "hicache_ratio": HICACHE["hicache_ratio"] / 2,
    },
}
_START_LINE: Final = re.compile(
    r"KV layout (?P<layout>\w+): shard group (?P<group>\w+) of (?P<ranks>\d+) \(rank (?P<rank>\d+)\), "
    r"page size (?P<page>\d+), device (?P<slots>\d+) tokens \((?P<rows>\d+) a rank\), host (?P<host_slots>\d+) tokens "
    r"\((?P<host_rows>\d+) a rank\), device memory (?P<device_gb>[\d.e-]+) GB a rank, "
    r"host memory (?P<host_gb>[\d.e-]+) GB a rank and (?P<all_host_gb>[\d.e-]+) GB for (?P<all_ranks>\d+) ranks"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRun:
    """What an engine answered, and what its schedulers logged: at the start, by rank, and how often they retracted
    a request or had to read page numbers from the device."""

    results: dict[str, Any]
    starts: dict[int, dict[str, str]]
    retractions: int
    page_reads: int


@functools.cache
def model(name: str) -> Path:
    """A tiny model's folder, made on the first call."""
    folder = _scratch() / name
    return models.make_llama(folder) if name == "llama" else models.make_deepseek(folder)


@functools.cache
def engine_run(name: str, *, fault: str | None = None) -> EngineRun:
    """Run the scenario of `engine_run` under ``SPECS[name]``; the result is kept. Raises if the engine fails.

    `fault` is a module here, a plugin that breaks something.
    """
    spec = {key: value for key, value in SPECS[name].items() if key != "model"}
    spec["model_path"] = str(model(SPECS[name]["model"]))
    files = [_scratch() / f"{name}-{fault}.{kind}" for kind in ("spec.json", "result.json", "log")]
    files[0].write_text(json.dumps(spec), encoding="utf-8")
    with files[2].open("w") as log:
        finished = subprocess.run(
            [sys.executable, "-m", "support.engines.engine_run", str(files[0]), str(files[1])],
            env=environment(spec["tp_size"], fault=fault),
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    text = files[2].read_text(encoding="utf-8", errors="replace")
    if finished.returncode:
        raise AssertionError(f"engine {name!r} ended with {finished.returncode}:\n{text[-4000:]}")
    return EngineRun(
        results=json.loads(files[1].read_text(encoding="utf-8")),
        starts=start_lines(text),
        retractions=text.count("Retract requests"),
        page_reads=text.count("sglang:kv_layout_page_reads_total"),
    )


def start_lines(log: str) -> dict[int, dict[str, str]]:
    """The start-up line of each rank that logged one."""
    return {int(found["rank"]): found.groupdict() for found in _START_LINE.finditer(log)}


def is_measured() -> bool:
    """Whether `make coverage` measures this process and those that it starts."""
    return "COVERAGE_PROCESS_CONFIG" in os.environ


def environment(ranks: int, *, fault: str | None = None) -> dict[str, str]:
    """Offline, one thread and one core a rank, `support` on the path, and what is needed of the plugins beside this."""
    found = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(core) for core in range(ranks)),
    }
    plugins = [*filter(None, [fault]), *(["saves_coverage"] if is_measured() else [])]
    paths = [*map(_distribution, plugins), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    found["PYTHONPATH"] = os.pathsep.join(paths)
    return found


@functools.cache
def _scratch() -> Path:
    holder = tempfile.TemporaryDirectory(prefix="kv-layouts-e2e-")
    _kept.append(holder)
    return Path(holder.name)


_kept: list[tempfile.TemporaryDirectory[str]] = []


@functools.cache
def _distribution(name: str) -> str:
    """A folder that Python takes for an installed distribution with a plugin of SGLang's: the module `name` here."""
    metadata = _scratch() / name / f"{name}-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n", encoding="utf-8")
    (metadata / "entry_points.txt").write_text(
        f"[sglang.srt.plugins]\n{name} = support.engines.{name}:register\n", encoding="utf-8"
    )
    return str(metadata.parent)
