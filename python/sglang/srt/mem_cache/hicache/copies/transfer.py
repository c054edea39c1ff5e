"""Performs copy plans on SGLang's host pools.

Runs become row indices once, and the same indices serve every pool that shares the KV pool's pages: the DSA
index moves with its KV rows::

    CopyPlan --> host rows, device rows --> [ KV pool, index pool ] --> one pair of events

SGLang's transfer engine owns the streams. It issues the copies too, unless there is a page copier for the device,
which moves the runs themselves: see `cuda.page_copier`. An empty plan issues none but still records every event, so a
rank that owns nothing completes like the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

from sglang.srt.mem_cache.l2_transfer import L2Transfer, L2TransferEngine
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host import HostPoolGroup, PoolEntry

from sglang.srt.mem_cache.layouts.errors import LayoutConfigError
from sglang.srt.mem_cache.layouts.pages import tokens_of_pages

from ..device.kinds import layers_differ
from ..seam.sglang import submit_load
from ..settings import check_io_backend, check_mem_layout

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from sglang.srt.managers.cache_controller import LayerLoadingEvent
    from sglang.srt.mem_cache.l2_transfer import TransferCompletion
    from sglang.srt.mem_cache.memory_pool import KVCache
    from sglang.srt.mem_cache.pool_host import HostKVCache

    from sglang.srt.mem_cache.layouts.plans import CopyPlan

    from ..host.pools import AnyHostPool


class Transfer(Protocol):
    """Performs copy plans in both directions; what the controller needs of it."""

    engine: L2TransferEngine

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token moves, all layers and all pools."""
        ...

    def back_up(self, copies: CopyPlan) -> TransferCompletion:
        """Submit device to host. Returns at once; the events tell when the copy runs and ends."""
        ...

    def load(self, copies: CopyPlan, producer: LayerLoadingEvent) -> TransferCompletion:
        """Submit host to device, layer by layer; `producer` records an event after each layer."""
        ...


class PageCopier(Protocol):
    """Moves the runs of a plan on the engine's streams; what a device offers in place of SGLang's token-wise copies."""

    def back_up(self, copies: CopyPlan, engine: L2TransferEngine) -> TransferCompletion:
        """See `Transfer.back_up`."""
        ...

    def load(self, copies: CopyPlan, engine: L2TransferEngine, producer: LayerLoadingEvent) -> TransferCompletion:
        """See `Transfer.load`."""
        ...


class HostTransfer:
    """Copies between one rank's device pool and its host pools.

    `copier` replaces the page copier that the device and `io_backend` call for; False means SGLang's engine.

    Raises `LayoutConfigError` if `io_backend` cannot address the host pool's memory layout, or not for some layers.
    """

    def __init__(
        self,
        *,
        host_pool: AnyHostPool,
        device_pool: KVCache,
        io_backend: str,
        copier: PageCopier | Literal[False] | None = None,
    ) -> None:
        uneven = isinstance(device_pool, MHATokenToKVPool) and device_pool.head_dim != device_pool.v_head_dim
        is_mla = isinstance(device_pool, MLATokenToKVPool)
        check_io_backend(io_backend)
        self._pairs: list[tuple[PoolEntry, int]] = [
            (entry, entry.host_pool.size_per_token) for entry in _entries(host_pool, device_pool)
        ]
        self._index_device = device_pool.device if io_backend == "kernel" else "cpu"
        self._layers = device_pool.layer_num
        self.engine = L2TransferEngine(io_backend)
        self._copier = self._own_copier(device_pool, io_backend) if copier is None else copier or None
        if self._copier is None:  # ours has orders of its own, and is there for these only
            check_mem_layout(io_backend, host_pool.layout, is_mla=is_mla, uneven_heads=uneven)
            if layers_differ(device_pool) and host_pool.layout != "layer_first":
                raise LayoutConfigError(
                    f"--hicache-mem-layout {host_pool.layout} does not go with --enable-dsa-cache-layer-split here: "
                    "SGLang copies the layers of one rank by no other than layer_first"
                )

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token moves, all layers and all pools."""
        return sum(size for _, size in self._pairs)

    @property
    def entries(self) -> list[PoolEntry]:
        """The pools that move together: the KV pool and its sidecars."""
        return [entry for entry, _ in self._pairs]

    def back_up(self, copies: CopyPlan) -> TransferCompletion:
        """Submit device to host. Returns at once; the events tell when the copy runs and ends."""
        if self._copier is not None:
            return self._copier.back_up(copies, self.engine)
        return self.engine.submit_device_to_host(self._transfers(copies, to_host=True))

    def load(self, copies: CopyPlan, producer: LayerLoadingEvent) -> TransferCompletion:
        """Submit host to device, layer by layer; `producer` records an event after each layer."""
        if self._copier is not None:
            return self._copier.load(copies, self.engine, producer)
        return submit_load(
            self.engine,
            self._transfers(copies, to_host=False),
            layers=self._layers,
            start_event=producer.start_event,
            on_layer_done=producer.complete,
        )

    def _own_copier(self, device_pool: KVCache, io_backend: str) -> PageCopier | None:
        if not str(device_pool.device).startswith("cuda"):
            return None
        from .cuda.page_copier import page_copier  # Triton is imported where there is a device for it

        return page_copier(
            self.entries,
            page_size=device_pool.page_size,
            device=str(device_pool.device),
            io_backend=io_backend,
        )

    def _transfers(self, copies: CopyPlan, *, to_host: bool) -> list[L2Transfer]:
        if not len(copies.lengths):
            return []
        host_rows = tokens_of_pages(copies.host_pages(), copies.page_size)
        moved_host_rows = self._indices(host_rows)
        device_rows = self._indices(tokens_of_pages(copies.device_pages(), copies.page_size))
        return [
            L2Transfer(
                host_pool=entry.host_pool,
                device_pool=entry.device_pool,
                host_indices=host_rows if to_host and _writes_from_the_host(entry.host_pool) else moved_host_rows,
                device_indices=device_rows,
                layer_mapper=entry.layer_mapper,
            )
            for entry, _ in self._pairs
        ]

    def _indices(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.to(self._index_device, non_blocking=True)


def _writes_from_the_host(pool: HostKVCache) -> bool:
    """Whether backups end in copies that the host lays out: SGLang's staged write-back, on CUDA."""
    return pool.layout == "page_first" and pool.can_use_write_back_jit


def _entries(host_pool: AnyHostPool, device_pool: KVCache) -> list[PoolEntry]:
    if isinstance(host_pool, HostPoolGroup):
        return host_pool.entries
    every_layer: Callable[[int], int | None] = lambda layer: layer  # noqa: E731
    from sglang.srt.mem_cache.hicache_storage import PoolName

    return [PoolEntry(name=PoolName.KV, host_pool=host_pool, device_pool=device_pool, layer_mapper=every_layer)]
