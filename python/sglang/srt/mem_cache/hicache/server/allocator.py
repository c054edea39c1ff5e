"""The slot allocator of a server: evicts when a lane is short, and never fails while any lane has room.

SGLang admits a request if the free and the evictable slots *together* are enough, and treats a failed allocation
after that as fatal. A chain's pages should rotate over the lanes, but nothing depends on it: any page may lie in any
lane. So a request's pages are allocated in three steps, the same on every rank:

1. in the lanes that the chain should have;
2. after evicting until those lanes have room, if evicting can make it;
3. wherever there is room, fullest lane first. Balance suffers, the request does not.

Only a load-back needs particular lanes, because its host pages lie on particular ranks; without room it is
recomputed, as in SGLang.

Slots that SGLang gives back are looked up in `RequestPages`, in host memory, instead of being read from the device.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from ..slots.allocator import LaneSlotAllocator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from sglang.srt.mem_cache.layouts.pages import LaneArray, PageArray

    from ..requests.pages import RequestPages


class ServingSlotAllocator(LaneSlotAllocator):
    """`LaneSlotAllocator` with a cache behind it and chain bases from the requests' tokens."""

    request_pages: RequestPages | None = None  # of the cache behind it
    _make_room: Callable[[LaneArray], None] | None = None
    _bases: Sequence[int] | None = None
    _allocated: list[PageArray] | None = None
    off_lane_pages = 0

    def serve(self, make_room: Callable[[LaneArray], None], request_pages: RequestPages | None) -> None:
        """Serve the cache that was built over this allocator. SGLang makes allocators first.

        `make_room` evicts until the lanes given have room, or does nothing if it cannot be made; `request_pages` is
        told what requests are given.
        """
        self._make_room = make_room
        self.request_pages = request_pages

    @contextmanager
    def chain_bases(self, bases: Sequence[int]) -> Iterator[list[PageArray]]:
        """Within the block `alloc_extend` and `alloc_decode` use these lanes of the chains' first pages.

        The list fills with the pages that requests are given in it, in order.
        """
        allocated: list[PageArray] = []
        self._bases, self._allocated = bases, allocated
        try:
            yield allocated
        finally:
            self._bases = self._allocated = None

    @override
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
        """See `LaneSlotAllocator.alloc_extend`; None only if all lanes together are short."""
        return super().alloc_extend(
            prefix_lens,
            prefix_lens_cpu,
            seq_lens,
            seq_lens_cpu,
            last_loc,
            extend_num_tokens,
            num_new_pages,
            self._bases if rotation_bases is None else rotation_bases,
        )

    @override
    def _alloc_chain_pages(self, lanes: LaneArray) -> PageArray | None:
        pages = self.alloc_lanes(lanes)
        if pages is None and self._make_room is not None:
            self._make_room(lanes)
            pages = self.alloc_lanes(lanes)
        if pages is None:
            pages = self._alloc_anywhere(lanes)
        if pages is not None and self._allocated is not None:
            self._allocated.append(pages)
        return pages

    def _alloc_anywhere(self, lanes: LaneArray) -> PageArray | None:
        """As many pages, keeping the lanes asked for where they have room; None if all lanes together are short."""
        room = self.room_pages()
        if len(lanes) > int(room.sum()):
            return None
        dealt = lanes.copy()
        homeless: list[int] = []
        for position, lane in enumerate(lanes.tolist()):
            if room[lane]:
                room[lane] -= 1
            else:
                homeless.append(position)
        for position in homeless:
            lane = int(np.argmax(room))
            dealt[position] = lane
            room[lane] -= 1
        self.off_lane_pages += len(homeless)
        return self.alloc_lanes(dealt)

    @override
    def free(self, free_index: torch.Tensor) -> None:
        """Free the pages that any of `free_index`, slots of shape ``[tokens]``, lies in.

        At once if it is a part of a request's row, without asking the device; else as
        `LaneSlotAllocator.free`, which is counted.
        """
        requests = self.request_pages
        if requests is None:
            super().free(free_index)
        elif free_index.numel():
            pages = requests.take(free_index)
            if pages is None:
                super().free(free_index)
            else:
                self.free_slot_pages(pages)

    @override
    def _pages_of(self, slots: torch.Tensor) -> PageArray:
        pages = super()._pages_of(slots)
        if self.request_pages is not None:
            self.request_pages.count_read("page numbers of slots that were freed")
            self.request_pages.forget(pages)
        return pages
