"""Mooncake's request traces: read, checked line by line, scaled, and turned into token ids.

A trace has one JSON object a line: `timestamp` (ms), `input_length`, `output_length` (tokens) and `hash_ids`, one id
per 512-token block of the prompt. `block_tokens` scales a block down: a prompt of `L` tokens becomes
`ceil(L * block_tokens / 512)` tokens, so it keeps its number of blocks and only its last block is partial.

The token at offset `o` of block `b` is `b * 512 + o`: a pure function of block id and offset, different for every pair.
"""

from __future__ import annotations

import json
import os
from array import array
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from kvlayouts.common.errors import InputError
from kvlayouts.common.values import TRACE_BLOCK_TOKENS, ceil_div, check_range

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DEFAULT_TRACE: Final = Path(__file__).parent / "data" / "conversation_trace_head.jsonl"
"""The trace that ships with this package: the first 1,000 requests of Mooncake's conversation trace."""

BLOCK_ID_LIMIT: Final = 2**54
"""Block ids lie below this, so that every token id fits into 64 bits."""

MIN_SLACK_PAGES: Final = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceRequest:
    """One prompt. `prompt_tokens` is scaled already; `block_ids` are one per block, the last block may be partial."""

    timestamp_ms: int
    prompt_tokens: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class InfiniteCacheHits:
    """What a cache that never evicts would serve: upper bounds for every replay of the trace."""

    hit_blocks: int
    blocks: int
    hit_tokens: int
    prompt_tokens: int

    @property
    def block_share(self) -> float:
        """Share of the blocks that were seen before, whole, behind the same prefix."""
        return self.hit_blocks / self.blocks

    @property
    def token_share(self) -> float:
        """Share of the prompt tokens that were seen before behind the same prefix, at page size 1."""
        return self.hit_tokens / self.prompt_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """Requests in the order of the file; request `i` stood on line `i + 1`. At least one request.

    `path` is the file as it was given; None for the trace that ships with this package, and for one made in memory.
    """

    name: str
    requests: tuple[TraceRequest, ...]
    block_tokens: int
    path: Path | None = None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts together."""
        return sum(request.prompt_tokens for request in self.requests)

    @property
    def longest_prompt_tokens(self) -> int:
        """Tokens of the longest prompt."""
        return max(request.prompt_tokens for request in self.requests)

    @property
    def longest_prompt_line(self) -> int:
        """Line, from 1, of the first prompt of that length."""
        longest = self.longest_prompt_tokens
        return next(line for line, request in enumerate(self.requests, 1) if request.prompt_tokens == longest)

    def token_ids(self, request: TraceRequest) -> array[int]:
        """The prompt's token ids, `request.prompt_tokens` of them, typecode `q`."""
        return token_ids(request, self.block_tokens)

    def infinite_cache_hits(self) -> InfiniteCacheHits:
        """Walk the trace through a prefix tree of blocks that never forgets (0.2 s for 300,000 blocks)."""
        hit_blocks = hit_tokens = 0
        children: dict[tuple[int, int], int] = {}
        seen_tokens: list[int] = [self.block_tokens]  # of each tree node; node 0 is the root
        for request in self.requests:
            node, unseen_tokens, matching = 0, request.prompt_tokens, True
            for block_id in request.block_ids:
                length = min(self.block_tokens, unseen_tokens)
                unseen_tokens -= length
                node = children.setdefault((node, block_id), len(seen_tokens))
                if node == len(seen_tokens):
                    seen_tokens.append(0)
                if matching:
                    hit_tokens += min(length, seen_tokens[node])
                    matching = length <= seen_tokens[node]
                    hit_blocks += matching
                seen_tokens[node] = max(seen_tokens[node], length)
        blocks = sum(len(request.block_ids) for request in self.requests)
        return InfiniteCacheHits(
            hit_blocks=hit_blocks, blocks=blocks, hit_tokens=hit_tokens, prompt_tokens=self.prompt_tokens
        )


def token_ids(request: TraceRequest, block_tokens: int) -> array[int]:
    """The token ids of a prompt cut into blocks of `block_tokens`: int64, `request.prompt_tokens` of them."""
    import numpy as np

    block_ids = np.array(request.block_ids, dtype=np.int64)
    offsets = np.arange(block_tokens, dtype=np.int64)
    tokens = (block_ids[:, None] * TRACE_BLOCK_TOKENS + offsets[None, :]).reshape(-1)[: request.prompt_tokens]
    result = array("q")
    result.frombytes(tokens.tobytes())
    return result


def read_trace(path: Path, *, block_tokens: int = TRACE_BLOCK_TOKENS, max_requests: int | None = None) -> Trace:
    """Read a trace, or its first `max_requests` lines.

    `block_tokens` lies in 1..512. It need not match the page size: prefixes are shared in whole pages, so a page that
    is no divisor of a block only means that a shared prefix may end up to one page earlier.

    Raises `InputError`, naming the file and, where there is one, the line: for a file that cannot be read or
    is empty, a line that is no request, and a `max_requests` outside 1..number of requests.
    """
    check_range("--block-tokens", block_tokens, 1, TRACE_BLOCK_TOKENS)
    if max_requests is not None and max_requests < 1:
        raise InputError(f"--requests {max_requests}: must be at least 1")
    try:
        with path.open("rb") as file:
            requests = tuple(_read_requests(file, path, block_tokens, max_requests))
    except OSError as error:
        raise InputError(f"TRACE {path}: cannot be read: {error.strerror or error}") from error
    if not requests:
        raise InputError(f"TRACE {path}: is empty; expected one JSON object a line")
    if max_requests is not None and len(requests) < max_requests:
        raise InputError(f"--requests {max_requests}: must be between 1 and {len(requests)}, the trace's requests")
    given = None if path == DEFAULT_TRACE else path
    name = os.fsencode(path.name).decode("utf-8", "replace")  # pictures take no bytes that are not UTF-8
    return Trace(name=name, requests=requests, block_tokens=block_tokens, path=given)


def _read_requests(file: BinaryIO, path: Path, block_tokens: int, max_requests: int | None) -> Iterator[TraceRequest]:
    for number, line in enumerate(file, 1):
        if max_requests is not None and number > max_requests:
            return
        try:
            yield _parse_request(line, block_tokens)
        except InputError as error:
            raise InputError(f"TRACE {path}, line {number}: {error}") from None


def _parse_request(line: bytes, block_tokens: int) -> TraceRequest:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        raise InputError(f"is no JSON object: {_shown(line)}") from None
    if not isinstance(fields, dict):
        raise InputError(f"is no JSON object: {_shown(line)}")
    timestamp_ms = _integer(fields, "timestamp", 0)
    input_tokens = _integer(fields, "input_length", 1)
    if "output_length" in fields:
        _integer(fields, "output_length", 0)
    block_ids = _block_ids(fields)
    expected = ceil_div(input_tokens, TRACE_BLOCK_TOKENS)
    if len(block_ids) != expected:
        raise InputError(
            f"hash_ids has {len(block_ids)} ids, but input_length {_shown(input_tokens)} needs {_shown(expected)} "
            f"(one per {TRACE_BLOCK_TOKENS} tokens)"
        )
    prompt_tokens = ceil_div(input_tokens * block_tokens, TRACE_BLOCK_TOKENS)
    return TraceRequest(timestamp_ms=timestamp_ms, prompt_tokens=prompt_tokens, block_ids=block_ids)


def _integer(fields: dict[str, object], key: str, low: int) -> int:
    if key not in fields:
        raise InputError(f"field {key} is missing")
    value = fields[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise InputError(f"{key} {_shown(value)}: must be an integer of at least {low}")
    return value


def _block_ids(fields: dict[str, object]) -> tuple[int, ...]:
    if "hash_ids" not in fields:
        raise InputError("field hash_ids is missing")
    values = fields["hash_ids"]
    if not isinstance(values, list):
        raise InputError(f"hash_ids {_shown(values)}: must be a list of integers")
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < BLOCK_ID_LIMIT:
            raise InputError(f"hash_ids holds {_shown(value)}: ids must be integers in 0..2**54-1")
    return tuple(values)


def _shown(value: object) -> str:
    """A bad value in at most 40 characters of one line."""
    text = value.rstrip(b"\r\n").decode("utf-8", "replace") if isinstance(value, bytes) else json.dumps(value)
    text = text if text.isprintable() else ascii(text)
    return f"{text[:37]}..." if len(text) > 40 else text or "(an empty line)"


def trace_json(trace: Trace) -> dict[str, object]:
    """What a results file says about its trace."""
    hits = trace.infinite_cache_hits()
    return {
        "name": trace.name,
        "requests": len(trace.requests),
        "block_tokens": trace.block_tokens,
        "prompt_tokens": trace.prompt_tokens,
        "longest_prompt_tokens": trace.longest_prompt_tokens,
        "infinite_cache_hit_share": hits.token_share,
        "infinite_cache_block_hit_share": hits.block_share,
    }


def prompt_room_tokens(trace: Trace, page_size: int) -> int:
    """Tokens of the longest prompt, rounded up to whole pages: the slots that it takes."""
    return ceil_div(trace.longest_prompt_tokens, page_size) * page_size


def default_device_tokens(trace: Trace, page_size: int) -> int:
    """The device pool of one rank where none is asked for: the longest prompt and an eighth, at least 16 pages more.

    Depends on no layout strategy, so that all of them get the same memory; a rank that keeps whole prompts can hold it.
    """
    prompt_pages = prompt_room_tokens(trace, page_size) // page_size
    return (prompt_pages + max(MIN_SLACK_PAGES, ceil_div(prompt_pages, 8))) * page_size


def check_device_tokens(
    trace: Trace, page_size: int, device_tokens: int, layout: str, logical_tokens: Callable[[int], int]
) -> None:
    """Raise `InputError` where the longest prompt does not fit into `layout`'s device pools.

    `logical_tokens` tells the slots that a pool of so many tokens on every rank gives; it must not decrease.
    """
    room = prompt_room_tokens(trace, page_size)
    if logical_tokens(device_tokens) >= room:
        return
    pages = bisect_left(range(room // page_size), room, key=lambda pages: logical_tokens(pages * page_size))
    raise InputError(
        f"--device-tokens {device_tokens}: must be at least {pages * page_size} with layout {layout}, for the prompt "
        f"of {trace.longest_prompt_tokens} tokens on line {trace.longest_prompt_line} of {trace.name}"
    )
