"""Answers of real engines on two GPUs: `cp_shared` against SGLang without it, request by request.

Runs the scenario of the end-to-end tests (cold, again, shared prefixes, short prompts, retraction, aborts, flush) with
a small DeepSeek-V2, TP 2, in three engines: SGLang alone, `cp_shared` with HiCache, and `cp_shared`
with a gather that returns one wrong page, which must show. Prints the largest difference in log-probability, the
cached tokens by tier, and the start-up line; exits 1 if an answer differs.

    python3 benchmark/gpu_engines.py [--dtype bfloat16] [--only plain,cp_shared,faulty] [--at-once] [--set NAME=JSON]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "test"))
from support.engines import models, runs

TOLERANCE = {"float32": 2e-4, "bfloat16": 0.15}
ON_GPU: dict[str, Any] = {
    "device": "cuda",
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "tp_size": 2,
    "disable_custom_all_reduce": True,
}
HICACHE = {**runs.HICACHE, "hicache_io_backend": "kernel"}
SHARED: dict[str, Any] = {
    "max_total_tokens": runs.LOGICAL_TOKENS // 2,
    "kv_layout_strategy": "cp_shared",
    "disable_cuda_graph": False,  # SGLang's default, which the layout strategy switches off by itself
    **HICACHE,
}
RUNS: dict[str, dict[str, Any]] = {
    "plain": {"max_total_tokens": runs.LOGICAL_TOKENS},
    "cp_shared": SHARED,
    "faulty": SHARED,
}


def run(name: str, spec: dict[str, Any], folder: Path) -> dict[str, Any] | None:
    """One engine through the scenario; None, with the end of its log printed, if it fails."""
    files = [folder / f"{name}.{kind}" for kind in ("spec.json", "result.json", "log")]
    files[0].write_text(json.dumps(spec), encoding="utf-8")
    started = time.perf_counter()
    with files[2].open("w") as log:
        status = subprocess.run(
            [sys.executable, "-m", "support.engines.engine_run", str(files[0]), str(files[1])],
            env=runs.environment(2, fault="faulty_gather" if name == "faulty" else None),
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=300,
            check=False,
        ).returncode
    text = files[2].read_text(encoding="utf-8", errors="replace")
    print(f"{name}: status {status}, {time.perf_counter() - started:.0f} s", flush=True)
    if status:
        print(text[-5000:])
        return None
    for rank, line in sorted(runs.start_lines(text).items()):
        print(f"  rank {rank}: {line}")
    found: dict[str, Any] = json.loads(files[1].read_text(encoding="utf-8"))
    return found


def compare(plain: dict[str, Any], other: dict[str, Any]) -> tuple[int, float, dict[str, int]]:
    """Requests with other ids, the largest difference in log-probability, cached tokens by tier.

    Requests are compared up to the first token that differs, that one included: what follows answers another question.
    """
    different, largest = 0, 0.0
    cached = {"device": 0, "host": 0}
    for step, answers in plain.items():
        if not isinstance(answers, list):
            continue
        for mine, theirs in zip(answers, other[step], strict=True):
            different += mine["ids"] != theirs["ids"]
            for at, (one, two) in enumerate(zip(mine["logprobs"], theirs["logprobs"], strict=True)):
                largest = max(largest, abs(one - two))
                if mine["ids"][at] != theirs["ids"][at]:
                    break
            for tier in cached:
                cached[tier] += theirs["cached"].get(tier) or 0
    return different, largest, cached


def main() -> int:
    """Run and compare; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(TOLERANCE))
    parser.add_argument("--at-once", action="store_true", help="run the engines side by side")
    parser.add_argument("--only", default=",".join(RUNS))
    parser.add_argument("--set", action="append", default=[], metavar="NAME=JSON", help="another engine argument")
    arguments = parser.parse_args()
    extra = {name: json.loads(value) for name, _, value in (one.partition("=") for one in arguments.set)}
    out = Path(os.environ.get("OUT") or tempfile.mkdtemp())
    model = models.make_deepseek(Path(tempfile.mkdtemp()), kv_lora_rank=512, rope_dim=64)
    specs = {
        name: {**ON_GPU, "dtype": arguments.dtype, **RUNS[name], **extra, "model_path": str(model)}
        for name in arguments.only.split(",")
    }
    with ThreadPoolExecutor(len(specs) if arguments.at_once else 1) as pool:
        results = dict(zip(specs, pool.map(lambda name: run(name, specs[name], out), specs), strict=True))
    status = int(any(found is None for found in results.values()))
    plain = results.get("plain")
    for name, found in results.items():
        if found is None or plain is None or name == "plain":
            continue
        different, largest, cached = compare(plain, found)
        right = largest <= TOLERANCE[arguments.dtype]
        if right == (name == "faulty"):
            status = 1
        print(f"{name}: {different} requests differ, log-probabilities by up to {largest:.2g}, cached {cached}")
    return status


if __name__ == "__main__":
    sys.exit(main())
