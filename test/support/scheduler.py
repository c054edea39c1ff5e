"""What SGLang's scheduler does to a cache, with its own requests and batches, and no model.

`Scheduler` admits, prefills in chunks, decodes, finishes, aborts, retracts and flushes, through ``ScheduleBatch``,
``release_kv_cache`` and the hooks of a server. `check` compares the host mirror with the rows of ``req_to_token``.
"""

from __future__ import annotations

from array import array
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.sampling.sampling_params import SamplingParams
from typing_extensions import override

from sglang.srt.mem_cache.hicache.assemble import assemble_cache
from sglang.srt.mem_cache.hicache.check.invariants import violations
from sglang.srt.mem_cache.hicache.device.pools import build_device_pool
from sglang.srt.mem_cache.hicache.requests.pages import RequestPages
from sglang.srt.mem_cache.hicache.server.allocator import ServingSlotAllocator
from support.caches import GEOMETRIES, LAYERS, CacheSpec, make_group, make_layout, make_params, make_settings
from support.scheduler_steps import admit, computed, extend, extend_end, prefix_tokens, release

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang.srt.mem_cache.hicache.radix_cache import HiRadixCache
    from sglang.srt.mem_cache.layouts.pages import PageArray

ROWS = 6
LONGEST_TOKENS = 1024
# Classes of hundreds of fields, of which our stubs have few.
_schedule_batch: Any = import_module("sglang.srt.managers.schedule_batch")
_NO_SPECULATION: Any = import_module("sglang.srt.speculative.spec_info").SpeculativeAlgorithm.NONE


class Scheduler:
    """One rank's cache behind a scheduler; `as_device` wraps what would lie on a GPU, `values` takes the wrap off.

    `mirrored` is False for a cache that does not know the pages of its requests.
    """

    def __init__(
        self,
        spec: CacheSpec,
        *,
        device: str = "cpu",
        as_device: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
        values: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
        mirrored: bool = True,
    ) -> None:
        self.spec = spec
        self._values = values
        layout = make_layout(spec, 0)
        self.pool = ReqToTokenPool(ROWS, LONGEST_TOKENS, device, enable_memory_saver=False)
        self.pool.req_to_token = as_device(self.pool.req_to_token)
        self.allocator = _Allocator(
            layout=layout,
            physical_size=spec.device_pages * spec.page_size,
            dtype=torch.bfloat16,
            device=device,
            kvcache=build_device_pool(
                spec.pool,
                tokens=spec.device_pages * spec.page_size,
                page_size=spec.page_size,
                layers=LAYERS,
                device=device,
                geometry=GEOMETRIES[spec.pool],
            ),
        )
        self.allocator.as_device = as_device
        params = make_params(spec, self.allocator, req_to_token_pool=self.pool)
        pages = RequestPages(self.pool, spec.page_size) if mirrored else None
        self.cache: HiRadixCache[Any] = assemble_cache(
            params, layout=layout, settings=make_settings(spec), group=make_group(spec, 0), request_pages=pages
        )
        self.allocator.serve(self.cache.make_device_room, pages)
        self.running: Any = None  # the batch that decodes
        self.chunked: list[Any] = []  # requests whose prompts are not yet computed
        self._names = 0
        self.host_hits = 0
        self.retractions = 0

    @property
    def mirror(self) -> RequestPages:
        """The cache's mirror of its requests."""
        assert self.cache.request_pages is not None
        return self.cache.request_pages

    # Steps.

    def start(self, tokens: Sequence[int], *, chunk: int | None = None) -> Any:  # noqa: ANN401  # SGLang's Req
        """Match, load back, lock, and prefill the prompt or its first `chunk` tokens."""
        self._names += 1
        request = _schedule_batch.Req(f"request {self._names}", "", array("q", tokens), SamplingParams())
        self.host_hits += admit(request, self.cache)
        self._prefill([request], chunk)
        return request

    def go_on(self, request: Any, *, chunk: int | None = None) -> None:  # noqa: ANN401
        """Prefill the next `chunk` tokens of a prompt, or the rest."""
        self.chunked.remove(request)
        request.init_next_round_input()
        self._prefill([request], chunk)

    def decode(self, steps: int = 1) -> list[Any]:
        """Decode every running request; returns those that were retracted for lack of slots."""
        retracted: list[Any] = []
        for _ in range(steps):
            if not self.running.check_decode_mem():
                retracted += self.running.retract_decode()[0]
                self.retractions += 1
            if self.running.is_empty():  # not even one request fits
                break
            self.running.prepare_for_decode()
            for request in self.running.reqs:
                self.forward(request, len(request.origin_input_ids) + len(request.output_ids))
                request.output_ids.append(900_000 + len(request.output_ids))
        return retracted

    def finish(self, request: Any, *, insert: bool = True) -> None:  # noqa: ANN401
        """The request ends, within a group of frees as in the scheduler; `insert` False is an abort."""
        self.allocator.free_group_begin()
        release(request, self.cache, keep=insert)
        self.allocator.free_group_end()
        if request in self.chunked:
            self.chunked.remove(request)
        else:
            self.running.filter_batch(
                keep_indices=[at for at, other in enumerate(self.running.reqs) if other is not request]
            )

    def forward(self, request: Any, end: int) -> None:  # noqa: ANN401
        """The model computes the KV of a request's tokens up to `end`; there is none here."""

    def settle(self) -> None:
        """What the scheduler does in every turn, when all copies have ended."""
        if self.pool.req_to_token.is_cuda:
            torch.cuda.synchronize()
        self.cache.check_hicache_events()

    def flush(self) -> None:
        """As `flush_cache`, which SGLang allows when nothing runs."""
        self.cache.reset()
        self.pool.clear()
        self.allocator.clear()

    # What must hold.

    def check(self) -> None:
        """Every request's mirrored pages are those of its row, and every page is accounted for."""
        requests = [*(self.running.reqs if self.running is not None else ()), *self.chunked]
        held = 0
        for request in requests:
            kv, size = request.kv, self.spec.page_size
            row = self._values(self.pool.req_to_token)[kv.req_pool_idx, : kv.kv_allocated_len].cpu()
            whole = -(-len(row) // size) * size
            pages = self.mirror.of(kv, request.last_node, whole)
            assert pages is not None, f"{request.rid} is not known"
            assert pages.tolist() == (row[::size] // size).tolist(), f"{request.rid}: {pages} is not {row}"
            assert (row.numpy() == slots_of(pages, size)[: len(row)]).all(), f"{request.rid}: {row}"
            held += len(pages) - kv.cache_protected_len // size
        assert self.mirror.held_pages == held, f"{self.mirror.held_pages} pages are held, but recounted: {held}"
        assert violations(self.cache, held_slot_pages=held) == []
        for node in self.cache.nodes():
            if node.value is not None:
                found = self._values(node.value).cpu().numpy()
                assert (found == slots_of(node.slot_pages, self.spec.page_size)).all(), f"node {node.id}: {found}"

    def _prefill(self, requests: list[Any], chunk: int | None) -> None:
        for request in requests:
            full = len(request.full_untruncated_fill_ids)
            extend(request, end=full if chunk is None else min(prefix_tokens(request) + chunk, full))
        batch = _schedule_batch.ScheduleBatch.init_new(
            reqs=requests,
            req_to_token_pool=self.pool,
            token_to_kv_pool_allocator=self.allocator,
            tree_cache=self.cache,
            model_config=SimpleNamespace(vocab_size=1_000_000, is_encoder_decoder=False),
            enable_overlap=False,
            spec_algorithm=_NO_SPECULATION,
        )
        batch.prepare_for_extend()
        for request in requests:
            self.forward(request, extend_end(request))
            unfinished = extend_end(request) < len(request.full_untruncated_fill_ids)
            if unfinished:
                self.chunked.append(request)
            else:
                request.output_ids.append(900_000)
            computed(request, self.cache, unfinished=unfinished)
        batch.filter_batch(self.chunked)
        if self.running is None or self.running.is_empty():
            self.running = batch
        elif not batch.is_empty():
            self.running.merge_batch(batch)


class _Allocator(ServingSlotAllocator):
    """The server's, whose slots lie on what stands for a device."""

    as_device: Callable[[torch.Tensor], torch.Tensor] = staticmethod(lambda tensor: tensor)

    @override
    def slots(self, slot_pages: PageArray) -> torch.Tensor:
        return self.as_device(super().slots(slot_pages))

    @override
    def alloc_extend(self, *positional: Any, **named: Any) -> torch.Tensor | None:
        slots = super().alloc_extend(*positional, **named)
        return None if slots is None else self.as_device(slots)


def slots_of(pages: PageArray, page_size: int) -> Any:  # noqa: ANN401  # numpy
    """Slots of whole pages, computed apart from the code under test."""
    return [page * page_size + at for page in pages.tolist() for at in range(page_size)]
