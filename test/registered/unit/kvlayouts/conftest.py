"""What the tests of the commands share: results, options and a trace made by hand; a server that forks ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kvlayouts.common.trace import Trace, TraceRequest
from kvlayouts.replay.config import ReplayConfig
from kvlayouts.replay.results import HitPoint, LayoutResult
from support.fork_server import forking_context_for_tests
from support.replays import rank_processes

if TYPE_CHECKING:
    from collections.abc import Iterator

_SERIES = (
    HitPoint(
        request_index=2,
        device_hit_tokens=100,
        host_hit_tokens=0,
        computed_tokens=900,
        evicted_device_tokens=0,
        evicted_host_tokens=128,
        device_pages_per_lane=(10, 10),
        host_pages_per_lane=(0, 0),
    ),
    HitPoint(
        request_index=3,
        device_hit_tokens=100,
        host_hit_tokens=200,
        computed_tokens=700,
        evicted_device_tokens=64,
        evicted_host_tokens=0,
        device_pages_per_lane=(12, 8),
        host_pages_per_lane=(13, 7),
    ),
)

_IDENTITY = LayoutResult(
    requests=3,
    prompt_tokens=2000,
    device_hit_tokens=200,
    host_hit_tokens=200,
    computed_tokens=1600,
    logical_capacity_tokens=1_024,
    device_bytes_per_rank=3 * 2**30,
    host_bytes_per_rank=5 * 2**20,
    d2h_bytes_per_rank=(2048, 2048),
    h2d_bytes_per_rank=(512, 1536),
    device_pages_per_rank=(12, 8),
    host_pages_per_rank=(13, 7),
    device_capacity_pages=16,
    host_capacity_pages=33,
    page_imbalance=1.25,
    write_acks_per_rank=(1_234, 1_234),
    load_acks_per_rank=(7, 7),
    digests_equal=True,
    tree_digest="0123456789abcdef",
    verified_tokens=4_321,
    mismatched_tokens=0,
    seconds=1.5,
    evicted_device_tokens=64,
    evicted_host_tokens=128,
    refused_backups=5,
    received_bytes_per_rank=(0, 0),
    host_capacity_tokens=2_000,
    hit_series=_SERIES,
)

_SHARDED = replace(
    _IDENTITY,
    device_hit_tokens=600,
    host_hit_tokens=400,
    computed_tokens=1000,
    logical_capacity_tokens=2_000,
    received_bytes_per_rank=(256, 256),
    host_capacity_tokens=4_000,
    hit_series=(),
)


@pytest.fixture(scope="session")
def fork_server() -> None:
    """The server that forks ranks runs, with everything loaded that any test's processes need."""
    forking_context_for_tests()


@pytest.fixture
def ranks_end_with_the_test() -> Iterator[None]:
    """No rank outlives a test that failed to end it."""
    yield
    for process in rank_processes():
        process.kill()


@pytest.fixture
def identity() -> LayoutResult:
    """A passed run with a hit share of 20 % and a series of two windows."""
    return _IDENTITY


@pytest.fixture
def sharded() -> LayoutResult:
    """A passed run with a hit share of 50 %, 2.0x the capacity of `identity` and no series."""
    return _SHARDED


@pytest.fixture
def config() -> ReplayConfig:
    """Valid options; `dataclasses.replace` checks again."""
    return ReplayConfig(layouts=("identity", "cp_shared"), device_tokens=1024, cp_size=2)


@pytest.fixture
def trace() -> Trace:
    """Three requests of 2,000 tokens together; the second begins with the block of the first."""
    prompts = ((512, (0,)), (1000, (0, 1)), (488, (5,)))
    requests = tuple(TraceRequest(timestamp_ms=0, prompt_tokens=n, block_ids=ids) for n, ids in prompts)
    return Trace(name="made.jsonl", requests=requests, block_tokens=512)
