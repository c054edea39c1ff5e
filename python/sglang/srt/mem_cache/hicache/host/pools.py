"""SGLang's own host pools for a device pool, as its HiCache builds them.

A DSA model has two host pools that share one set of host rows: the KV pool, which hands out the rows (the *anchor*),
and the index pool (a *sidecar*), which only follows::

    HostPoolGroup.alloc / free ──> anchor  MLATokenToKVPoolHost   rows r, r + 1, ...
                                   sidecar DSAIndexerPoolHost     page r // page_size
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, KVCache, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host import HostKVCache, HostPoolGroup, PoolEntry, base
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost

from sglang.srt.mem_cache.layouts import LayoutConfigError, PoolKind

from ..device.geometry import index_key_bytes
from ..device.kinds import pool_kind
from ..device.pools import kv_buffers
from ..seam.records import HostPoolSize
from ..seam.sglang import index_host_pool, mha_host_pool, mla_host_pool, release_host_memory
from .memory import refuse_too_large
from .sizes import check_gb, check_ratio, host_pages, host_pool_bytes, size_flag

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    from .memory import HostBudget

AnyHostPool: TypeAlias = HostKVCache | HostPoolGroup


def build_host_pool(
    device_pool: KVCache,
    *,
    ratio: float = 2.0,
    size_gb: float = 0,
    page_size: int,
    mem_layout: str,
    ranks_on_machine: int = 1,
    budget: HostBudget | None = None,
    allocator_type: str = "default",
) -> AnyHostPool:
    """The host pool of one rank: `size_gb` x 10^9 bytes of KV if positive, else `ratio` x the device pool's slots.

    SGLang rounds down to whole pages and adds one. `mem_layout` is a value of ``--hicache-mem-layout``. The memory is
    pinned wherever SGLang pins it; it is not initialised. On a CPU call `cpu.support.install_cpu_support` first.

    Raises `LayoutConfigError`, before anything is allocated, for a pool that HiCache does not serve, a page size that
    is not the pool's, sizes that leave no page, or more than the machine has for `ranks_on_machine` such pools,
    sidecars included; where `budget` made `ratio`, more than that. SGLang's `ValueError` for an unknown layout. If the
    DSA sidecar fails, the anchor is freed.
    """
    kind = pool_kind(device_pool)
    if page_size != device_pool.page_size:
        raise LayoutConfigError(f"page_size must be the device pool's {device_pool.page_size}, got {page_size}")
    _refuse_sizes(device_pool, ratio, size_gb, ranks_on_machine, budget)
    size = HostPoolSize(
        ratio=ratio, gigabytes=size_gb, page_size=page_size, mem_layout=mem_layout, allocator_type=allocator_type
    )
    if kind is PoolKind.DSA and isinstance(device_pool, DSATokenToKVPool):
        return _with_index_sidecar(device_pool, mla_host_pool(device_pool, size), allocator_type)
    if kind is PoolKind.MLA and isinstance(device_pool, MLATokenToKVPool):
        return mla_host_pool(device_pool, size)
    if kind is PoolKind.MHA and isinstance(device_pool, MHATokenToKVPool):
        return mha_host_pool(device_pool, size)
    raise LayoutConfigError(
        f"HiCache with a KV layout strategy does not support the KV pool {type(device_pool).__name__}; "
        "accepted pools: DSA, MLA, MHA"
    )


def _refuse_sizes(
    device_pool: KVCache, ratio: float, size_gb: float, ranks_on_machine: int, budget: HostBudget | None
) -> None:
    """What only a rank can judge, since it alone knows the size of its device pool. Raises `LayoutConfigError`."""
    check_ratio("--hicache-ratio", ratio)
    check_gb("--hicache-size", size_gb)
    rows = [buffer[:1].nbytes for buffer in kv_buffers(device_pool)]
    kv_bytes = sum(rows)
    index_bytes = 0
    if isinstance(device_pool, DSATokenToKVPool):  # a host index has a row for each layer that has KV here
        index_bytes = index_key_bytes(device_pool.index_head_dim) * sum(row > 0 for row in rows)
    pages = host_pages(
        ratio=ratio,
        gigabytes=size_gb,
        device_tokens=device_pool.size,
        page_size=device_pool.page_size,
        kv_slot_bytes=kv_bytes,
        asked=None if budget is None else budget.flag,
    )
    refuse_too_large(
        budget.flag if budget else size_flag(ratio, size_gb),
        rank_bytes=host_pool_bytes(
            pages=pages,
            page_size=device_pool.page_size,
            kv_slot_bytes=kv_bytes,
            index_slot_bytes=index_bytes,
        ),
        ranks=ranks_on_machine,
        reserve_bytes=base.HICACHE_HOST_MEMORY_RESERVE_BYTES,
        parts="KV and index" if index_bytes else "KV",
        budget=budget,
    )


def host_bytes_of(host_pool: AnyHostPool) -> int:
    """Host bytes that the pool's buffers take, sidecars and SGLang's extra page included."""
    return sum(_buffer_bytes(pool) for pool in _pools(host_pool))


def release_host_pool(host_pool: AnyHostPool) -> None:
    """Unregister all pinned host memory of the pool; it is unusable afterwards. May be called again."""
    for pool in _pools(host_pool):
        release_host_memory(pool)


def _pools(host_pool: AnyHostPool) -> list[HostKVCache]:
    return [entry.host_pool for entry in host_pool.entries] if isinstance(host_pool, HostPoolGroup) else [host_pool]


def _buffer_bytes(host_pool: HostKVCache) -> int:
    if isinstance(host_pool, DSAIndexerPoolHost):
        return host_pool.index_k_with_scale_buffer.nbytes
    buffers = host_pool.kv_buffer
    # Pools whose keys and values differ in width keep two buffers, all others one.
    return sum(buffer.nbytes for buffer in buffers) if isinstance(buffers, tuple) else buffers.nbytes


def _with_index_sidecar(
    device_pool: DSATokenToKVPool, anchor: MLATokenToKVPoolHost, allocator_type: str
) -> HostPoolGroup:
    try:
        sidecar = index_host_pool(device_pool, anchor, allocator_type=allocator_type)
    except Exception:
        anchor.destroy()
        raise
    own_layers = _own_layers(device_pool.layer_num)
    return HostPoolGroup(
        [
            PoolEntry(
                name=PoolName.KV,
                host_pool=anchor,
                device_pool=device_pool,
                layer_mapper=own_layers,
                is_primary_index_anchor=True,
            ),
            PoolEntry(name=PoolName.INDEXER, host_pool=sidecar, device_pool=device_pool, layer_mapper=own_layers),
        ]
    )


def _own_layers(layers: int) -> Callable[[int], int | None]:
    """Layer n of a transfer is layer n of the pool; transfers over more layers have nothing to copy in the others."""
    return lambda layer: layer if 0 <= layer < layers else None
