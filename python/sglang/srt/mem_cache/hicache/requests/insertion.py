"""`RequestInsertion`: what a request has computed becomes part of the tree, when it pauses and when it ends.

SGLang keeps a request's slots in its row of ``req_to_token``, on the device. The tree wants their page numbers in
host memory, so each insert carries them: from `RequestPages` where there is one, else read from the row::

    row      0 ····· protected ····· known ······· whole pages ··· end
             │ the tree's │ duplicates │ new to the tree │ a last part │
                            freed        inserted          kept, or freed at the end
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic

import torch
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang.srt.mem_cache.layouts.errors import LayoutInvariantError
from sglang.srt.mem_cache.layouts.pages import NO_PAGES
from sglang.srt.mem_cache.layouts.protocol import MetadataT
from sglang.srt.mem_cache.layouts.rounding import ceil_div

from ..tree.calls import Insertion
from ..tree.radix_tree import read_slot_pages, whole_pages_of
from .uses import RequestUses

if TYPE_CHECKING:
    from array import array

    from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    from sglang.srt.mem_cache.layouts.pages import PageArray

    from ..tree.calls import Match, RequestUse
    from ..tree.parts import TreeParts
    from .pages import RequestPages
    from .uses import SchedulerRequest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Chain:
    """Whole pages of a request: their key, slots (int64, shape ``[tokens]``) and page numbers."""

    key: RadixKey
    slots: torch.Tensor
    pages: PageArray
    use: RequestUse
    priority: int


class RequestInsertion(Generic[MetadataT]):
    """Puts requests of `rows` into a tree. `pages` knows their pages; without it they are read from the device.

    Each release of SGLang puts these steps together in its own way: see `seam.calls`. Locks are the caller's.
    """

    def __init__(
        self,
        parts: TreeParts[MetadataT],
        *,
        rows: ReqToTokenPool,
        allocator: BaseTokenToKVPoolAllocator,
        pages: RequestPages | None = None,
    ) -> None:
        self.pages = pages
        self._parts = parts
        self._tree = parts.tree
        self._page_size = parts.tree.page_size
        self._rows = rows
        self._allocator = allocator
        self._uses = RequestUses()

    def put(
        self,
        request: SchedulerRequest,
        computed: array[int],
        *,
        is_use: bool = True,
        splits_prompt: bool = False,
    ) -> RadixKey:
        """Put the whole pages of what a request has computed into the tree, and free those that it knew.

        Returns their key. With `splits_prompt`, a node ends where the prompt does. `is_use`: see `Insertion`.
        """
        chain = self._chain(request, computed)
        known = self._insert(chain, is_use=is_use)
        prompt = self._key(request, computed, limit=len(request.origin_input_ids))
        if splits_prompt and 0 < len(prompt) < len(chain.key):
            # Splits a leaf of both where the answer begins, which can then be evicted alone, and first. No use of
            # the nodes by another request.
            self._insert(replace(chain, key=prompt, priority=chain.priority + 1), is_use=False)
        self.give_back(request, request.kv.cache_protected_len, known)
        return chain.key

    def repoint(self, request: SchedulerRequest, key: RadixKey) -> Match[MetadataT]:
        """The row of a request names the tree's slots of `key`, as its duplicates were freed; the tree keeps them.

        Raises `LayoutInvariantError` if the tree does not have all of them.
        """
        found, kv, end = self._tree.match(key), request.kv, len(key)
        if len(found.slots) != end:
            raise LayoutInvariantError(
                f"{end} tokens of {request.rid} were inserted, but the tree has {len(found.slots)}"
            )
        protected = kv.cache_protected_len
        self._rows.write((kv.req_pool_idx, slice(protected, end)), found.slots[protected:])
        kv.cache_protected_len = end
        if self.pages is not None and kv.req_pool_idx is not None:
            self.pages.keep_from(kv.req_pool_idx, end // self._page_size)
        return found

    def give_back(self, request: SchedulerRequest, first: int, end: int) -> None:
        """Free the slots of tokens ``first .. end`` of a request."""
        self._allocator.free_segment(self.slots(request, end)[first:], start_pos=first)

    def ended(self, request: SchedulerRequest, tokens: int) -> None:
        """The first `tokens` slots of a request are the tree's, or free: its row holds no others of its own."""
        if self.pages is not None and request.kv.req_pool_idx is not None:
            self.pages.end(request.kv.req_pool_idx, ceil_div(tokens, self._page_size))

    def slots(self, request: SchedulerRequest, tokens: int) -> torch.Tensor:
        """The first `tokens` slots of a request: a view of its row, shape ``[tokens]``."""
        return self._rows.req_to_token[request.kv.req_pool_idx, :tokens]

    def _chain(self, request: SchedulerRequest, computed: array[int]) -> _Chain:
        key = self._key(request, computed)
        slots = self.slots(request, len(key))
        return _Chain(
            key=key,
            slots=slots.to(torch.int64, copy=True),
            pages=self._pages_of(request, slots),
            use=self._uses.of(request),
            priority=getattr(request, "priority", 0) or 0,
        )

    def _insert(self, chain: _Chain, *, is_use: bool) -> int:
        return self._parts.insert(
            Insertion(
                key=chain.key,
                value=chain.slots[: len(chain.key)],
                slot_pages=chain.pages,
                use=chain.use,
                is_use=is_use,
                priority=chain.priority,
            )
        ).known_tokens

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
