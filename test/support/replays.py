"""Traces that need both tiers, for the tests that start rank processes."""

from __future__ import annotations

import json
import multiprocessing as mp
import random
import re
from pathlib import Path
from typing import Any

from kvlayouts.common.trace import Trace, TraceRequest, read_trace
from kvlayouts.common.values import TRACE_BLOCK_TOKENS
from kvlayouts.replay.config import ReplayConfig

FAULTY_LAYOUTS = Path(__file__).parent / "faulty_layouts"


def conversations(*, requests: int, talks: int = 5, blocks: int = 8, seed: int = 0) -> list[TraceRequest]:
    """Unscaled requests of `talks` conversations that take turns at random and start anew after `blocks` blocks.

    All conversations share their first block; the last block of each prompt is partial.
    """
    generator = random.Random(seed)
    fresh = iter(range(1, 1_000_000))
    histories: list[list[int]] = [[0, next(fresh)] for _ in range(talks)]
    made = []
    for _ in range(requests):
        talk = generator.randrange(talks)
        if len(histories[talk]) >= blocks:
            histories[talk] = [0, next(fresh)]
        histories[talk].append(next(fresh))
        tokens = TRACE_BLOCK_TOKENS * len(histories[talk]) - generator.randrange(TRACE_BLOCK_TOKENS)
        made.append(TraceRequest(timestamp_ms=0, prompt_tokens=tokens, block_ids=tuple(histories[talk])))
    return made


def write_trace(path: Path, requests: list[TraceRequest]) -> Path:
    """`requests` as a trace file in Mooncake's format."""
    lines = [
        {"timestamp": 0, "input_length": r.prompt_tokens, "output_length": 1, "hash_ids": r.block_ids} for r in requests
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def make_trace(folder: Path, *, requests: int, block_tokens: int, **options: int) -> Trace:
    """The trace of `conversations`, scaled."""
    path = write_trace(folder / "conversations.jsonl", conversations(requests=requests, **options))
    return read_trace(path, block_tokens=block_tokens)


def rank_processes() -> list[mp.process.BaseProcess]:
    """Rank processes of this process's replays that have not ended."""
    return [process for process in mp.active_children() if process.name.startswith("kvlayouts-rank-")]


def without_progress(error: str) -> list[str]:
    """What a command wrote to stderr besides its progress."""
    return [line for line in error.splitlines() if line and not re.fullmatch(r"\w+: [\d,]+ of [\d,]+ requests", line)]


def small_config(**options: Any) -> ReplayConfig:  # noqa: ANN401  # fields of ReplayConfig
    """Two ranks whose device pools hold the longest prompt and little more: 8 blocks of 32 tokens, pages of 16."""
    fields: dict[str, Any] = {
        "layouts": ("identity", "cp_shared"),
        "cp_size": 2,
        "page_size": 16,
        "block_tokens": 32,
        "device_tokens": 384,
        "host_ratio": 2.0,
        **options,
    }
    return ReplayConfig(**fields)
