"""`RequestInsertion`: what a request has computed becomes part of the tree, when it pauses and when it ends.

SGLang keeps a request's slots in its row of ``req_to_token``, on the device. The tree wants their page numbers in
host memory, so each insert carries them: from `RequestPages` where there is one, else read from the row::

    row      0 ····· protected ····· known ······· whole pages ··· end
             │ the tree's │ duplicates │ new to the tree │ a last part │
                            freed        inserted          kept, or freed at the end
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic

import torch
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang.srt.mem_cache.layouts.errors import LayoutInvariantError
from sglang.srt.mem_cache.layouts.pages import NO_PAGES
from sglang.srt.mem_cache.layouts.protocol import MetadataT

from ..tree.radix_tree import PagedInsertParams, read_slot_pages, whole_pages_of
from .uses import RequestUses

if TYPE_CHECKING:
    from array import array

    from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    from sglang.srt.mem_cache.layouts.pages import PageArray

    from ..tree.parts import TreeParts
    from .pages import RequestPages
    from .uses import SchedulerRequest


class RequestInsertion(Generic[MetadataT]):
    """Puts requests of `rows` into a tree. `pages` knows their pages; without it they are read from the device.

    With `inserts_finished` False, as SGLang's deterministic mode wants it, requests that end leave nothing behind.
    """

    def __init__(
        self,
        parts: TreeParts[MetadataT],
        *,
        rows: ReqToTokenPool,
        allocator: BaseTokenToKVPoolAllocator,
        pages: RequestPages | None = None,
        inserts_finished: bool = True,
    ) -> None:
        self.pages = pages
        self._parts = parts
        self._tree = parts.tree
        self._page_size = parts.tree.page_size
        self._rows = rows
        self._allocator = allocator
        self._inserts_finished = inserts_finished
        self._uses = RequestUses()

    def finish(self, request: SchedulerRequest, *, tokens: int, insert: bool) -> None:
        """A request of `tokens` slots has ended. Its whole pages go to the tree, or back; its prefix is unlocked."""
        kv = request.kv
        computed = (request.origin_input_ids + request.output_ids)[:tokens]
        slots = self._slots(request, len(computed))
        key = self._key(request, computed)
        protected, end = kv.cache_protected_len, len(key)
        inserts = insert and self._inserts_finished
        known = self._insert_finished(request, key, slots) if inserts else end
        self._allocator.free_segments([(slots[protected:known], protected), (slots[end:], end)])
        if request.last_node is not None:
            self._parts.accounting.unlock(request.last_node)
        if self.pages is not None and kv.req_pool_idx is not None:
            self.pages.end(kv.req_pool_idx, -(-tokens // self._page_size))

    def go_on(self, request: SchedulerRequest, *, chunked: bool) -> None:
        """A request goes on: its whole pages go to the tree, which locks them for it. `chunked` within its prompt.

        Raises `LayoutInvariantError` if the tree does not have them then.
        """
        kv = request.kv
        computed = request.get_fill_ids()
        slots = self._slots(request, len(computed))
        key = self._key(request, computed)
        protected, end = kv.cache_protected_len, len(key)
        known = self._insert(request, key, slots, self._pages_of(request, slots[:end]), chunked=chunked)
        self._allocator.free_segment(slots[protected:known], start_pos=protected)
        # Duplicates are freed, so the row must name the tree's slots in their place.
        found = self._tree.match_prefix(MatchPrefixParams(key=key))
        own = found.device_indices
        if len(own) != end:
            raise LayoutInvariantError(f"{end} tokens of {request.rid} were inserted, but the tree has {len(own)}")
        self._rows.write((kv.req_pool_idx, slice(protected, end)), own[protected:])
        kv.cache_protected_len = end
        self._parts.accounting.unlock(request.last_node)
        self._parts.accounting.lock(found.last_device_node)
        request.last_node = found.last_device_node
        request.prefix_indices = torch.cat([own, slots[end:]]) if end < len(slots) else own
        if self.pages is not None and kv.req_pool_idx is not None:
            self.pages.keep_from(kv.req_pool_idx, end // self._page_size)

    def give_back(self, request: SchedulerRequest, *, tokens: int) -> None:
        """Without a tree, a request of `tokens` slots gives back all that are its own."""
        protected = request.kv.cache_protected_len
        self._allocator.free_segment(self._slots(request, tokens)[protected:], start_pos=protected)
        if self.pages is not None and request.kv.req_pool_idx is not None:
            self.pages.end(request.kv.req_pool_idx, -(-tokens // self._page_size))

    def _insert_finished(self, request: SchedulerRequest, key: RadixKey, slots: torch.Tensor) -> int:
        """Insert prompt and answer; returns the tokens that the tree had already."""
        pages = self._pages_of(request, slots[: len(key)])
        known = self._insert(request, key, slots, pages)
        prompt = self._key(request, key.token_ids, limit=len(request.origin_input_ids))
        if 0 < len(prompt) < len(key):
            # Splits a leaf of both where the answer begins, which can then be evicted alone, and first. No use of
            # the nodes by another request, so it counts as a chunk.
            self._insert(request, prompt, slots, pages, more_priority=1, chunked=True)
        return known

    def _insert(
        self,
        request: SchedulerRequest,
        key: RadixKey,
        slots: torch.Tensor,
        pages: PageArray,
        *,
        more_priority: int = 0,
        chunked: bool = False,
    ) -> int:
        return self._parts.insert(
            PagedInsertParams(
                key=key,
                value=slots[: len(key)].to(torch.int64),
                slot_pages=pages,
                use=self._uses.of(request),
                chunked=chunked,
                priority=(getattr(request, "priority", 0) or 0) + more_priority,
            )
        ).prefix_len

    def _slots(self, request: SchedulerRequest, tokens: int) -> torch.Tensor:
        return self._rows.req_to_token[request.kv.req_pool_idx, :tokens]

    def _key(self, request: SchedulerRequest, tokens: array[int], limit: int | None = None) -> RadixKey:
        key = RadixKey(tokens, request.extra_key, self._tree.bigrams, limit, request.cache_salt)
        return whole_pages_of(key, self._page_size)

    def _pages_of(self, request: SchedulerRequest, slots: torch.Tensor) -> PageArray:
        """Page numbers of the first slots of `request`, whole pages."""
        if not len(slots):
            return NO_PAGES
        if self.pages is not None:
            pages = self.pages.of(request.kv, request.last_node, len(slots))
            if pages is not None:
                return pages
            self.pages.count_read("page numbers of a request")
        return read_slot_pages(slots, self._page_size)
