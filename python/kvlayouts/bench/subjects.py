"""The caches that are compared: ours with each layout, and SGLang's two, over equal pools, and how each is driven.

No bytes are copied. SGLang's caches get its engine without the copies, ours a page copier that copies nothing, as on a
GPU, where plans go to such a copier as they are. Both record the events that an acknowledgement needs. What each side
does before is included, SGLang's sort of its indices for ``direct`` transfers too. All else is real, pools and
allocators as well::

    match -> load back -> lock -> allocate -> insert -> free duplicates -> unlock -> settle acks
"""

from __future__ import annotations

from array import array
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.l2_transfer import L2TransferEngine
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from typing_extensions import override

from kvlayouts.common.trace import default_device_tokens
from kvlayouts.common.values import ceil_div
from sglang.srt.mem_cache.hicache.agreement import RankAgreement
from sglang.srt.mem_cache.hicache.assemble import assemble_cache
from sglang.srt.mem_cache.hicache.copies.exchange import PageExchanger
from sglang.srt.mem_cache.hicache.copies.transfer import HostTransfer
from sglang.srt.mem_cache.hicache.device.pools import MlaGeometry, build_device_pool
from sglang.srt.mem_cache.hicache.runtime import standalone_runtime
from sglang.srt.mem_cache.hicache.seam.sglang import submit_load
from sglang.srt.mem_cache.hicache.settings import HiCacheSettings, ShardGroup
from sglang.srt.mem_cache.hicache.slots.allocator import LaneSlotAllocator
from sglang.srt.mem_cache.hicache.tree.calls import Insertion
from sglang.srt.mem_cache.layouts import GroupKind, LayoutConfig, PoolKind, create_layout
from sglang.srt.mem_cache.layouts.errors import LayoutInvariantError
from sglang.srt.mem_cache.layouts.facts import exchanges_pages, host_lanes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sglang.srt.managers.cache_controller import LayerLoadingEvent
    from sglang.srt.mem_cache.l2_transfer import L2Transfer, TransferCompletion
    from sglang.srt.mem_cache.memory_pool import KVCache
    from sglang.srt.server_args import ServerArgs

    from kvlayouts.common.trace import Trace
    from sglang.srt.mem_cache.hicache.copies.exchange import Round
    from sglang.srt.mem_cache.hicache.radix_cache import HiRadixCache
    from sglang.srt.mem_cache.hicache.tree.node import LayoutTreeNode
    from sglang.srt.mem_cache.layouts import CopyPlan
    from sglang.srt.mem_cache.layouts.pages import PageArray

LAYERS = 2
SMALL_ROWS = MlaGeometry(kv_lora_rank=2, qk_rope_head_dim=2)
"""Rows of 8 bytes: nothing is copied, so their width costs memory only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSizes:
    """Slots of the device, all ranks together, and host slots for each of them. Equal for all subjects."""

    page_size: int = 64
    device_tokens: int = 262_144
    host_ratio: float = 2.0


def sizes_for(trace: Trace, ranks: int) -> PoolSizes:
    """The usual pools, or larger ones where a prompt needs them; as many pages for each of `ranks`."""
    usual = PoolSizes()
    needed = max(usual.device_tokens, default_device_tokens(trace, usual.page_size))
    unit = usual.page_size * ranks
    return replace(usual, device_tokens=ceil_div(needed, unit) * unit)


class Subject(Protocol):
    """A cache under comparison."""

    name: str

    @property
    def cache(self) -> Any:  # noqa: ANN401  # ours or one of SGLang's two
        """The tree."""
        ...

    def serve(self, tokens: array[int]) -> int:
        """All tree operations of one request with these tokens. Returns the prompt tokens found in the cache."""
        ...

    def close(self) -> None:
        """Give host memory back."""
        ...


class NoCopyEngine(L2TransferEngine):
    """SGLang's engine with nothing to copy: streams, events and layer counters only."""

    @override
    def submit_device_to_host(self, transfers: list[L2Transfer]) -> TransferCompletion:
        """Record the events of a backup."""
        return super().submit_device_to_host([])

    @override
    def submit_host_to_device(self, transfers: list[L2Transfer], **call: Any) -> TransferCompletion:
        """Record the events of a load."""
        return super().submit_host_to_device([], **call)


class NoCopier:
    """Takes the place of the page copier that moves our plans on a GPU: events and layer counters, no copy."""

    def back_up(self, copies: CopyPlan, engine: L2TransferEngine) -> TransferCompletion:
        """Record the events of a backup."""
        return engine.submit_device_to_host([])

    def load(self, copies: CopyPlan, engine: L2TransferEngine, producer: LayerLoadingEvent) -> TransferCompletion:
        """Record the events of a load."""
        return submit_load(engine, [], layers=LAYERS, start_event=producer.start_event, on_layer_done=producer.complete)


@dataclass(frozen=True, slots=True)
class Alone:
    """Rank 0 of so many, whose peers never come: for exchanges in which nothing is given."""

    ranks: int
    rank: int = 0

    def gather(self, sent: torch.Tensor, received: torch.Tensor) -> None:
        """See `PeerGather`; nobody looks at what is received."""


class NoExchanger(PageExchanger):
    """Reckons what ranks give each other, and gives nothing: events and layer counters only."""

    @override
    def give_layer(self, layer: int, rounds: Sequence[Round], copied: torch.Event, done: LayerLoadingEvent) -> None:
        """Record the layer's event."""
        done.complete(layer)


class OurSubject:
    """`HiRadixCache` of this package with a layout, seen from rank 0.

    Plans go to a page copier, or, without `page_copies`, become token indices for SGLang's engine, as on a CPU.
    """

    def __init__(self, layout_name: str, ranks: int, sizes: PoolSizes, *, page_copies: bool = True) -> None:
        self.name = layout_name if ranks == 1 else f"{layout_name}, {ranks} ranks"
        self.layout = create_layout(
            LayoutConfig(name=layout_name, page_size=sizes.page_size, shard_size=ranks, shard_rank=0)
        )
        rank_tokens = sizes.device_tokens // self.layout.lane_count
        pool = device_pool(rank_tokens, sizes.page_size)
        self.allocator = LaneSlotAllocator(
            layout=self.layout, physical_size=rank_tokens, dtype=pool.dtype, device="cpu", kvcache=pool
        )
        self.cache: HiRadixCache[Any] = assemble_cache(
            cache_params(self.allocator, sizes.page_size),
            layout=self.layout,
            settings=HiCacheSettings(
                host_ratio=sizes.host_ratio * self.layout.lane_count / host_lanes(self.layout).count
            ),
            group=ShardGroup() if ranks == 1 else ShardGroup(kind=GroupKind.ATTENTION_CP, size=ranks, rank=0),
            agreement=RankAgreement([]),
            peers=Alone(ranks) if exchanges_pages(self.layout) else None,
        )
        self.cache.cache_controller.transfer = HostTransfer(
            host_pool=self.cache.token_to_kv_pool_host,
            device_pool=pool,
            io_backend="direct",
            copier=NoCopier() if page_copies else False,
            exchanger=NoExchanger(pool, Alone(ranks)) if exchanges_pages(self.layout) else None,
        )
        if not page_copies:
            self.cache.cache_controller.transfer.engine = NoCopyEngine("direct")
        self._page_size = sizes.page_size

    def serve(self, tokens: array[int]) -> int:
        """See `Subject.serve`."""
        cache, page_size = self.cache, self._page_size
        key = RadixKey(tokens)
        found = cache.match(RadixKey(tokens, limit=len(tokens) - 1))
        prefix, node = found.slots, found.device_node
        if found.host_tokens:
            loaded, node = cache.bring_back(found.host_node)
            prefix = joined(prefix, loaded)
        cache.ready_to_load_host_cache()
        cache.inc_lock_ref(node)
        cached, whole = len(prefix) // page_size, len(tokens) // page_size
        base = self.layout.chain_base(tokens[:page_size].tobytes(), "")
        fresh = cache.alloc_slots(self.layout.extend_lanes(base, cached, ceil_div(len(tokens), page_size) - cached))
        if fresh is None:
            raise LayoutInvariantError(f"no room for a prompt of {len(tokens)} tokens")
        slots = joined(prefix, self.allocator.slots(fresh))
        pages = np.concatenate([*_pages_above(node), fresh])
        result = cache.put(Insertion(key=key, value=slots[: whole * page_size], slot_pages=pages[:whole]))
        known = result.known_tokens // page_size
        self.allocator.free_slot_pages(pages[cached:known])
        self.allocator.free_slot_pages(pages[whole:])
        cache.dec_lock_ref(node)
        cache.check_hicache_events()
        return len(prefix)

    def insert_leaf(self, tokens: array[int], *, chunked: bool) -> LayoutTreeNode[Any]:
        """Put one page below the root and return its node; with `chunked` it is no hit and so not backed up."""
        pages = self.cache.alloc_slots(self.layout.extend_lanes(0, 0, 1))
        if pages is None:
            raise LayoutInvariantError("no room for a page")
        self.cache.put(
            Insertion(key=RadixKey(tokens), value=self.allocator.slots(pages), slot_pages=pages, is_use=not chunked)
        )
        return next(reversed(self.cache.root_node.children.values()))

    def close(self) -> None:
        """See `Subject.close`."""
        self.cache.release_host_resources()


def joined(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Both in one tensor; no copy where one is empty, since copying here is not the caches' work."""
    return torch.cat([first, second]) if len(first) and len(second) else first if len(first) else second


def leaf_tokens(number: int, page_size: int) -> array[int]:
    """One page of tokens that no other number has."""
    return array("q", [number] * page_size)


def _pages_above(node: LayoutTreeNode[Any]) -> list[PageArray]:
    """The tree's own record of the slot pages from the root to `node`."""
    parts = []
    while node.parent is not None:
        parts.append(node.slot_pages)
        node = node.parent
    return parts[::-1]


@contextmanager
def subjects_runtime(sizes: PoolSizes) -> Iterator[ServerArgs]:
    """SGLang's process-wide settings for caches of these sizes."""
    with standalone_runtime(
        page_size=sizes.page_size,
        hicache_ratio=sizes.host_ratio,
        hicache_size=0,
        hicache_mem_layout="layer_first",
        hicache_write_policy="write_through",
    ) as server_args:
        yield server_args


def device_pool(tokens: int, page_size: int) -> KVCache:
    """Rows of `SMALL_ROWS` for so many slots."""
    return build_device_pool(PoolKind.MLA, tokens=tokens, page_size=page_size, layers=LAYERS, geometry=SMALL_ROWS)


def cache_params(allocator: Any, page_size: int) -> CacheInitParams:  # noqa: ANN401
    """SGLang's construction parameters for a cache without requests."""
    return CacheInitParams(
        disable=False,
        req_to_token_pool=ReqToTokenPool(size=1, max_context_len=1, device="cpu", enable_memory_saver=False),
        token_to_kv_pool_allocator=allocator,
        page_size=page_size,
        tp_cache_group=dist.group.WORLD,
        eviction_policy="lru",
    )
