"""Which tests a release of SGLang has."""

from __future__ import annotations

from importlib.util import find_spec

# SGLang 0.5.20 has the cache that ours is compared with in the first, a later one that of the second.
collect_ignore = (
    ["test_identity_matches_unified.py"]
    if find_spec("sglang.srt.mem_cache.hiradix_cache")
    else ["test_identity_matches_sglang.py"]
)
