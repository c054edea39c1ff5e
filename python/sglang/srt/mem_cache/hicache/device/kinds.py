"""Which kind of device pool SGLang handed us: the question every layout strategy asks before it accepts a server.

A pool is served only if its class is exactly one of four of SGLang's. A subclass may keep its rows in another order
(vectorised heads, kernel-facing views), or hold data beside the KV rows (scales, request state), and HiCache copies
would then be incomplete without anybody noticing. So an unknown subclass is `PoolKind.OTHER`, which strategies refuse.
Subclasses in this package count as the SGLang class that they extend.
"""

from __future__ import annotations

from sglang.srt.mem_cache.dsa_cache_layer_split import LayerSplitDSATokenToKVPool
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, KVCache, MHATokenToKVPool, MLATokenToKVPool

from sglang.srt.mem_cache.layouts import PoolKind

_OUR_PACKAGE = "sglang.srt.mem_cache.hicache."
_HISPARSE_CLASSES = frozenset({"HiSparseDSATokenToKVPool", "HiSparseC4DevicePool"})
_SERVED_CLASSES: dict[type[KVCache], PoolKind] = {
    MHATokenToKVPool: PoolKind.MHA,
    MLATokenToKVPool: PoolKind.MLA,
    DSATokenToKVPool: PoolKind.DSA,
    LayerSplitDSATokenToKVPool: PoolKind.DSA,  # some layers of every page: `layers_differ`
}


def pool_kind(device_pool: KVCache) -> PoolKind:
    """The kind of `device_pool`; `PoolKind.OTHER` if its class is served but its settings are not.

    Such settings: quantised MHA (scales lie beside the rows), heads-first MHA rows, a DSA index that pools several
    tokens into one key (its tails belong to a request, not to a page).
    """
    kind = kind_of_pool_class(type(device_pool))
    return kind if _holds_one_row_per_slot(device_pool) else PoolKind.OTHER


def layers_differ(device_pool: KVCache) -> bool:
    """Whether ranks keep different layers of each page (``--enable-dsa-cache-layer-split``)."""
    return bool(device_pool.layer_shard_enabled)


def kind_of_pool_class(pool_class: type[KVCache]) -> PoolKind:
    """The kind that instances of `pool_class` have by their class alone."""
    if any(base.__name__ in _HISPARSE_CLASSES for base in pool_class.__mro__):
        return PoolKind.HISPARSE
    foreign = next(base for base in pool_class.__mro__ if not base.__module__.startswith(_OUR_PACKAGE))
    return _SERVED_CLASSES.get(foreign, PoolKind.OTHER)


def _holds_one_row_per_slot(device_pool: KVCache) -> bool:
    if isinstance(device_pool, MHATokenToKVPool):
        return device_pool.kv_cache_layout == "nhd" and not device_pool.is_quantized_kv_cache
    if isinstance(device_pool, DSATokenToKVPool):
        return device_pool.index_kpool == 1
    return True
