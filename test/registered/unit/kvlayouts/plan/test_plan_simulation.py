"""The simulation behind `kvlayouts plan` against what it stands for: the real cache, and `kvlayouts replay`."""

from __future__ import annotations

import random
import re
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import pytest
from sglang.test.ci.ci_register import register_cpu_ci
from typing_extensions import override

from kvlayouts.common.trace import DEFAULT_TRACE, Trace, TraceRequest, read_trace
from kvlayouts.common.values import TRACE_BLOCK_TOKENS, EvictionPolicy, WritePolicy
from kvlayouts.main import main
from kvlayouts.plan.prompts import read_prompts
from kvlayouts.plan.simulation import CacheSimulation, SimulatedHits
from kvlayouts.ranks.job import RankOrder
from kvlayouts.replay.config import ReplayConfig
from kvlayouts.replay.driver import ReplayJob, run_replay
from sglang.srt.mem_cache.layouts import CpSharedLayout, LayoutConfig, LayoutConfigError, create_layout
from support.replays import make_trace, small_config, write_trace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvlayouts.plan.prompts import Prompts
    from sglang.srt.mem_cache.layouts import CpHiCacheNodeMetadata
    from sglang.srt.mem_cache.layouts.pages import LaneArray
    from sglang.srt.mem_cache.layouts.protocol import AnyKVLayoutStrategy

register_cpu_ci(est_time=60, suite="base-a-test-cpu")

CASES: tuple[tuple[str, WritePolicy, float], ...] = tuple(
    product(("identity", "cp_shared"), get_args(WritePolicy), (0.5, 1, 2, 5))
)


def _simulation(config: ReplayConfig, name: str, prompts: Prompts) -> CacheSimulation[Any]:
    def layout(page_size: int) -> AnyKVLayoutStrategy:
        return create_layout(LayoutConfig(name=name, page_size=page_size, shard_size=config.cp_size))

    bases = [layout(config.page_size).chain_base(content, "") for content in prompts.first_pages]
    return CacheSimulation(
        prompts,
        layout(1),
        bases,
        device_pages=config.device_pages,
        host_pages=config.host_pages + 1,  # SGLang adds one
        policy=config.policy,
        eviction_policy=config.eviction_policy,
    )


def _simulate(config: ReplayConfig, name: str, trace: Trace) -> SimulatedHits:
    return _simulation(config, name, read_prompts(trace, config.page_size)).run()


def _branching(*, requests: int, blocks: int, seed: int) -> list[TraceRequest]:
    """Unscaled requests that go on from, cut short, or repeat an earlier one, so that nodes are split all the time."""
    draw = random.Random(seed)
    fresh = iter(range(1, 1_000_000))
    made: list[TraceRequest] = []
    for _ in range(requests):
        earlier = draw.choice(made[-12:]).block_ids if made and draw.random() < 0.85 else ()
        kept = earlier[: draw.randint(0, len(earlier))]
        added = draw.randint(0 if kept else 1, 4)
        ids = (*kept, *(next(fresh) for _ in range(added)))[:blocks]
        tokens = TRACE_BLOCK_TOKENS * len(ids) - draw.choice([0, draw.randrange(TRACE_BLOCK_TOKENS)])
        made.append(TraceRequest(timestamp_ms=0, prompt_tokens=tokens, block_ids=ids))
    return made


def _make_case(folder: Path, number: int) -> tuple[ReplayConfig, str, Trace]:
    """A random trace and cache for each layout, policy and host ratio, often as small as the longest prompt allows."""
    draw = random.Random(number)
    name, policy, host_ratio = CASES[number]
    page_size, ranks = draw.choice([1, 4, 16, 40, 64]), draw.choice([1, 2, 3, 4])
    requests = _branching(requests=90, blocks=draw.choice([3, 8, 14]), seed=draw.randrange(10**6))
    trace = read_trace(
        write_trace(folder / f"{number}.jsonl", requests), block_tokens=draw.choice([7, 16, 32, 48, 128])
    )
    pages = -(-trace.longest_prompt_tokens // page_size)
    rank_pages = -(-pages // ranks) if name == "cp_shared" else pages
    device_tokens = int(rank_pages * draw.choice([1, 1, 1.3, 2, 4])) * page_size
    config = ReplayConfig(
        layouts=(name,),
        device_tokens=device_tokens,
        cp_size=ranks,
        page_size=page_size,
        host_ratio=max(host_ratio, page_size / device_tokens),
        policy=policy,
        eviction_policy=draw.choice(get_args(EvictionPolicy)),
        block_tokens=trace.block_tokens,
        verify="off",
    )
    return config, name, trace


@pytest.fixture(scope="module")
def _one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """This process as a group of one rank. The tree is the same on all ranks, so rank 0 of any group stands for all."""
    from kvlayouts.ranks.setup import joined_group

    folder = tmp_path_factory.mktemp("rendezvous")
    trace = Trace(name="none", requests=(), block_tokens=1)
    job = ReplayJob(config=small_config(), trace=trace)
    order = RankOrder(job=job, rank=0, ranks=1, rendezvous=str(folder / "file"), peer_seconds=60)
    with joined_group(order, page_size=16):
        yield


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("number", range(len(CASES)))
def test_each_request_hits_evicts_and_moves_in_the_simulation_what_it_does_in_the_real_cache(
    number: int, tmp_path: Path
) -> None:
    from kvlayouts.replay.rank import RankReplay

    config, name, trace = _make_case(tmp_path, number)
    real = RankReplay(config, name, 0)
    simulation = _simulation(config, name, prompts := read_prompts(trace, config.page_size))
    try:
        for line, (request, prompt) in enumerate(zip(trace.requests, prompts, strict=True), 1):
            expected = real._serve(request)  # noqa: SLF001  # `run` compares digests over a group of several ranks
            assert simulation.serve(prompt) == expected, f"request {line} of {config}"
            used = (simulation.slots.room_pages().tolist(), simulation.controller.ledger.free_pages)
            ledger = real.cache.cache_controller.ledger
            assert used == (real.cache.slots.room_pages().tolist(), ledger.free_pages), f"after request {line}"
        # Whatever a whole run reports must be right as well: the trace again, from an empty cache.
        hits, stats = _simulate(config, name, trace), real.cache.stats
        found = (
            hits.evicted_device_tokens,
            hits.evicted_host_tokens,
            hits.refused_backups,
            hits.backups,
            hits.loads,
            hits.backed_up_lane_pages[0] * real.cache.cache_controller.transfer.bytes_per_page,
            hits.loaded_lane_pages[0] * real.cache.cache_controller.transfer.bytes_per_page,
        )
        assert found == (
            stats.evicted_device_tokens,
            stats.evicted_host_tokens,
            stats.refused_backups,
            stats.backups,
            stats.loads,
            stats.backed_up_bytes,
            stats.loaded_bytes,
        )
    finally:
        real.cache.release_host_resources()


def test_the_random_cases_reach_every_order_and_tier(tmp_path: Path) -> None:
    cases = [_make_case(tmp_path, number) for number in range(len(CASES))]
    assert {config.eviction_policy for config, _, _ in cases} == set(get_args(EvictionPolicy))
    hits = [_simulate(config, name, trace) for config, name, trace in cases]
    for field in ("host_hit_tokens", "evicted_device_tokens", "evicted_host_tokens", "refused_backups"):
        assert sum(getattr(found, field) > 0 for found in hits) >= 3, f"hardly any case has {field}"


@pytest.mark.processes
@pytest.mark.timeout(180)
@pytest.mark.usefixtures("fork_server")
def test_the_simulation_agrees_with_a_replay_on_real_ranks_for_both_layouts(tmp_path: Path) -> None:
    config = small_config(cp_size=3, verify="off")
    trace = make_trace(tmp_path, requests=60, block_tokens=config.block_tokens)
    replayed = run_replay(config, trace, lambda *_: None)
    for name, result in replayed.items():
        hits = _simulate(config, name, trace)
        assert hits.host_hit_tokens > 0, "the trace was meant to need the host"
        assert (hits.requests, hits.device_hit_tokens, hits.host_hit_tokens, hits.computed_tokens) == (
            result.requests,
            result.device_hit_tokens,
            result.host_hit_tokens,
            result.computed_tokens,
        )
        assert (hits.evicted_device_tokens, hits.evicted_host_tokens, hits.refused_backups) == (
            result.evicted_device_tokens,
            result.evicted_host_tokens,
            result.refused_backups,
        )
        assert {hits.backups} == set(result.write_acks_per_rank)
        assert {hits.loads} == set(result.load_acks_per_rank)


def test_the_simulation_gives_the_hits_and_evictions_of_the_replay_in_its_guide() -> None:
    guide = (Path(__file__).parents[5] / "docs" / "replay.md").read_text(encoding="utf-8")
    assert "kvlayouts replay --block-tokens 64 --device-tokens 65536\n" in guide

    def row(label: str) -> tuple[int, ...]:
        found = re.search(rf"^ *{label} +([\d,]+)[^\d]+(?:[\d.]+ %\))? *([\d,]+)", guide, re.MULTILINE)
        assert found is not None, f"the guide has no row {label}"
        return tuple(int(number.replace(",", "")) for number in found.groups())

    names = ("identity", "cp_shared")
    config = ReplayConfig(layouts=names, device_tokens=65536, block_tokens=64)
    trace = read_trace(DEFAULT_TRACE, block_tokens=64)
    hits = [_simulate(config, name, trace) for name in names]
    assert tuple(found.device_hit_tokens for found in hits) == row("served from device")
    assert tuple(found.host_hit_tokens for found in hits) == row("served from host")
    assert tuple(found.evicted_device_tokens for found in hits) == row("evicted from device, tokens")
    assert tuple(found.evicted_host_tokens for found in hits) == row("evicted from host, tokens")
    assert tuple(found.backups for found in hits) == row("write acks per rank")
    assert tuple(found.loads for found in hits) == row("load acks per rank")


def test_a_host_of_any_size_serves_what_the_guide_says_with_every_layout() -> None:
    guide = " ".join((Path(__file__).parents[5] / "docs" / "plan.md").read_text(encoding="utf-8").split())
    trace = read_trace(DEFAULT_TRACE, block_tokens=64)
    for name in ("identity", "cp_shared"):
        shares = []
        for ratio in (0.5, 1.0, 2.0):
            config = ReplayConfig(layouts=(name,), device_tokens=65536, host_ratio=ratio, block_tokens=64)
            hits = _simulate(config, name, trace)
            assert hits.host_hit_tokens > 0
            shares.append(f"{100 * hits.host_hit_tokens / hits.prompt_tokens:.1f}")
        assert f"{shares[0]}, {shares[1]} and {shares[2]} % with `{name}`" in guide


def _make_prompts(*prompts: tuple[int, tuple[int, ...]], block_tokens: int, page_size: int) -> Prompts:
    requests = tuple(TraceRequest(timestamp_ms=0, prompt_tokens=tokens, block_ids=ids) for tokens, ids in prompts)
    return read_prompts(Trace(name="made", requests=requests, block_tokens=block_tokens), page_size)


def test_prefix_ids_are_equal_as_long_as_the_blocks_are() -> None:
    prompts = _make_prompts((12, (7, 2, 9)), (12, (7, 2, 4)), (8, (2, 9)), block_tokens=4, page_size=2)
    assert [prompt.prefix_ids for prompt in prompts] == [(0, 1, 2), (0, 1, 3), (4, 5)]
    assert [prompt.first_page for prompt in prompts] == [0, 0, 1]


@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 5, 8, 9])
def test_distinct_pages_are_those_that_differ_in_content_or_in_what_precedes_them(page_size: int) -> None:
    made = [(12, (7, 2, 9)), (10, (7, 2, 4)), (9, (7, 2, 9)), (6, (2, 9)), (3, (7,))]
    prompts = _make_prompts(*made, block_tokens=4, page_size=page_size)
    pages = set()
    for tokens, ids in made:
        content = [(ids[at // 4], at % 4) for at in range(tokens)]
        pages |= {tuple(content[:end]) for end in range(page_size, tokens + 1, page_size)}
    assert prompts.distinct_pages == len(pages)


def test_a_cache_that_holds_every_distinct_page_never_evicts_and_one_page_less_does(tmp_path: Path) -> None:
    trace = make_trace(tmp_path, requests=60, block_tokens=32)
    pages = read_prompts(trace, 16).distinct_pages
    slack = -(-trace.longest_prompt_tokens // 16)
    ample = small_config(device_tokens=(pages + slack) * 16)
    assert _simulate(ample, "identity", trace).evicted_device_tokens == 0
    assert _simulate(small_config(device_tokens=(pages - 1) * 16), "identity", trace).evicted_device_tokens > 0


class _MovesPages(CpSharedLayout):
    """Loads every page into the lane after the one it was backed up from."""

    name = "moves_pages"

    @override
    def load_lanes(self, parts: Sequence[CpHiCacheNodeMetadata]) -> LaneArray:
        return (super().load_lanes(parts) + 1) % self.lane_count


def test_pages_lie_where_the_strategy_loads_them() -> None:
    prompts = _make_prompts(*((32, (chain, chain)) for chain in (1, 2, 3, 1)), block_tokens=16, page_size=16)
    simulation = CacheSimulation(
        prompts,
        _MovesPages(page_size=1, shard_size=3, shard_rank=0),
        [0, 0, 0],
        device_pages=2,
        host_pages=4,
        policy="write_through",
        eviction_policy="lru",
    )
    served = [simulation.serve(prompt) for prompt in prompts]
    assert served[-1] == (0, 16, 16)  # the last page is computed, in the lane that follows in its chain
    first_page = prompts.page_keys(prompts.prompts[0])[0]
    loaded = next(node for node in simulation.parts.tree.nodes() if first_page in node.key.token_ids)
    assert simulation.parts.accounting.lane_pages(loaded).tolist() == [0, 1, 0]


def test_a_strategy_that_cannot_have_pages_of_one_token_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def from_config(config: LayoutConfig) -> CpSharedLayout:
        if config.page_size < 16:
            raise LayoutConfigError(f"page_size must be 16 or more, got {config.page_size}")
        return CpSharedLayout(page_size=config.page_size, shard_size=config.shard_size, shard_rank=config.shard_rank)

    monkeypatch.setattr(CpSharedLayout, "from_config", from_config)
    trace = write_trace(tmp_path / "trace.jsonl", _branching(requests=3, blocks=3, seed=1))
    assert main(["plan", str(trace), "--kv-bytes-per-token", "100", "--gpus", "2", "--layout", "cp_shared"]) == 2
    assert capsys.readouterr().err == (
        "kvlayouts: error: --layout cp_shared: page_size must be 16 or more, got 1; "
        "plan counts in pages and needs a strategy that takes --page-size 1\n"
    )
