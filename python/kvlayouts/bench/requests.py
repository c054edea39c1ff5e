"""Tree operations of a trace's requests: every cache serves each request before the next one comes."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

from kvlayouts.bench.figures import Figure, compared
from kvlayouts.bench.sglang_subjects import SGLANG_TREES
from kvlayouts.bench.subjects import (
    OurSubject,
    PoolSizes,
    Subject,
    sizes_for,
    subjects_runtime,
)
from kvlayouts.bench.timing import no_collection

if TYPE_CHECKING:
    from array import array
    from collections.abc import Mapping, Sequence

    from sglang.srt.server_args import ServerArgs

    from kvlayouts.bench.config import BenchConfig
    from kvlayouts.bench.figures import OnStep
    from kvlayouts.common.trace import Trace

RANKS = 8
IDENTITY, SHARED = "identity", ("cp_shared", "host_shared")
REPLACED = next(iter(SGLANG_TREES))
"""The tree of SGLang's that ours takes the place of, in this release."""
BY_TOKEN = "identity, indices by token for SGLang's engine"


def bench_requests(config: BenchConfig, trace: Trace, on_step: OnStep) -> list[Figure]:
    """Milliseconds of one request, for equal logical pools and so for equal decisions. Bytes are not copied."""
    prompts = [trace.token_ids(request) for request in trace.requests]
    sizes = sizes_for(trace, RANKS)
    rounds: dict[str, list[float]] = {}
    hits: dict[str, int] = {}
    with subjects_runtime(sizes) as server_args:
        for number in range(config.rounds):
            subjects = _subjects(sizes, server_args)
            on_step("requests", number * len(prompts), config.rounds * len(prompts))
            seconds, hits = _serve_all(subjects, prompts, on_step, number * len(prompts), config.rounds * len(prompts))
            for name, total in seconds.items():
                rounds.setdefault(name, []).append(total / len(prompts) * 1e3)
            for subject in subjects.values():
                subject.close()
    return [
        compared(
            "requests", IDENTITY, rounds[IDENTITY], rounds[REPLACED], unit="ms", baseline_name=REPLACED, at_most=0.5
        ),
        *(
            compared("requests", IDENTITY, rounds[IDENTITY], rounds[name], unit="ms", baseline_name=name)
            for name in SGLANG_TREES
            if name != REPLACED
        ),
        compared("requests", BY_TOKEN, rounds[BY_TOKEN], rounds[REPLACED], unit="ms", baseline_name=REPLACED),
        *(
            compared(
                "requests",
                f"{name}, rank 0 of {RANKS}",
                rounds[name],
                rounds[IDENTITY],
                unit="ms",
                baseline_name=IDENTITY,
                at_most=1.1,
            )
            for name in SHARED
        ),
        *_hit_figures(hits),
    ]


def _hit_figures(hits: Mapping[str, int]) -> list[Figure]:
    """The caches do not decide alike under pressure, so what each found is shown beside the times."""
    return [
        Figure(
            bench="requests",
            case=f"{name}: tokens found in the cache",
            value=found,
            unit="",
            baseline=hits[REPLACED],
            baseline_name=REPLACED,
            ratio=found / hits[REPLACED] if hits[REPLACED] else None,
        )
        for name, found in hits.items()
        if name not in (REPLACED, BY_TOKEN)
    ]


def _subjects(sizes: PoolSizes, server_args: ServerArgs) -> dict[str, Subject]:
    return {
        **{name: make(sizes, server_args) for name, make in SGLANG_TREES.items()},
        IDENTITY: OurSubject("identity", 1, sizes),
        **{name: OurSubject(name, RANKS, sizes) for name in SHARED},
        BY_TOKEN: OurSubject("identity", 1, sizes, page_copies=False),
    }


def _serve_all(
    subjects: Mapping[str, Subject], prompts: Sequence[array[int]], on_step: OnStep, before: int, total: int
) -> tuple[dict[str, float], dict[str, int]]:
    """Seconds of each subject for all prompts, and the tokens that it found cached.

    Their order is drawn anew for each prompt: who follows whom decides what is in the processor's caches.
    """
    spent = dict.fromkeys(subjects, 0)
    hits = dict.fromkeys(subjects, 0)
    order, rng = list(subjects.items()), random.Random(before)
    with no_collection():
        for number, tokens in enumerate(prompts, 1):
            rng.shuffle(order)
            for name, subject in order:
                started = time.thread_time_ns()
                hits[name] += subject.serve(tokens)
                spent[name] += time.thread_time_ns() - started
            on_step("requests", before + number, total)
    return {name: nanoseconds / 1e9 for name, nanoseconds in spent.items()}, hits
