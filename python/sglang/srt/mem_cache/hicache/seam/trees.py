"""SGLang's own trees, as its scheduler drives them step by step: for comparisons with ours, on each release."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import torch
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixCache

from .features import SINCE_0_5_23

if TYPE_CHECKING:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.server_args import ServerArgs

HIRADIX, UNIFIED = "SGLang HiRadixCache", "SGLang UnifiedRadixCache"
_HIRADIX_MODULE: Final = "sglang.srt.mem_cache.hiradix_cache"

OWN_TREES: Final = (HIRADIX, UNIFIED) if find_spec(_HIRADIX_MODULE) else (UNIFIED,)
"""Those with a host tier that this release has, the one that ours takes the place of first."""


def make_tree(name: str, params: CacheInitParams, server_args: ServerArgs) -> Any:  # noqa: ANN401  # SGLang's
    """One of `OWN_TREES`, for full attention. Host sizes come from `server_args`."""
    if name == HIRADIX:
        return import_module(_HIRADIX_MODULE).HiRadixCache(params, server_args)
    # Of which our stubs have nothing: nothing of it is relied on.
    parts: Any = import_module("sglang.srt.mem_cache.unified_cache.components")
    setattr(params, "tree_components", (parts.ComponentType.FULL,))  # noqa: B010  # a field that our stub lacks
    cache = import_module("sglang.srt.mem_cache.unified_radix_cache").UnifiedRadixCache(params)
    cache.init_hicache(server_args, params)
    return cache


def load_params(found: Any) -> Any:  # noqa: ANN401  # SGLang's, with fields that our stub lacks
    """What the scheduler asks for after a match, for a request of no other kind than plain tokens."""
    params: Any = InitLoadBackParams(best_match_node=found.best_match_node, host_hit_length=found.host_hit_length)
    params.req = SimpleNamespace(
        last_node=found.last_device_node,
        swa_host_hit_length=0,
        mamba_host_hit_length=0,
        rid="",
        kv=ReqKvInfo(),
    )
    return params


def match_and_load(cache: Any, key: RadixKey) -> tuple[torch.Tensor, Any]:  # noqa: ANN401  # SGLang's
    """The slots of the longest prefix of `key`, shape ``[tokens]``, with loads that are queued, and its last node."""
    found = cache.match_prefix(MatchPrefixParams(key=key))
    node = found.last_device_node
    if not found.host_hit_length:
        return (cache.path_device_indices(node) if SINCE_0_5_23 else found.device_indices), node
    loaded, node = cache.init_load_back(load_params(found))
    if SINCE_0_5_23:
        return cache.path_device_indices(node), node
    else:
        # No copy where one is empty: copying here is not the cache's work.
        parts = [slots for slots in (found.device_indices, loaded) if len(slots)]
        return (torch.cat(parts) if len(parts) > 1 else parts[0] if parts else loaded), node


def put(cache: Any, key: RadixKey, slots: torch.Tensor, *, own_from: int) -> int:  # noqa: ANN401  # SGLang's, or ours
    """Insert whole pages at `slots`, shape ``[tokens]``, and free those from `own_from` that the tree had already.

    Returns the tokens that it had. A plain radix cache leaves them to the caller; `UnifiedRadixCache` frees them.
    """
    params: Any = InsertParams(key=key, value=slots)
    if not isinstance(cache, RadixCache):
        params.prev_prefix_len = own_from
        return int(cache.insert(params).prefix_len)
    known = int(cache.insert(params).prefix_len)
    cache.token_to_kv_pool_allocator.free_segment(slots[own_from:known], start_pos=own_from)
    return known
