"""One rank's real cache on the CPU, and KV bytes that tell where they belong.

A test names pages by small integers: ``chain(spec, 1, 2, 3)`` are the tokens of three pages. The bytes of a page are
a hash of all tokens up to its end, of the buffer (layer, K or V, index) and of the position in the page, so a stale,
misplaced or missing row shows. Owner and row are computed here anew, apart from the code under test.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.l2_transfer import L2TransferEngine, TransferCompletion
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.test.test_utils import CustomTestCase
from typing_extensions import override

from sglang.srt.mem_cache.hicache.assemble import assemble_cache
from sglang.srt.mem_cache.hicache.cpu.support import install_cpu_support
from sglang.srt.mem_cache.hicache.device.pools import (
    DsaGeometry,
    Geometry,
    MhaGeometry,
    MlaGeometry,
    build_device_pool,
    index_buffers,
    kv_buffers,
)
from sglang.srt.mem_cache.hicache.runtime import standalone_runtime
from sglang.srt.mem_cache.hicache.seam.features import SINCE_0_5_23
from sglang.srt.mem_cache.hicache.settings import HiCacheSettings, ShardGroup
from sglang.srt.mem_cache.hicache.slots.allocator import LaneSlotAllocator
from sglang.srt.mem_cache.layouts import AnyKVLayoutStrategy, GroupKind, LayoutConfig, PoolKind, create_layout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt
    import torch.distributed as dist
    from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
    from sglang.srt.mem_cache.l2_transfer import L2Transfer
    from sglang.srt.mem_cache.memory_pool import KVCache

    from sglang.srt.mem_cache.hicache.accepted import WritePolicy
    from sglang.srt.mem_cache.hicache.agreement import Agreement
    from sglang.srt.mem_cache.hicache.radix_cache import HiRadixCache
    from sglang.srt.mem_cache.hicache.tree.node import LayoutTreeNode
    from sglang.srt.mem_cache.layouts.pages import PageArray

LAYERS = 2
GEOMETRIES: dict[PoolKind, Geometry] = {
    PoolKind.MHA: MhaGeometry(heads=1, head_dim=4, dtype=torch.bfloat16),
    PoolKind.MLA: MlaGeometry(kv_lora_rank=4, qk_rope_head_dim=2, dtype=torch.bfloat16),
    PoolKind.DSA: DsaGeometry(kv_lora_rank=4, qk_rope_head_dim=2),
}


class CacheTestCase(CustomTestCase):
    """Publishes SGLang's process-wide settings for the tests of a class."""

    @classmethod
    @override
    def setUpClass(cls) -> None:
        super().setUpClass()
        install_cpu_support()
        cls.enterClassContext(standalone_runtime(page_size=4))


def pooled_keys_page_size(index_kpool: int) -> int:
    """The page of a DSA pool that has one index key for so many tokens: of its keys, or of its tokens, it has 64."""
    return 64 * index_kpool if SINCE_0_5_23 else 64


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """What a test chooses. Pages are per rank; the host has `host_pages` in all, SGLang's extra page included."""

    layout: str = "cp_shared"
    ranks: int = 3
    pool: PoolKind = PoolKind.MLA
    mem_layout: str = "layer_first"
    policy: WritePolicy = "write_through"
    eviction: str = "lru"
    device_pages: int = 8
    host_pages: int = 16
    load_back_pages: int = 1
    events: bool = False
    eagle: bool = False

    @property
    def page_size(self) -> int:
        """SGLang's DSA pool accepts no other than 64."""
        return 64 if self.pool is PoolKind.DSA else 4

    @property
    def lanes(self) -> int:
        """Owners: the ranks where pages are dealt out, else one."""
        return self.ranks if self.layout == "cp_shared" else 1


def chain(spec: CacheSpec, *pages: int) -> array[int]:
    """Tokens of the pages called `pages`, in order."""
    return array("q", [page * 1_000 + at for page in pages for at in range(spec.page_size)])


def make_layout(spec: CacheSpec, rank: int) -> AnyKVLayoutStrategy:
    """The strategy of one rank."""
    return create_layout(
        LayoutConfig(name=spec.layout, page_size=spec.page_size, shard_size=spec.ranks, shard_rank=rank)
    )


def make_allocator(spec: CacheSpec, layout: AnyKVLayoutStrategy, device_pool: KVCache) -> LaneSlotAllocator:
    """The laned slot allocator of one rank."""
    return LaneSlotAllocator(
        layout=layout,
        physical_size=spec.device_pages * spec.page_size,
        dtype=torch.bfloat16,
        device="cpu",
        kvcache=device_pool,
    )


def make_params(spec: CacheSpec, allocator: BaseTokenToKVPoolAllocator, **changes: Any) -> CacheInitParams:  # noqa: ANN401  # fields of SGLang's
    """SGLang's construction parameters around `allocator`."""
    fields: dict[str, Any] = {
        "disable": False,
        "req_to_token_pool": None,
        "token_to_kv_pool_allocator": allocator,
        "page_size": spec.page_size,
        "eviction_policy": spec.eviction,
        "enable_kv_cache_events": spec.events,
        "is_eagle": spec.eagle,
        **changes,
    }
    return CacheInitParams(**fields)


def make_settings(spec: CacheSpec, **changes: Any) -> HiCacheSettings:  # noqa: ANN401  # fields of HiCacheSettings
    """HiCache's flags. SGLang rounds the host pool down to whole pages and adds one."""
    fields: dict[str, Any] = {
        "write_policy": spec.policy,
        "mem_layout": spec.mem_layout,
        "host_ratio": (spec.host_pages - 0.5) / spec.device_pages,
        "load_back_threshold": spec.load_back_pages * spec.page_size,
        **changes,
    }
    return HiCacheSettings(**fields)


def make_group(spec: CacheSpec, rank: int) -> ShardGroup:
    """The rank's place among its peers."""
    return ShardGroup(kind=GroupKind.ATTENTION_CP, size=spec.ranks, rank=rank)


def make_device_pool(spec: CacheSpec) -> KVCache:
    """SGLang's device pool of one rank."""
    return build_device_pool(
        spec.pool,
        tokens=spec.device_pages * spec.page_size,
        page_size=spec.page_size,
        layers=LAYERS,
        geometry=GEOMETRIES[spec.pool],
    )


class Rank:
    """One rank's cache, with its pools, and ways to write and to check KV as a forward pass would.

    Without `agreement` the cache makes its own, over `tp_group`.
    """

    def __init__(
        self,
        spec: CacheSpec,
        number: int,
        agreement: Agreement | None,
        *,
        tp_group: dist.ProcessGroup | None = None,
        device_pool: KVCache | None = None,
        **settings: Any,  # noqa: ANN401  # fields of HiCacheSettings
    ) -> None:
        self.spec = spec
        self.number = number
        self.device_pool = make_device_pool(spec) if device_pool is None else device_pool
        self.layout = make_layout(spec, number)
        self.allocator = make_allocator(spec, self.layout, self.device_pool)
        self.request_rows = ReqToTokenPool(size=1, max_context_len=64, device="cpu", enable_memory_saver=False)
        self.cache: HiRadixCache[Any] = assemble_cache(
            make_params(spec, self.allocator, req_to_token_pool=self.request_rows, tp_cache_group=tp_group),
            layout=self.layout,
            settings=make_settings(spec, **settings),
            group=make_group(spec, number),
            agreement=agreement,
        )
        self.controller = self.cache.cache_controller
        self.accounting = self.cache.parts.accounting
        self.engine = SlowEngine()
        self.controller.transfer.engine = self.engine

    def take(self, tokens: int) -> torch.Tensor:
        """So many slots, which there must be."""
        slots = self.allocator.alloc(tokens)
        assert slots is not None, f"no room for {tokens} tokens"
        return slots

    def key(self, tokens: Sequence[int], namespace: str | None = None) -> RadixKey:
        """A fresh key: SGLang's keys are consumed by the call that they are passed to."""
        return RadixKey(array("q", tokens), namespace)

    def rows(self, slot_pages: PageArray) -> Iterator[tuple[int, int]]:
        """``(position in slot_pages, row page)`` of the pages that this rank stores."""
        for position, page in enumerate(slot_pages.tolist()):
            if page % self.spec.lanes == (self.number if self.spec.lanes > 1 else 0):
                yield position, page // self.spec.lanes

    def write(self, tokens: Sequence[int], slot_pages: PageArray, *, first_page: int = 0) -> None:
        """Store the KV of pages ``first_page ..`` of the chain `tokens` where this rank owns them."""
        prefixes = page_prefixes(tokens, self.spec.page_size)[first_page:]
        for position, row in self.rows(slot_pages):
            for number, pages in enumerate(page_views(self.device_pool)):
                pages[row] = page_bytes(prefixes[position], number, pages.shape[1])

    def mismatches(self, tokens: Sequence[int], slot_pages: PageArray, *, first_page: int = 0) -> int:
        """Pages of this rank whose bytes, KV and index of every layer, are not those of the chain."""
        prefixes = page_prefixes(tokens, self.spec.page_size)[first_page:]
        views = page_views(self.device_pool)
        return sum(
            any(
                not np.array_equal(pages[row], page_bytes(prefixes[position], number, pages.shape[1]))
                for number, pages in enumerate(views)
            )
            for position, row in self.rows(slot_pages)
        )

    def scribble(self) -> None:
        """Overwrite the whole device pool, as other requests would."""
        for pages in page_views(self.device_pool):
            pages[:] = 0xA5

    def host_free_pages(self) -> int:
        """Free pages of this rank's host pool, as SGLang counts them."""
        return int(self.cache.token_to_kv_pool_host.available_size()) // self.spec.page_size

    def nodes(self) -> list[LayoutTreeNode[Any]]:
        """Every node but the root."""
        return list(self.cache.nodes())


def page_prefixes(tokens: Sequence[int], page_size: int) -> list[bytes]:
    """For each page, a hash of all tokens up to its end."""
    running = hashlib.blake2b(digest_size=16)
    prefixes = []
    for start in range(0, len(tokens), page_size):
        running.update(array("q", tokens[start : start + page_size]).tobytes())
        prefixes.append(running.digest())
    return prefixes


def page_bytes(prefix: bytes, buffer: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """What a page of buffer number `buffer` holds for that prefix."""
    return np.frombuffer(hashlib.shake_128(prefix + bytes([buffer])).digest(nbytes), dtype=np.uint8)


def page_views(pool: KVCache) -> list[npt.NDArray[np.uint8]]:
    """Views ``[row pages, bytes]`` of every KV and index buffer of a device pool that has rows."""
    kv = [
        buffer.view(torch.uint8).view(len(buffer) // pool.page_size, -1) for buffer in kv_buffers(pool) if len(buffer)
    ]
    index = [buffer.view(torch.uint8) for buffer in index_buffers(pool) if len(buffer)]
    return [view.numpy() for view in (*kv, *index)]


class SlowEvent:
    """The finish event of a copy that runs when the test, or a wait for it, says so."""

    def __init__(self, engine: SlowEngine, copy: Callable[[], TransferCompletion]) -> None:
        self._engine = engine
        self._copy: Callable[[], TransferCompletion] | None = copy
        self.visible = False

    def run(self) -> None:
        """Perform the copy if it has not run."""
        copy, self._copy = self._copy, None
        if copy is not None:
            assert copy().finish_event.query()

    def query(self) -> bool:
        """Whether the rank can see that the copy has ended."""
        return self.visible

    def synchronize(self) -> None:
        """Wait, which is counted, for everything submitted up to this copy."""
        if not self.visible:
            self._engine.waits += 1
            self._engine.finish_until(self)


class SlowEngine(L2TransferEngine):
    """SGLang's engine; while `held`, copies run late, in order of submission in each direction, as on a busy GPU."""

    def __init__(self) -> None:
        super().__init__("direct")
        self.held = False
        self.waits = 0
        self.write_events: list[SlowEvent] = []
        self.load_events: list[SlowEvent] = []
        self.writes: list[list[L2Transfer]] = []
        self.loads: list[list[L2Transfer]] = []

    @override
    def submit_device_to_host(self, transfers: list[L2Transfer]) -> TransferCompletion:
        """See `L2TransferEngine`."""
        self.writes.append(transfers)
        submit = super().submit_device_to_host
        return self._submit(self.write_events, lambda: submit(transfers))

    @override
    def submit_host_to_device(
        self,
        transfers: list[L2Transfer],
        **named: Any,  # as the release has them
    ) -> TransferCompletion:
        """See `L2TransferEngine`."""
        self.loads.append(transfers)
        submit = super().submit_host_to_device
        return self._submit(self.load_events, lambda: submit(transfers, **named))

    def finish_writes(self, count: int | None = None) -> None:
        """The next `count` backups, or all, end and are seen to."""
        self._finish(self.write_events, count)

    def finish_loads(self, count: int | None = None) -> None:
        """The next `count` loads, or all, end and are seen to."""
        self._finish(self.load_events, count)

    def run_loads(self) -> None:
        """What a forward pass waits for: all loads have been copied. Their acks need not be seen yet."""
        for event in self.load_events:
            event.run()

    def finish_until(self, event: SlowEvent) -> None:
        """End the copies up to that of `event`."""
        events = self.write_events if event in self.write_events else self.load_events
        self._finish(events, events.index(event) + 1)

    def _submit(self, events: list[SlowEvent], submit: Callable[[], TransferCompletion]) -> TransferCompletion:
        if not self.held and not events:
            return submit()
        event = SlowEvent(self, submit)
        events.append(event)
        return TransferCompletion(event, event, False)

    def _finish(self, events: list[SlowEvent], count: int | None) -> None:
        for event in events[:count]:
            event.run()
            event.visible = True
        del events[:count]
