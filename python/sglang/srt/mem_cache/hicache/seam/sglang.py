"""SGLang's pools, copies, events and tags, under the same names on each release."""

from __future__ import annotations

from .features import SINCE_0_5_23

if SINCE_0_5_23:
    from .sglang_since_0_5_23 import (
        PP_SYNC_TAG,
        event_recorder,
        host_layers,
        index_host_pool,
        mha_host_pool,
        mla_host_pool,
        place_of,
        release_host_memory,
        submit_load,
    )
else:
    from .sglang_until_0_5_20 import (
        PP_SYNC_TAG,
        event_recorder,
        host_layers,
        index_host_pool,
        mha_host_pool,
        mla_host_pool,
        place_of,
        release_host_memory,
        submit_load,
    )

__all__ = [
    "PP_SYNC_TAG",
    "event_recorder",
    "host_layers",
    "index_host_pool",
    "mha_host_pool",
    "mla_host_pool",
    "place_of",
    "release_host_memory",
    "submit_load",
]
