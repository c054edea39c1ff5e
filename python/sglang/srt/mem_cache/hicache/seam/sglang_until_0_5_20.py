"""SGLang 0.5.20: see `seam.sglang`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from sglang.srt.distributed.communication_tags import P2PTag
from sglang.srt.mem_cache.events import KVCacheEventRecorder
from sglang.srt.mem_cache.pool_host.common import _cuda_host_unregister
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost
from sglang.srt.mem_cache.pool_host.mha import get_mha_host_pool_cls
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from .features import SINCE_0_5_23
from .records import Place

assert not SINCE_0_5_23

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.l2_transfer import L2Transfer, L2TransferEngine, TransferCompletion
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, KVCache, MHATokenToKVPool, MLATokenToKVPool
    from sglang.srt.mem_cache.pool_host import HostKVCache

    from .records import HostPoolSize

PP_SYNC_TAG: Final = P2PTag.HIRADIX_PP_SYNC


def event_recorder(params: CacheInitParams) -> KVCacheEventRecorder:
    """What SGLang's radix cache would make of the same parameters."""
    return KVCacheEventRecorder(enabled=params.enable_kv_cache_events, page_size=params.page_size)


def place_of(worker: TpModelWorker) -> Place:
    """This process's place."""
    found = worker.ps
    return Place(
        tp_rank=found.tp_rank,
        pp_rank=found.pp_rank,
        dp_rank=found.dp_rank,
        attn_tp_rank=found.attn_tp_rank,
        attn_cp_rank=found.attn_cp_rank,
    )


def mla_host_pool(device_pool: MLATokenToKVPool, size: HostPoolSize) -> MLATokenToKVPoolHost:
    """The host pool of MLA rows, those of a DSA model included."""
    return MLATokenToKVPoolHost(
        device_pool,
        size.ratio,
        size.gigabytes,
        size.page_size,
        size.mem_layout,
        allocator_type=size.allocator_type,
        override_kv_cache_dim=device_pool.kv_cache_dim,
    )


def mha_host_pool(device_pool: MHATokenToKVPool, size: HostPoolSize) -> HostKVCache:
    """The host pool of keys and values."""
    host_class = get_mha_host_pool_cls(device_pool)
    return host_class(
        device_pool,
        size.ratio,
        size.gigabytes,
        size.page_size,
        size.mem_layout,
        allocator_type=size.allocator_type,
    )


def index_host_pool(
    device_pool: DSATokenToKVPool, anchor: MLATokenToKVPoolHost, *, allocator_type: str
) -> DSAIndexerPoolHost:
    """The host pool of index keys beside `anchor`."""
    return DSAIndexerPoolHost(device_pool, anchor, anchor.layout, allocator_type=allocator_type)


def host_layers(host_pool: HostKVCache, device_pool: KVCache) -> list[int | None]:
    """The layer of the host pool that each layer of the device has; None where this rank keeps none of it."""
    first, end = host_pool._device_owned_layer_range(device_pool)  # noqa: SLF001  # nothing else tells
    return [layer - first if first <= layer < end else None for layer in range(device_pool.layer_num)]


def release_host_memory(pool: HostKVCache) -> None:
    """Unregister the pinned memory of `pool`; may be called again.

    SGLang's ``destroy`` forgets a DSA index, whose pages would stay pinned: the next buffer at the same address could
    not be registered.
    """
    if isinstance(pool, DSAIndexerPoolHost) and pool.pin_memory and torch.cuda.is_available():
        _cuda_host_unregister(pool.index_k_with_scale_buffer)
    pool.destroy()
    pool.pin_memory = False  # nothing is registered any more, should this be called again


def submit_load(
    engine: L2TransferEngine,
    transfers: list[L2Transfer],
    *,
    layers: int,
    start_event: torch.Event | None = None,
    on_layer_done: Callable[[int], None] | None = None,
) -> TransferCompletion:
    """Submit host to device, layer by layer, after `start_event`; `on_layer_done` hears of each layer submitted."""
    return engine.submit_host_to_device(
        transfers, start_event=start_event, on_layer_done=on_layer_done, layer_num=layers
    )
