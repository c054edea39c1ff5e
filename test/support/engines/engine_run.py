"""Runs one `Engine` through a scenario in a process of its own: ``python -m support.engines.engine_run SPEC RESULT``.

The scenario is the same for every configuration, so that results can be compared request by request.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

PAGE = 16
NEW_TOKENS = 6
PROMPT_TOKENS = 270  # 17 pages, the last of them not full; three chunks of 128
FLUSH_SECONDS = 20
SAMPLING = {"max_new_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}

COMMON: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "disable_cuda_graph": True,
    "page_size": PAGE,
    "mem_fraction_static": 0.3,
    "context_length": 512,
    "max_running_requests": 4,
    "chunked_prefill_size": 128,
    "schedule_conservativeness": 0.05,  # admits more than will fit in the end
    "skip_server_warmup": True,
    "enable_cache_report": True,
    "random_seed": 7,
    "log_level": "info",
}


def prompts() -> dict[str, list[list[int]]]:
    """Token ids by step of the scenario."""
    rng = random.Random(1)

    def draw(tokens: int) -> list[int]:
        return [rng.randrange(256) for _ in range(tokens)]

    prefix = draw(160)
    return {
        "long": [draw(PROMPT_TOKENS) for _ in range(6)],
        "shared": [prefix + draw(40 + PAGE * number) for number in range(5)],
        "short": [draw(PAGE), draw(5), draw(PAGE - 1), draw(PAGE + 1)],
    }


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """All steps; each a list of results, one a request."""
    from sglang.srt.entrypoints.engine import Engine

    started = time.perf_counter()
    engine = Engine(**{**COMMON, **spec})
    results: dict[str, Any] = {"start_seconds": time.perf_counter() - started}
    try:
        steps = prompts()
        results["cold"] = _ask(engine, steps["long"])
        results["again"] = _ask(engine, steps["long"])
        results["shared"] = _ask(engine, steps["shared"])
        results["shared again"] = [_ask(engine, [prompt])[0] for prompt in steps["shared"]]
        results["short"] = _ask(engine, steps["short"])
        results["short again"] = _ask(engine, steps["short"])
        # Four want 1,320 slots in the end where there are 1,024: one is retracted while it decodes, and starts again.
        # Some releases set aside whatever a request that ignores the end may make, and so never retract it.
        short = [prompt[:80] for prompt in steps["long"][:4]]
        results["pressure"] = _ask(engine, short, new_tokens=250, ignore_eos=False)
        results["aborted"] = _abort_some(engine, steps["long"])
        results["after abort"] = _ask(engine, steps["long"])
        results["flushed"] = _flush(engine)
        results["after flush"] = _ask(engine, steps["long"][:2])
        if "COVERAGE_PROCESS_CONFIG" in os.environ:  # see saves_coverage
            _flush(engine)
            _ask(engine, steps["short"])  # takes every rank, so all have saved
    finally:
        engine.shutdown()
    results["seconds"] = time.perf_counter() - started
    return results


def _ask(
    engine: Any,  # noqa: ANN401
    ids: list[list[int]],
    *,
    new_tokens: int = NEW_TOKENS,
    ignore_eos: bool = True,
) -> list[dict[str, Any]]:
    sampling = {**SAMPLING, "max_new_tokens": new_tokens, "ignore_eos": ignore_eos}
    if not ignore_eos:
        sampling["min_new_tokens"] = new_tokens
    answers = engine.generate(input_ids=ids, sampling_params=sampling, return_logprob=True)
    return [
        {
            "ids": answer["output_ids"],
            "logprobs": [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]],
            "cached": answer["meta_info"].get("cached_tokens_details") or {},
        }
        for answer in answers
    ]


def _abort_some(engine: Any, ids: list[list[int]]) -> int:  # noqa: ANN401
    """Start every prompt with many tokens to make, and abort all but the first while they run. Returns how many."""

    async def start_and_abort() -> int:
        names = [f"abort-{number}" for number in range(len(ids))]
        endless = {**SAMPLING, "max_new_tokens": 200}
        tasks = [
            asyncio.ensure_future(engine.async_generate(input_ids=prompt, sampling_params=endless, rid=name))
            for name, prompt in zip(names, ids, strict=True)
        ]
        await asyncio.sleep(0.3)
        for name in names[1:]:
            engine.tokenizer_manager.abort_request(rid=name)
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        return sum(
            isinstance(answer, BaseException) or answer["meta_info"]["finish_reason"]["type"] == "abort"
            for answer in answers
        )

    return int(engine.loop.run_until_complete(start_and_abort()))


def _flush(engine: Any) -> bool:  # noqa: ANN401
    """Flush the cache once the last request has left the scheduler; False if that does not happen."""
    deadline = time.monotonic() + FLUSH_SECONDS
    while time.monotonic() < deadline:
        if engine.flush_cache().success:
            return True
        time.sleep(0.2)
    return False


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(sys.argv[2]).write_text(json.dumps(run(given)), encoding="utf-8")
