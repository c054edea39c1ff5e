"""Slot allocators: free pages by owner (by *lane*), all of them in host memory.

Slots are logical: every rank of the shard group hands out the same ones in the same order, so the free lists
are mirrored state, like the tree. They are kept as page numbers on the host, and slot tensors are made from
them, never the other way round, so that no decision waits for the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
from typing_extensions import override

from sglang.srt.mem_cache.layouts.config import check_range
from sglang.srt.mem_cache.layouts.errors import LayoutConfigError
from sglang.srt.mem_cache.layouts.facts import page_rows
from sglang.srt.mem_cache.layouts.pages import (
    NO_PAGES,
    LaneArray,
    PageArray,
    pages_of_tokens,
    tokens_of_pages,
    whole_pages,
)
from sglang.srt.mem_cache.layouts.rounding import ceil_div

from .free_pages import free_slot_pages_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang.srt.mem_cache.memory_pool import KVCache

    from sglang.srt.mem_cache.layouts.protocol import AnyKVLayoutStrategy


class SlotAllocator(Protocol):
    """What the tree and the controller need: pages by lane."""

    @property
    def lane_count(self) -> int:
        """Number of owners."""
        ...

    def room_pages(self) -> PageArray:
        """Free pages of each lane, shape ``[lane_count]``."""
        ...

    def alloc_lanes(self, lanes: LaneArray) -> PageArray | None:
        """Logical pages in the lanes asked for, in that order, or None with nothing taken if a lane is short."""
        ...

    def free_slot_pages(self, slot_pages: PageArray) -> None:
        """Give pages back, each once."""
        ...

    def slots(self, slot_pages: PageArray) -> torch.Tensor:
        """Slot tensor of `slot_pages` on the pool's device, int64, shape ``[pages * page_size]``."""
        ...


class LaneSlotAllocator(BaseTokenToKVPoolAllocator):
    """SGLang's paged slot allocator, whose free pages are known by owner.

    `physical_size` is the number of token rows of this rank's device pool; `size` becomes the number of logical
    slots that all ranks provide together. Logical pages below the lane count are SGLang's padding page on each
    rank and are never handed out.

    Raises `LayoutConfigError` if `physical_size` holds no whole page.
    """

    def __init__(
        self,
        *,
        layout: AnyKVLayoutStrategy,
        physical_size: int,
        dtype: torch.dtype,
        device: str,
        kvcache: KVCache,
        need_sort: bool = False,
    ) -> None:
        page_size = layout.page_size
        rows = page_rows(layout)
        check_range("physical_size", physical_size, rows)
        rank_rows = physical_size // rows * rows
        super().__init__(layout.logical_tokens(rank_rows), page_size, dtype, device, kvcache, need_sort)
        self.layout = layout
        self.physical_size = physical_size
        self.num_pages = self.size // page_size
        self.clear()

    @property
    def lane_count(self) -> int:
        """Number of owners of the layout."""
        return self.layout.lane_count

    # By lane: what the tree and the controller use.

    def room_pages(self) -> PageArray:
        """Free pages of each lane."""
        return np.array(self._pages.room(), dtype=np.int64)

    def alloc_lanes(self, lanes: LaneArray) -> PageArray | None:
        """See `SlotAllocator.alloc_lanes`."""
        return self._pages.take(lanes)

    def free_slot_pages(self, slot_pages: PageArray) -> None:
        """Give pages back. `LayoutInvariantError`, with nothing freed, if one is not in use or given twice."""
        if len(slot_pages):
            self._pages.give(slot_pages)

    def slots(self, slot_pages: PageArray) -> torch.Tensor:
        """Slots of `slot_pages`: int64, shape ``[pages * page_size]``, on the pool's device."""
        return tokens_of_pages(slot_pages, self.page_size).to(self.device, non_blocking=True)

    # SGLang's interface.

    @override
    def clear(self) -> None:
        """Everything is free again."""
        self._pages = free_slot_pages_of(self.layout, self.num_pages)
        self.free_group = None

    @override
    def available_size(self) -> int:
        """Free slots over all lanes. A given demand may still find one lane short: see `alloc_lanes`."""
        return sum(self._pages.room()) * self.page_size

    @override
    def get_all_free_pages(self) -> torch.Tensor:
        """Free logical pages of all lanes: int64, CPU, shape ``[free pages]``."""
        return torch.from_numpy(self._pages.all_free())

    @override
    def merge_and_sort_free(self) -> None:
        """Lanes join what was returned at once; nothing to do."""

    @override
    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Slots from the lanes with most room, for callers without a chain of their own.

        int64, shape ``[need_size]``, on the pool's device, or None with nothing taken. Raises `LayoutConfigError` if
        `need_size` is no whole number of pages.
        """
        pages = whole_pages(need_size, self.page_size, "need_size")
        pages_or_none = self._alloc_chain_pages(self._fullest_lanes(pages))
        return None if pages_or_none is None else self.slots(pages_or_none)

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
        rotation_bases: Sequence[int | None] | None = None,
    ) -> torch.Tensor | None:
        """Slots for the tokens that each request of a batch adds to its prefix, one after the other.

        A request first fills the page of `last_loc`, its last slot so far, then takes new pages in the lanes
        that follow. `rotation_bases` are the lanes of the chains' first pages; None stands for the lane of
        `last_loc`, or, without a prefix, the lane with most room. Returns int64 slots, shape
        ``[extend_num_tokens]``, on the pool's device, or None with nothing taken if a lane is short.
        Raises `LayoutConfigError`, with nothing taken, if `extend_num_tokens` is not what the lengths add up to.
        """
        firsts = [int(n) for n in prefix_lens_cpu]
        ends = [int(n) for n in seq_lens_cpu]
        if sum(ends) - sum(firsts) != extend_num_tokens:
            raise LayoutConfigError(f"extend_num_tokens must be {sum(ends) - sum(firsts)}, got {extend_num_tokens}")
        lanes = self._demand(firsts, ends, last_loc, rotation_bases)
        pages = self._alloc_chain_pages(np.concatenate([np.empty(0, dtype=np.int16), *lanes]))
        if pages is None:
            return None
        begun = [min(-first % self.page_size, end - first) for first, end in zip(firsts, ends, strict=True)]
        parts, taken = [NO_PAGES], 0
        for first, end, begun_tokens, own in zip(firsts, ends, begun, lanes, strict=True):
            fresh = tokens_of_pages(pages[taken : taken + len(own)], self.page_size).numpy()
            parts += [np.arange(1, begun_tokens + 1, dtype=np.int64), fresh[: end - first - begun_tokens]]
            taken += len(own)
        slots = torch.from_numpy(np.concatenate(parts)).to(self.device, non_blocking=True)
        return self._after_last_slots(slots, last_loc, ends, firsts, begun)

    def _demand(
        self,
        firsts: list[int],
        ends: list[int],
        last_loc: torch.Tensor,
        rotation_bases: Sequence[int | None] | None,
    ) -> list[LaneArray]:
        """Lanes of the new pages of each request. Looks at the device only for a request whose base is unknown."""
        bases = list(rotation_bases) if rotation_bases is not None else [None] * len(firsts)
        spans = [
            (ceil_div(first, self.page_size), ceil_div(end, self.page_size))
            for first, end in zip(firsts, ends, strict=True)
        ]
        unknown = any(
            base is None and first_page and end_page > first_page
            for base, (first_page, end_page) in zip(bases, spans, strict=True)
        )
        last_slots = last_loc.tolist() if unknown else [-1] * len(firsts)
        return [
            self._chain_lanes(base, last, first_page, end_page)
            for base, last, (first_page, end_page) in zip(bases, last_slots, spans, strict=True)
        ]

    def _after_last_slots(
        self, slots: torch.Tensor, last_loc: torch.Tensor, ends: list[int], firsts: list[int], begun: list[int]
    ) -> torch.Tensor:
        """Turn the first ``begun[i]`` slots of request i, so far 1, 2, ..., into those that follow its last one."""
        if not any(begun):
            return slots
        counts = np.array(ends, dtype=np.int64) - np.array(firsts, dtype=np.int64)
        starts = np.cumsum(counts) - counts
        at = np.concatenate([start + np.arange(tokens) for start, tokens in zip(starts, begun, strict=True)])
        requests = np.repeat(np.arange(len(begun)), begun)
        where = torch.from_numpy(np.stack([at, requests])).to(self.device, non_blocking=True)
        slots.index_add_(0, where[0], last_loc.to(torch.int64)[where[1]])
        return slots

    def _alloc_chain_pages(self, lanes: LaneArray) -> PageArray | None:
        """Pages for requests, in the lanes that their chains should have, or None with nothing taken."""
        return self.alloc_lanes(lanes)

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """One more slot for each request, shape ``[requests]``; `seq_lens` count the new token."""
        return self.alloc_extend(seq_lens - 1, seq_lens_cpu - 1, seq_lens, seq_lens_cpu, last_loc, len(seq_lens_cpu))

    @override
    def free(self, free_index: torch.Tensor) -> None:
        """Free the pages that any of `free_index`, slots of shape ``[tokens]``, lies in; waits for their device."""
        if self.free_group is not None:
            self.free_group.append(free_index.clone())
        elif free_index.numel():
            self.free_slot_pages(self._pages_of(free_index))

    def _pages_of(self, slots: torch.Tensor) -> PageArray:
        """Each page that any of `slots` lies in, once. Waits for the device."""
        return np.unique(slots.cpu().numpy().astype(np.int64, copy=False) // self.page_size)

    def _fullest_lanes(self, pages: int) -> LaneArray:
        """Lanes for `pages` pages of no chain, dealt in turn from the lane with most room."""
        start = int(np.argmax(self.room_pages()))
        return self.layout.extend_lanes(start, 0, pages)

    def _chain_lanes(self, base: int | None, last_slot: int, first_page: int, end_page: int) -> LaneArray:
        if base is not None:
            return self.layout.extend_lanes(base, first_page, end_page - first_page)
        if first_page == 0:
            return self._fullest_lanes(end_page)
        last_page = np.array([last_slot // self.page_size], dtype=np.int64)
        return self.layout.extend_lanes(int(self.layout.lanes_of(last_page)[0]), 1, end_page - first_page)


CPSharedPagedTokenToKVPoolAllocator = LaneSlotAllocator
"""The name in the first design, from before it served strategies with one lane too."""


class StockSlotAllocator:
    """SGLang's own allocator, which has one lane, behind the `SlotAllocator` interface."""

    lane_count = 1

    def __init__(self, allocator: BaseTokenToKVPoolAllocator) -> None:
        self._allocator = allocator

    def room_pages(self) -> PageArray:
        """Free pages of the one lane."""
        return np.array([self._allocator.available_size() // self._allocator.page_size], dtype=np.int64)

    def alloc_lanes(self, lanes: LaneArray) -> PageArray | None:
        """`len(lanes)` pages, or None."""
        slots = self._allocator.alloc(len(lanes) * self._allocator.page_size)
        return None if slots is None else pages_of_tokens(slots, self._allocator.page_size)

    def free_slot_pages(self, slot_pages: PageArray) -> None:
        """Give pages back."""
        if len(slot_pages):
            self._allocator.free_segment(self.slots(slot_pages), start_pos=0)

    def slots(self, slot_pages: PageArray) -> torch.Tensor:
        """Slots of `slot_pages`: int64, shape ``[pages * page_size]``, on the pool's device."""
        return tokens_of_pages(slot_pages, self._allocator.page_size).to(self._allocator.device, non_blocking=True)


def slot_allocator(allocator: BaseTokenToKVPoolAllocator) -> SlotAllocator:
    """`allocator` if it has lanes, else SGLang's own one behind the same interface."""
    if isinstance(allocator, LaneSlotAllocator):
        return allocator
    return StockSlotAllocator(allocator)
