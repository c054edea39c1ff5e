"""Options and results: what construction refuses, and the JSON form."""

from __future__ import annotations

import json
import pickle
import shlex
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvlayouts.common.errors import InputError, RunError
from kvlayouts.replay.config import ReplayConfig
from kvlayouts.replay.results import HitPoint, HitSeriesRecorder, page_imbalance, rerun_command, to_json

if TYPE_CHECKING:
    from kvlayouts.common.trace import Trace
    from kvlayouts.replay.results import LayoutResult

BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"layouts": ()}, "--layout: must be given at least one layout name"),
    ({"layouts": ("a", "b", "a")}, "--layout a: given twice"),
    ({"cp_size": 0}, "--cp-size 0: must be between 1 and 64"),
    ({"cp_size": 65}, "--cp-size 65: must be between 1 and 64"),
    ({"page_size": 0}, "--page-size 0: must be between 1 and 1024"),
    ({"page_size": 1025}, "--page-size 1025: must be between 1 and 1024"),
    ({"page_size": 32, "pool": "dsa"}, "--page-size 32: must be 64 with --pool dsa"),
    ({"block_tokens": 0}, "--block-tokens 0: must be between 1 and 512"),
    ({"block_tokens": 513}, "--block-tokens 513: must be between 1 and 512"),
    ({"seed": -1}, "--seed -1: must be between 0 and 4294967295"),
    ({"device_tokens": 0}, "--device-tokens 0: must be a positive multiple of --page-size 64"),
    ({"device_tokens": -64}, "--device-tokens -64: must be a positive multiple"),
    ({"device_tokens": 2**40}, "--device-tokens 1099511627776: must be between 1 and 268435456"),
    ({"device_tokens": 1000}, "--device-tokens 1000: must be a positive multiple of --page-size 64"),
    ({"host_ratio": 0.0}, "--host-ratio 0: must be above 0 and at most 1000"),
    ({"host_ratio": float("nan")}, "--host-ratio nan: must be above 0"),
    ({"host_ratio": float("inf")}, "--host-ratio inf: must be above 0"),
    (
        {"host_ratio": 0.06},
        "--host-ratio 0.06: leaves no host page of 64 tokens beside 1024 device tokens; must be at least 0.0625",
    ),
]


@pytest.mark.parametrize(("fields", "complaint"), BAD_OPTIONS, ids=[complaint for _, complaint in BAD_OPTIONS])
def test_options_that_cannot_run_are_refused_naming_flag_value_and_range(
    fields: dict[str, Any], complaint: str, config: ReplayConfig
) -> None:
    with pytest.raises(InputError) as caught:
        replace(config, **fields)
    assert str(caught.value).startswith(complaint)


def test_options_travel_to_another_process_unchanged(config: ReplayConfig) -> None:
    config = replace(config, policy="write_back", eviction_policy="slru", host_ratio=1.5)
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(FrozenInstanceError):
        config.seed = 3  # type: ignore[misc]  # what must fail


def test_pages_follow_from_tokens_and_ratio(config: ReplayConfig) -> None:
    tight = replace(config, host_ratio=0.1)
    assert (tight.device_pages, tight.host_pages) == (16, 1)
    assert replace(config, host_ratio=2.0).host_pages == 32
    assert replace(config, device_tokens=64, pool="dsa", host_ratio=1.0).device_pages == 1


def test_hits_that_do_not_add_up_to_the_prompts_are_refused_with_both_numbers(identity: LayoutResult) -> None:
    with pytest.raises(RunError, match="add up to 2001, but the prompts have 2000 tokens"):
        replace(identity, computed_tokens=1601)


def test_a_hit_series_that_does_not_add_up_to_the_totals_is_refused(identity: LayoutResult) -> None:
    lost = replace(identity.hit_series[1], host_hit_tokens=199)
    with pytest.raises(RunError, match="host_hit_tokens of the hit series add up to 199, the run has 200"):
        replace(identity, hit_series=(identity.hit_series[0], lost))
    with pytest.raises(RunError, match="evicted_device_tokens of the hit series add up to 64, the run has 65"):
        replace(identity, evicted_device_tokens=65)


def test_entries_for_differing_numbers_of_ranks_are_refused(identity: LayoutResult) -> None:
    with pytest.raises(RunError, match=r"differing numbers of entries: \[1, 2\]"):
        replace(identity, load_acks_per_rank=(7,))


def test_shares_and_rates_are_derived(identity: LayoutResult, sharded: LayoutResult) -> None:
    assert identity.hit_share == 0.2
    assert sharded.hit_share == 0.5
    assert identity.requests_per_second == 2.0
    assert replace(identity, seconds=0.0).requests_per_second == 0.0


@pytest.mark.parametrize(
    "fields",
    [
        {"mismatched_tokens": 1},
        {"digests_equal": False},
        {"write_acks_per_rank": (1, 2)},
        {"load_acks_per_rank": (1, 2)},
    ],
)
def test_a_mismatch_or_a_disagreement_fails_the_run(fields: dict[str, Any], identity: LayoutResult) -> None:
    assert identity.passed
    assert not replace(identity, **fields).passed


def _request(device: int, *, host: int = 0, evicted: int = 0, pages: tuple[int, ...] = (1,)) -> HitPoint:
    """One request, told to a recorder; one token of it was computed."""
    return HitPoint(
        request_index=1,
        device_hit_tokens=device,
        host_hit_tokens=host,
        computed_tokens=1,
        evicted_device_tokens=evicted,
        evicted_host_tokens=3 * evicted,
        device_pages_per_lane=pages,
        host_pages_per_lane=pages[::-1],
    )


def test_imbalance_is_the_fullest_lane_against_the_mean_of_both_tiers() -> None:
    assert page_imbalance((1, 2, 3), (3, 2, 1)) == 1.0
    assert page_imbalance((6, 0), (2, 0)) == 2.0
    assert page_imbalance((0, 0), (0, 0)) == 1.0


def test_the_recorder_closes_windows_of_equal_length_and_loses_no_token() -> None:
    recorder = HitSeriesRecorder(requests=5, points=3)
    for number in range(5):
        recorder.add(_request(number, host=10 * number, evicted=2, pages=(number, 7)))
    assert recorder.series() == (
        replace(_request(1, host=10, evicted=4, pages=(1, 7)), request_index=2, computed_tokens=2),
        replace(_request(5, host=50, evicted=4, pages=(3, 7)), request_index=4, computed_tokens=2),
        replace(_request(4, host=40, evicted=2, pages=(4, 7)), request_index=5),
    )


@pytest.mark.parametrize("requests", [1, 49, 50, 51, 1000, 12_031])
def test_the_recorder_makes_at_most_fifty_windows(requests: int) -> None:
    recorder = HitSeriesRecorder(requests)
    for _ in range(requests):
        recorder.add(_request(0))
    series = recorder.series()
    assert len(series) <= 50
    assert series[-1].request_index == requests
    assert sum(point.prompt_tokens for point in series) == requests


def test_the_json_form_has_every_promised_key_and_survives_a_round_trip(
    identity: LayoutResult, sharded: LayoutResult, config: ReplayConfig, trace: Trace
) -> None:
    document = to_json(config, trace, {"identity": identity, "cp_shared": sharded})
    read = json.loads(json.dumps(document, allow_nan=False))
    assert list(read) == ["trace", "config", "command", "layouts"]
    assert list(read["layouts"]) == ["identity", "cp_shared"]
    assert read["layouts"]["identity"] == {
        "requests": 3,
        "prompt_tokens": 2000,
        "device_hit_tokens": 200,
        "host_hit_tokens": 200,
        "computed_tokens": 1600,
        "hit_share": 0.2,
        "logical_capacity_tokens": 1024,
        "device_bytes_per_rank": 3 * 2**30,
        "host_bytes_per_rank": 5 * 2**20,
        "d2h_bytes_per_rank": [2048, 2048],
        "h2d_bytes_per_rank": [512, 1536],
        "device_pages_per_rank": [12, 8],
        "host_pages_per_rank": [13, 7],
        "device_capacity_pages": 16,
        "host_capacity_pages": 33,
        "page_imbalance": 1.25,
        "write_acks_per_rank": [1234, 1234],
        "load_acks_per_rank": [7, 7],
        "digests_equal": True,
        "tree_digest": "0123456789abcdef",
        "verified_tokens": 4321,
        "mismatched_tokens": 0,
        "seconds": 1.5,
        "evicted_device_tokens": 64,
        "evicted_host_tokens": 128,
        "refused_backups": 5,
        "received_bytes_per_rank": [0, 0],
        "host_capacity_tokens": 2000,
        "requests_per_second": 2.0,
        "hit_series": [
            {
                "request_index": 2,
                "device_hit_tokens": 100,
                "host_hit_tokens": 0,
                "computed_tokens": 900,
                "evicted_device_tokens": 0,
                "evicted_host_tokens": 128,
                "device_pages_per_lane": [10, 10],
                "host_pages_per_lane": [0, 0],
            },
            {
                "request_index": 3,
                "device_hit_tokens": 100,
                "host_hit_tokens": 200,
                "computed_tokens": 700,
                "evicted_device_tokens": 64,
                "evicted_host_tokens": 0,
                "device_pages_per_lane": [12, 8],
                "host_pages_per_lane": [13, 7],
            },
        ],
    }


def test_the_json_form_tells_the_trace_and_every_option(
    identity: LayoutResult, config: ReplayConfig, trace: Trace
) -> None:
    config = replace(config, seed=7)
    read = json.loads(json.dumps(to_json(config, trace, {"identity": identity})))
    assert read["trace"] == {
        "name": "made.jsonl",
        "requests": 3,
        "block_tokens": 512,
        "prompt_tokens": 2000,
        "longest_prompt_tokens": 1000,
        "infinite_cache_hit_share": 512 / 2000,
        "infinite_cache_block_hit_share": 1 / 4,
    }
    told = read["config"]
    assert (told.pop("trace"), told.pop("requests")) == (None, 3)
    assert ReplayConfig(**(told | {"layouts": tuple(told["layouts"])})) == config


def test_the_command_to_run_it_again_names_the_trace_as_given_and_every_option(
    config: ReplayConfig, trace: Trace
) -> None:
    named = replace(trace, path=Path("some folder/made.jsonl"))
    assert shlex.split(rerun_command(config, named))[:3] == ["kvlayouts", "replay", "some folder/made.jsonl"]
    assert rerun_command(replace(config, host_ratio=0.75, seed=7), trace) == (
        "kvlayouts replay --layout identity --layout cp_shared --requests 3 --device-tokens 1024 --cp-size 2 "
        "--pool mla --page-size 64 --host-ratio 0.75 --policy write_through --eviction-policy lru "
        "--host-mem-layout layer_first --block-tokens 512 --verify all --seed 7"
    )
