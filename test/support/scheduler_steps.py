"""What SGLang's scheduler does to one request and its cache, step by step, in the words of the release beside us.

admit       match, load back, lock                    before a prompt, or its first chunk, is computed
extend      which tokens the next pass computes
computed    they are computed: the tree gets them     `unfinished` while chunks of the prompt are left
release     the request ends, or is retracted         `keep` is False for an abort and a retraction
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams

from sglang.srt.mem_cache.hicache.seam.features import SINCE_0_5_23

# Modules and classes of hundreds of names, of which our stubs have few.
_common: Any = import_module("sglang.srt.mem_cache.common")


def admit(request: Any, cache: Any) -> bool:  # noqa: ANN401  # SGLang's
    """Match, load back what the host has, and lock. Returns whether the host had something."""
    request.init_next_round_input(cache)
    hit = bool(request.host_hit_length)
    if hit:
        asked: dict[str, Any] = {"req": request}  # a field that our stub lacks
        params = InitLoadBackParams(
            best_match_node=request.best_match_node, host_hit_length=request.host_hit_length, **asked
        )
        loaded, request.last_node = cache.init_load_back(params)
        cache.ready_to_load_host_cache()
        if SINCE_0_5_23:
            request.prefix_len += loaded
        else:
            request.prefix_indices = torch.cat([request.prefix_indices, loaded])
        request.kv.cache_protected_len = prefix_tokens(request)
    if SINCE_0_5_23:
        request.lock = cache.lock(request.last_node)
    else:
        request.lock_receipt = cache.inc_lock_ref(request.last_node)
    return hit


def prefix_tokens(request: Any) -> int:  # noqa: ANN401
    """Tokens whose slots a request has from the tree, or from an earlier chunk."""
    return int(request.prefix_len) if SINCE_0_5_23 else len(request.prefix_indices)


def extend(request: Any, *, end: int) -> None:  # noqa: ANN401
    """The next pass computes the request's tokens up to `end`."""
    if SINCE_0_5_23:
        request.extend_end = end
    else:
        request.set_extend_range(prefix_tokens(request), end)


def extend_end(request: Any) -> int:  # noqa: ANN401
    """See `extend`."""
    return int(request.extend_end if SINCE_0_5_23 else request.extend_range.end)


def computed(request: Any, cache: Any, *, unfinished: bool) -> None:  # noqa: ANN401
    """A pass has ended; `unfinished` while the prompt has tokens left."""
    if SINCE_0_5_23:
        _common.checkpoint_kv_cache(request, cache)
    else:
        _common.maybe_cache_unfinished_req(request, cache, chunked=unfinished)


def release(request: Any, cache: Any, *, keep: bool = True) -> None:  # noqa: ANN401
    """The request gives its row back; the tree keeps what it can, if it is to `keep` something."""
    if SINCE_0_5_23:
        _common.release_kv_cache(request, cache, checkpoint=keep)
    else:
        _common.release_kv_cache(request, cache, is_insert=keep)


def put_chunk(request: Any, cache: Any, *, tokens: int) -> None:  # noqa: ANN401
    """`computed` for a request that no batch has: its first `tokens` go to the tree."""
    if SINCE_0_5_23:
        cache.checkpoint(request, up_to=tokens)
    else:
        cache.cache_unfinished_req(request, chunked=True)


def put_end(request: Any, cache: Any, *, tokens: int, keep: bool = True) -> None:  # noqa: ANN401
    """`release` for a request that no batch has, with slots for `tokens`; its row is not given back."""
    if SINCE_0_5_23:
        if keep:
            cache.checkpoint(request, up_to=tokens)
        cache.free_kv_row(request.kv, [(request.kv.cache_protected_len, tokens)])
        cache.unlock(request.lock)
        request.lock = None
        cache.on_release(request, checkpointed=keep)
    else:
        cache.cache_finished_req(request, is_insert=keep, kv_len_to_handle=tokens)
