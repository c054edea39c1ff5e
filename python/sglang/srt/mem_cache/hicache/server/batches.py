"""Our hooks in every batch: which slots requests get, and which pages a forward pass reads.

extend_batch, decode_batch   bases of the chains; pages of the requests, recorded in host memory
begin_forward                pages that attention will read
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sglang.srt.mem_cache.layouts.errors import LayoutInvariantError
from sglang.srt.mem_cache.layouts.rounding import ceil_div

from ..device.shared_pools import LayoutMLATokenToKVPool
from .allocator import ServingSlotAllocator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


def extend_batch(
    original: Callable[..., Any],
    batch: ScheduleBatch,
    *positional: Any,  # noqa: ANN401
    **named: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """Around `alloc_for_extend`: slots for prompts, or chunks of them."""
    with _allocation(batch, lambda: (batch.prefix_lens, batch.seq_lens_cpu.tolist())):
        return original(batch, *positional, **named)


def decode_batch(original: Callable[..., Any], batch: ScheduleBatch, token_per_req: int) -> Any:  # noqa: ANN401
    """Around `alloc_for_decode`: slots for the next tokens."""
    lengths = batch.seq_lens_cpu
    with _allocation(batch, lambda: (lengths.tolist(), (lengths + token_per_req).tolist())):
        return original(batch, token_per_req)


@contextmanager
def _allocation(batch: ScheduleBatch, spans: Callable[[], tuple[Sequence[int], Sequence[int]]]) -> Iterator[None]:
    """The allocator is told where each chain begins, and the cache which pages each request was given.

    `spans` are the tokens that each request has, and those that it is to have.
    """
    allocator = batch.tree_cache.token_to_kv_pool_allocator
    if not isinstance(allocator, ServingSlotAllocator):
        yield
        return
    begins = [not request.kv.holds_kv for request in batch.reqs]
    firsts, ends = spans()
    with allocator.chain_bases(_chain_bases(allocator, batch.reqs)) as allocated:
        yield
    requests, page_size = allocator.request_pages, allocator.page_size
    if requests is None or not allocated:
        return
    pages, at = np.concatenate(allocated), 0
    for request, begun, first, end in zip(batch.reqs, begins, firsts, ends, strict=True):
        first_page, end_page = ceil_div(first, page_size), ceil_div(end, page_size)
        if end_page > first_page and request.kv.req_pool_idx is not None:
            own = pages[at : at + end_page - first_page]
            requests.record(request.kv.req_pool_idx, first_page, own, begins=begun)
            at += len(own)
    if at != len(pages):
        raise LayoutInvariantError(f"{len(pages)} pages were allocated for a batch that was to have {at}")


def _chain_bases(allocator: ServingSlotAllocator, requests: Sequence[Req]) -> list[int]:
    """Lane of each request's first page, from its tokens: the same for equal prefixes, on every rank."""
    bases = []
    for request in requests:
        if request.kv_rotation_base is None:  # SGLang's field for this; it clears it when a request starts over
            tokens = np.asarray(request.origin_input_ids[: allocator.page_size], dtype=np.int64)
            request.kv_rotation_base = allocator.layout.chain_base(tokens.tobytes(), request.extra_key or "")
        bases.append(request.kv_rotation_base)
    return bases


def begin_forward(
    original: Callable[..., Any],
    runner: ModelRunner,
    forward_batch: ForwardBatch,
    *positional: Any,  # noqa: ANN401
    **named: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """Around `ModelRunner.forward`: the pool learns which pages attention will ask for."""
    pool = runner.token_to_kv_pool
    if not isinstance(pool, LayoutMLATokenToKVPool):
        return original(runner, forward_batch, *positional, **named)
    pool.access.begin_batch(lambda: _pages_of_batch(runner, forward_batch, pool.page_size))
    with pool.sized_by_slots():
        return original(runner, forward_batch, *positional, **named)


def _pages_of_batch(runner: ModelRunner, batch: ForwardBatch, page_size: int) -> torch.Tensor:
    """Logical pages of every request of the batch, new tokens included: int64, on the pool's device.

    Lengths are known on the host, so the shape is too; the pages themselves are looked up on the device.
    """
    lengths = batch.seq_lens_cpu if batch.seq_lens_cpu is not None else batch.seq_lens.cpu()
    counts = -(-np.asarray(lengths, dtype=np.int64) // page_size)
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    places = torch.from_numpy(np.stack([np.repeat(np.arange(len(counts)), counts), within * page_size]))
    table = runner.req_to_token_pool.req_to_token
    if table.is_cuda:
        places = places.pin_memory()  # a copy from pageable memory can wait for the device
    ordinals, positions = places.to(table.device, non_blocking=True)
    slots: torch.Tensor = table[batch.req_pool_indices.to(torch.int64)[ordinals], positions]
    return slots.to(torch.int64).div(page_size, rounding_mode="floor")
