"""Reading a request trace: facts of the shipped one, scaling, token ids, and one readable line for every bad input."""

from __future__ import annotations

import json
from array import array
from typing import TYPE_CHECKING

import pytest

from kvlayouts.common.errors import InputError
from kvlayouts.common.trace import (
    BLOCK_ID_LIMIT,
    DEFAULT_TRACE,
    Trace,
    TraceRequest,
    check_device_tokens,
    default_device_tokens,
    prompt_room_tokens,
    read_trace,
    token_ids,
)

if TYPE_CHECKING:
    from pathlib import Path


def _make_line(input_length: object = 600, hash_ids: object = (3, 9), **fields: object) -> str:
    return json.dumps({"timestamp": 0, "input_length": input_length, "output_length": 1, "hash_ids": hash_ids} | fields)


def _make_file(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "some.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def _make_trace(*prompts: tuple[int, tuple[int, ...]], block_tokens: int = 4) -> Trace:
    requests = tuple(TraceRequest(timestamp_ms=0, prompt_tokens=n, block_ids=ids) for n, ids in prompts)
    return Trace(name="made", requests=requests, block_tokens=block_tokens)


@pytest.fixture(scope="module")
def shipped() -> Trace:
    return read_trace(DEFAULT_TRACE)


def test_the_shipped_trace_is_the_first_thousand_conversation_requests(shipped: Trace) -> None:
    hits = shipped.infinite_cache_hits()
    assert len(shipped.requests) == 1000
    assert shipped.requests[0] == TraceRequest(timestamp_ms=0, prompt_tokens=6758, block_ids=tuple(range(14)))
    assert shipped.prompt_tokens == hits.prompt_tokens == 13_732_944
    assert (shipped.longest_prompt_tokens, shipped.longest_prompt_line) == (121_924, 611)
    assert hits.blocks == 27_305
    # Mooncake's ids name a whole prefix, so a block hits exactly when its id was seen before.
    unique_blocks = len({block_id for request in shipped.requests for block_id in request.block_ids})
    assert hits.hit_blocks == hits.blocks - unique_blocks == 5_791
    assert hits.block_share == pytest.approx(0.2121, abs=5e-5)
    assert hits.token_share == pytest.approx(2_962_776 / 13_732_944)


def test_the_shipped_trace_comes_with_its_licence_and_its_source() -> None:
    licence = (DEFAULT_TRACE.parent / "LICENSE-APACHE").read_text(encoding="utf-8")
    source = (DEFAULT_TRACE.parent / "README.md").read_text(encoding="utf-8")
    assert "Apache License" in licence
    assert "Version 2.0" in licence
    assert "kvcache-ai/Mooncake" in source
    assert "3b5a594133958449a1feaf1c9e0fc1b553e34a28" in source
    assert DEFAULT_TRACE.stat().st_size < 300_000


def test_only_the_asked_requests_are_read_and_later_lines_are_not_looked_at(tmp_path: Path) -> None:
    path = _make_file(tmp_path, _make_line(), _make_line(1, [4]), "not json")
    trace = read_trace(path, max_requests=2)
    assert [request.prompt_tokens for request in trace.requests] == [600, 1]
    assert trace.name == "some.jsonl"


@pytest.mark.parametrize("block_tokens", [1, 3, 64, 100, 511, 512])
@pytest.mark.parametrize("input_length", [1, 511, 512, 513, 600, 1024])
def test_a_scaled_prompt_keeps_its_number_of_blocks(tmp_path: Path, block_tokens: int, input_length: int) -> None:
    blocks = -(-input_length // 512)
    path = _make_file(tmp_path, _make_line(input_length, list(range(blocks))))
    (request,) = read_trace(path, block_tokens=block_tokens).requests
    assert (blocks - 1) * block_tokens < request.prompt_tokens <= blocks * block_tokens
    assert abs(request.prompt_tokens - input_length * block_tokens / 512) < 1
    assert len(token_ids(request, block_tokens)) == request.prompt_tokens


def test_scaling_rounds_a_partial_token_up(tmp_path: Path) -> None:
    (request,) = read_trace(_make_file(tmp_path, _make_line(600, [3, 9])), block_tokens=64).requests
    assert request.prompt_tokens == 75
    (request,) = read_trace(_make_file(tmp_path, _make_line(601, [3, 9])), block_tokens=64).requests
    assert request.prompt_tokens == 76


def test_token_ids_are_block_id_times_512_plus_the_offset_in_the_block() -> None:
    trace = _make_trace((6, (7, 2)))
    ids = trace.token_ids(trace.requests[0])
    assert ids == array("q", [3584, 3585, 3586, 3587, 1024, 1025])
    assert (ids.typecode, ids.itemsize) == ("q", 8)


def test_token_ids_of_a_block_do_not_depend_on_its_neighbours_or_its_request() -> None:
    trace = _make_trace((8, (5, 6)), (7, (6, 5)), (5, (6, 8)))
    first, second, third = (list(trace.token_ids(request)) for request in trace.requests)
    assert first[4:] == second[:4] == third[:4]
    assert first[:3] == second[4:]
    assert trace.token_ids(trace.requests[0]) == trace.token_ids(trace.requests[0])


def test_no_two_blocks_share_a_token_even_at_full_size_and_the_last_block_id() -> None:
    trace = _make_trace((1536, (0, 1, BLOCK_ID_LIMIT - 1)), block_tokens=512)
    ids = trace.token_ids(trace.requests[0])
    assert len(set(ids)) == 1536
    assert ids[-1] == 2**63 - 1


def test_an_infinite_cache_hits_whole_blocks_behind_the_same_prefix_only() -> None:
    trace = _make_trace((8, (1, 2)), (8, (1, 2)), (8, (2, 1)), (8, (1, 3)))
    hits = trace.infinite_cache_hits()
    assert (hits.hit_blocks, hits.blocks, hits.hit_tokens) == (3, 8, 12)
    assert (hits.block_share, hits.token_share) == (3 / 8, 12 / 32)


def test_an_infinite_cache_serves_the_known_part_of_a_longer_block_and_nothing_after_it() -> None:
    trace = _make_trace((6, (1, 2)), (12, (1, 2, 3)), (12, (1, 2, 3)), (5, (1, 2)), (8, (1, 2)))
    hits = trace.infinite_cache_hits()
    assert hits.hit_tokens == 0 + 6 + 12 + 5 + 8
    assert hits.hit_blocks == 0 + 1 + 3 + 2 + 2


BAD_LINES = {
    "not json": "is no JSON object: not json",
    "": "is no JSON object: (an empty line)",
    "[1, 2]": "is no JSON object: [1, 2]",
    "[" * 100_000: "is no JSON object: [[",
    '{"timestamp": ' + "9" * 5000 + "}": "is no JSON object: ",
    '{"input_length": 5, "hash_ids": [1]}': "field timestamp is missing",
    '{"timestamp": 0, "hash_ids": [1]}': "field input_length is missing",
    '{"timestamp": 0, "input_length": 5}': "field hash_ids is missing",
    _make_line(timestamp=True): "timestamp true: must be an integer of at least 0",
    _make_line(timestamp=-1): "timestamp -1: must be an integer of at least 0",
    _make_line(
        timestamp="x" * 99
    ): 'timestamp "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx...: must be an integer of at least 0',
    _make_line(output_length=1.5): "output_length 1.5: must be an integer of at least 0",
    _make_line(0, []): "input_length 0: must be an integer of at least 1",
    _make_line(True, [1]): "input_length true: must be an integer of at least 1",
    _make_line(5.0, [1]): "input_length 5.0: must be an integer of at least 1",
    _make_line(None, [1]): "input_length null: must be an integer of at least 1",
    _make_line(5, 1): "hash_ids 1: must be a list of integers",
    _make_line(5, [True]): "hash_ids holds true: ids must be integers in 0..2**54-1",
    _make_line(5, [-1]): "hash_ids holds -1: ids must be",
    _make_line(5, ["a"]): 'hash_ids holds "a": ids must be',
    _make_line(5, [BLOCK_ID_LIMIT]): "hash_ids holds 18014398509481984: ids must be",
    _make_line(512, [1, 2]): "hash_ids has 2 ids, but input_length 512 needs 1",
    _make_line(513, [1]): "hash_ids has 1 ids, but input_length 513 needs 2",
}


@pytest.mark.parametrize(("line", "complaint"), BAD_LINES.items(), ids=range(len(BAD_LINES)))
def test_a_bad_line_is_refused_with_file_and_line_number(tmp_path: Path, line: str, complaint: str) -> None:
    path = _make_file(tmp_path, _make_line(), line, _make_line())
    with pytest.raises(InputError) as caught:
        read_trace(path)
    message = str(caught.value)
    assert message.startswith(f"TRACE {path}, line 2: {complaint}")
    assert message.isprintable()
    assert len(message) < len(str(path)) + 130


def test_bytes_that_are_no_text_are_refused_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "binary.jsonl"
    path.write_bytes(_make_line().encode() + b"\n\xff\x00\x1b[31m\n")
    with pytest.raises(InputError, match=r"line 2: is no JSON object: ") as caught:
        read_trace(path)
    assert str(caught.value).isprintable()


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"TRACE .*some\.jsonl: is empty"):
        read_trace(_make_file(tmp_path))


def test_a_missing_file_and_a_directory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"TRACE .*none\.jsonl: cannot be read: No such file"):
        read_trace(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="cannot be read: Is a directory"):
        read_trace(tmp_path)


@pytest.mark.parametrize("requests", [-1, 0, 3])
def test_a_number_of_requests_that_the_trace_has_not_is_refused(tmp_path: Path, requests: int) -> None:
    with pytest.raises(InputError, match=rf"--requests {requests}: must be "):
        read_trace(_make_file(tmp_path, _make_line(), _make_line()), max_requests=requests)


@pytest.mark.parametrize("block_tokens", [0, 513])
def test_block_tokens_outside_1_to_512_are_refused(tmp_path: Path, block_tokens: int) -> None:
    with pytest.raises(InputError, match=f"--block-tokens {block_tokens}: must be between 1 and 512"):
        read_trace(_make_file(tmp_path, _make_line()), block_tokens=block_tokens)


@pytest.mark.parametrize(
    ("longest", "page_size", "expected"), [(1, 64, 17 * 64), (128 * 64, 64, 144 * 64), (1000 * 64 + 1, 64, 1127 * 64)]
)
def test_the_default_device_pool_holds_the_longest_prompt_and_slack(
    longest: int, page_size: int, expected: int
) -> None:
    trace = _make_trace((longest, (0,)), (1, (1,)), block_tokens=512)
    assert default_device_tokens(trace, page_size) == expected
    assert expected >= prompt_room_tokens(trace, page_size) + 16 * page_size


def test_a_device_pool_that_holds_the_longest_prompt_exactly_is_accepted() -> None:
    trace = _make_trace((1, (0,)), (130, (1,)))
    assert prompt_room_tokens(trace, 64) == 192
    check_device_tokens(trace, 64, 192, "plain", lambda tokens: tokens)
    check_device_tokens(trace, 64, 64, "sharded", lambda tokens: 4 * tokens)


def test_a_device_pool_too_small_for_a_prompt_is_refused_with_the_minimum_and_the_line() -> None:
    trace = _make_trace((1, (0,)), (130, (1,)), (130, (1,)))
    with pytest.raises(InputError) as caught:
        check_device_tokens(trace, 64, 128, "plain", lambda tokens: tokens)
    assert str(caught.value) == (
        "--device-tokens 128: must be at least 192 with layout plain, for the prompt of 130 tokens on line 2 of made"
    )
    with pytest.raises(InputError, match="--device-tokens 64: must be at least 128 with layout halves"):
        check_device_tokens(trace, 64, 64, "halves", lambda tokens: 2 * tokens)
