"""SGLang 0.5.23: see `seam.sglang`. Host pools know device pools by descriptions of their buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sglang.srt.distributed.communication_tags import P2PTag
from sglang.srt.mem_cache.dsa_cache_layer_split import LayerSplitDSATokenToKVPool
from sglang.srt.mem_cache.events import KVCacheEventRecorder
from sglang.srt.mem_cache.pool_host import dsa
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost
from sglang.srt.mem_cache.pool_host.mha import get_mha_host_pool_cls
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.runtime_context import get_parallel

from sglang.srt.mem_cache.layouts.rounding import ceil_div

from .features import SINCE_0_5_23
from .records import Place

assert SINCE_0_5_23

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.l2_transfer import L2Transfer, L2TransferEngine, TransferCompletion
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, KVCache, MHATokenToKVPool, MLATokenToKVPool
    from sglang.srt.mem_cache.pool_host import HostKVCache

    from .records import HostPoolSize

PP_SYNC_TAG: Final = P2PTag.HICACHE_PP_SYNC


def event_recorder(params: CacheInitParams) -> KVCacheEventRecorder:
    """What SGLang's radix cache would make of the same parameters."""
    return KVCacheEventRecorder(
        enabled=params.enable_kv_cache_events and not params.disable,
        page_size=params.page_size,
        dynamo_format=params.dynamo_kv_event_format,
        lora_names=params.kv_event_lora_names,
    )


def place_of(worker: TpModelWorker) -> Place:
    """This process's place: each has one worker, and SGLang publishes where it stands."""
    found = get_parallel()
    return Place(
        tp_rank=found.tp_rank,
        pp_rank=found.pp_rank,
        dp_rank=found.dp_rank,
        attn_tp_rank=found.attn_tp_rank,
        attn_cp_rank=found.attn_cp_rank,
    )


def mla_host_pool(device_pool: MLATokenToKVPool, size: HostPoolSize) -> MLATokenToKVPoolHost:
    """The host pool of MLA rows, those of a DSA model included; of one size on all ranks where layers are split."""
    layers = device_pool.layer_num
    if isinstance(device_pool, LayerSplitDSATokenToKVPool):
        layers = ceil_div(layers, device_pool.layer_shard_size)
    return MLATokenToKVPoolHost(
        device_pool.get_device_pool_infos()[0].buffer_info,
        size.ratio,
        size.gigabytes,
        size.page_size,
        size.mem_layout,
        allocator_type=size.allocator_type,
        override_kv_cache_dim=device_pool.kv_cache_dim,
        device_capacity_tokens=_capacity_tokens(device_pool),
        start_layer=device_pool.start_layer,
        end_layer=device_pool.end_layer,
        target_layer_num=layers,
        layer_shard_enabled=device_pool.layer_shard_enabled,
    )


def mha_host_pool(device_pool: MHATokenToKVPool, size: HostPoolSize) -> HostKVCache:
    """The host pool of keys and values."""
    described = device_pool.get_device_pool_infos()[0].buffer_info
    host_class = get_mha_host_pool_cls(described)
    return host_class(
        described,
        size.ratio,
        size.gigabytes,
        size.page_size,
        size.mem_layout,
        allocator_type=size.allocator_type,
        device_capacity_tokens=_capacity_tokens(device_pool),
        start_layer=device_pool.start_layer,
        end_layer=device_pool.end_layer,
        write_back_staging=device_pool.hicache_write_back_staging,
    )


def index_host_pool(
    device_pool: DSATokenToKVPool, anchor: MLATokenToKVPoolHost, *, allocator_type: str
) -> DSAIndexerPoolHost:
    """The host pool of index keys beside `anchor`."""
    return DSAIndexerPoolHost(dsa.make_dsa_indexer_pool_decl(device_pool), anchor, allocator_type=allocator_type)


def host_layers(host_pool: HostKVCache, device_pool: KVCache) -> list[int | None]:
    """The layer of the host pool that each layer of the device has; None where it has none: the host is compact."""
    if isinstance(host_pool, DSAIndexerPoolHost):
        host_layer_of = host_pool._device_to_host_layer  # noqa: SLF001  # nothing else tells
        return [host_layer_of.get(layer) for layer in range(device_pool.layer_num)]
    first, end = host_pool._device_owned_layer_range(device_pool)  # noqa: SLF001  # ditto
    return [layer - first if first <= layer < end else None for layer in range(device_pool.layer_num)]


def release_host_memory(pool: HostKVCache) -> None:
    """Unregister the pinned memory of `pool`; may be called again. A DSA index does so itself."""
    pool.destroy()


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
        transfers, start_event=start_event, on_layer_done=on_layer_done, transfer_layer_id_max=layers
    )


def _capacity_tokens(device_pool: KVCache) -> int:
    """What a ratio is of."""
    stated = device_pool.host_capacity_tokens
    return device_pool.size if stated is None else stated
