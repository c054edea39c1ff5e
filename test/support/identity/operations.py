"""Operations on a cache, as SGLang's scheduler calls it. Each returns all that a caller could observe, in tokens."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InitLoadBackParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.mem_cache.radix_cache import RadixKey

from support.identity.content import content_is_right, prefix_codes, tokens_above, write_content
from support.identity.sequences import Kind, Operation

if TYPE_CHECKING:
    from support.identity.reference import Side


Observation = tuple[object, ...]

OUTPUT_SYMBOL = 90


def perform(side: Side, operation: Operation) -> Observation:
    """Do one operation on one side and return what was observed."""
    return _ACTIONS[operation.kind](side, operation)


def finish_all(side: Side) -> None:
    """Commit, finish and unlock everything, start and settle every transfer."""
    for kind, waiting in (
        (Kind.COMMIT, side.begun),
        (Kind.FINISH, side.running),
        (Kind.UNLOCK, side.held),
    ):
        while waiting:
            perform(side, Operation(kind=kind))
    perform(side, Operation(kind=Kind.READY))
    perform(side, Operation(kind=Kind.SETTLE))


# Steps.


def _key(tokens: array[int], namespace: str | None) -> RadixKey:
    return RadixKey(tokens, namespace)


def _match(side: Side, tokens: array[int], namespace: str | None) -> tuple[Any, Observation]:
    found = side.cache.match_prefix(MatchPrefixParams(key=_key(tokens, namespace)))
    on_device = len(found.device_indices)
    if on_device and not side.load_queued:
        codes = prefix_codes(tokens, namespace)[:on_device]
        if not content_is_right(side, found.device_indices, codes):
            raise AssertionError(f"{type(side.cache).__module__}: the {on_device} matched tokens have wrong KV")
    return found, (
        "device tokens",
        on_device,
        "host tokens",
        found.host_hit_length,
        "nodes end at",
        tokens_above(found.last_device_node),
        tokens_above(found.last_host_node),
        tokens_above(found.best_match_node),
    )


def _load_back(side: Side, found: Any, quota: int | None) -> tuple[torch.Tensor, Any]:  # noqa: ANN401
    """As the scheduler: only if the match says that there is something on the host."""
    if not found.host_hit_length:
        return found.device_indices, found.last_device_node
    loaded, node = side.cache.init_load_back(
        InitLoadBackParams(
            best_match_node=found.best_match_node, host_hit_length=found.host_hit_length, mem_quota=quota
        )
    )
    side.load_queued = side.load_queued or len(loaded) > 0
    return torch.cat([found.device_indices, loaded]), node


def _allocate(side: Side, tokens: int) -> torch.Tensor | None:
    evict_from_tree_cache(side.cache, tokens)
    slots: torch.Tensor | None = side.allocator.alloc(tokens)
    return slots


def _aligned(side: Side, tokens: int) -> int:
    return tokens // side.page_size * side.page_size


def _page_ceil(side: Side, tokens: int) -> int:
    return _aligned(side, tokens + side.page_size - 1)


# Operations without a request.


def _do_match(side: Side, operation: Operation) -> Observation:
    return _match(side, operation.tokens(side.page_size), operation.namespace)[1]


def _do_lock(side: Side, operation: Operation) -> Observation:
    found, seen = _match(side, operation.tokens(side.page_size), operation.namespace)
    side.held.append(found.last_device_node)
    return (*seen, "delta", side.cache.inc_lock_ref(found.last_device_node).delta)


def _do_unlock(side: Side, operation: Operation) -> Observation:
    if not side.held:
        return ("nothing to unlock",)
    node = side.held.pop(operation.number % len(side.held))
    return ("delta", side.cache.dec_lock_ref(node).delta)


def _do_load_back(side: Side, operation: Operation) -> Observation:
    found, seen = _match(side, operation.tokens(side.page_size), operation.namespace)
    prefix, node = _load_back(side, found, operation.quota)
    return (*seen, "after the load", len(prefix), "node ends at", tokens_above(node))


def _do_ready(side: Side, operation: Operation) -> Observation:
    side.load_queued = False
    return ("layer counter", side.cache.ready_to_load_host_cache())


def _do_settle(side: Side, operation: Operation) -> Observation:
    side.cache.check_hicache_events()
    return ()


def _do_evict(side: Side, operation: Operation) -> Observation:
    target = operation.number % (4 * side.page_size)
    return ("evicted", side.cache.evict(EvictParams(num_tokens=target)).num_tokens_evicted)


def _do_insert(side: Side, operation: Operation) -> Observation:
    tokens = operation.tokens(side.page_size)
    slots = _allocate(side, _page_ceil(side, len(tokens)))
    if slots is None:
        return ("no room",)
    aligned = _aligned(side, len(tokens))
    write_content(side, slots[:aligned], prefix_codes(tokens, operation.namespace)[:aligned])
    return _insert(side, operation, tokens, slots, own_from=0)


def _insert(side: Side, operation: Operation, tokens: array[int], slots: torch.Tensor, own_from: int) -> Observation:
    """Insert, then free duplicates and the slots after the last whole page, as `cache_finished_req` does."""
    fields: dict[str, Any] = {"chunked": operation.chunked}  # of that release
    params = InsertParams(
        key=_key(tokens, operation.namespace), value=slots[: len(tokens)], priority=operation.priority, **fields
    )
    result = side.cache.insert(params)
    side.allocator.free(slots[own_from : result.prefix_len])
    side.allocator.free(slots[_aligned(side, len(tokens)) :])
    return ("duplicates end at", result.prefix_len)


@dataclass(slots=True, kw_only=True)
class _Begun:
    operation: Operation
    tokens: array[int]
    slots: torch.Tensor
    own_from: int
    node: Any


def _do_begin(side: Side, operation: Operation) -> Observation:
    tokens = operation.tokens(side.page_size)
    found, seen = _match(side, tokens, operation.namespace)
    prefix, node = _load_back(side, found, operation.quota)
    locked = side.cache.inc_lock_ref(node).delta
    seen = (*seen, "prefix", len(prefix), "delta", locked)
    slots = _allocate(side, _page_ceil(side, len(tokens)) - len(prefix))
    if slots is None:
        return (*seen, "no room", side.cache.dec_lock_ref(node).delta)
    aligned = _aligned(side, len(tokens))
    own = slots[: aligned - len(prefix)]
    write_content(side, own, prefix_codes(tokens, operation.namespace)[len(prefix) : aligned])
    side.begun.append(
        _Begun(operation=operation, tokens=tokens, slots=torch.cat([prefix, slots]), own_from=len(prefix), node=node)
    )
    return seen


def _do_commit(side: Side, operation: Operation) -> Observation:
    if not side.begun:
        return ("nothing to insert",)
    begun: _Begun = side.begun.pop(operation.number % len(side.begun))
    inserted = _insert(side, begun.operation, begun.tokens, begun.slots, begun.own_from)
    return (*inserted, "delta", side.cache.dec_lock_ref(begun.node).delta)


# Operations with a request: the attributes of SGLang's `Req` that the cache and the request pool read.


@dataclass(kw_only=True, eq=False)
class Request:
    """A request that is being prefilled; `origin_input_ids` is its prompt."""

    origin_input_ids: array[int]
    extra_key: str | None
    priority: int
    last_node: Any
    prefix_indices: torch.Tensor
    output_ids: array[int] = field(default_factory=lambda: array("q"))
    cache_salt: str | None = None
    kv: ReqKvInfo = field(default_factory=ReqKvInfo)
    filled: int = 0

    def get_fill_ids(self) -> array[int]:
        """Tokens whose KV has been computed."""
        return (self.origin_input_ids + self.output_ids)[: self.filled]


def _do_start(side: Side, operation: Operation) -> Observation:
    if not side.requests.available_size():
        return ("no request row",)
    tokens = operation.tokens(side.page_size)
    found, seen = _match(side, tokens[:-1], operation.namespace)  # the last token is always computed
    prefix, node = _load_back(side, found, operation.quota)
    request = Request(
        origin_input_ids=tokens,
        extra_key=operation.namespace,
        priority=operation.priority,
        last_node=node,
        prefix_indices=prefix,
        filled=len(prefix),
    )
    delta = side.cache.inc_lock_ref(node).delta
    side.requests.alloc([request])
    side.requests.write((request.kv.req_pool_idx, slice(0, len(prefix))), prefix.to(torch.int32))
    request.kv.cache_protected_len = request.kv.kv_allocated_len = len(prefix)
    side.running.append(request)
    return (*seen, "prefix", len(prefix), "delta", delta)


def _extend(side: Side, request: Request, end: int) -> bool:
    """Compute the request's tokens up to `end`."""
    allocated = request.kv.kv_allocated_len
    slots = _allocate(side, max(_page_ceil(side, end) - allocated, 0))
    if slots is None:
        return False
    request.kv.kv_allocated_len = allocated + len(slots)
    side.requests.write((request.kv.req_pool_idx, slice(allocated, request.kv.kv_allocated_len)), slots.to(torch.int32))
    request.filled = end
    first = request.kv.cache_protected_len
    row = side.requests.req_to_token[request.kv.req_pool_idx, first : _aligned(side, end)]
    write_content(side, row, prefix_codes(request.get_fill_ids(), request.extra_key)[first : _aligned(side, end)])
    return True


def _retract(side: Side, request: Request) -> Observation:
    side.cache.cache_finished_req(request, is_insert=False, kv_len_to_handle=request.filled)
    side.requests.free(request)
    return ("no room, retracted",)


def _do_chunk(side: Side, operation: Operation) -> Observation:
    """Prefill the next pages of a request, or all that is left, and cache them."""
    waiting = [request for request in side.running if request.filled < len(request.origin_input_ids)]
    if not waiting:
        return ("no request to prefill",)
    request: Request = waiting[operation.number % len(waiting)]
    prompt = len(request.origin_input_ids)
    end = min(_aligned(side, request.filled) + (1 + operation.number % 3) * side.page_size, prompt)
    if not _extend(side, request, end):
        side.running.remove(request)
        return _retract(side, request)
    side.cache.cache_unfinished_req(request, chunked=end < prompt)
    return (
        "protected",
        request.kv.cache_protected_len,
        "prefix",
        len(request.prefix_indices),
        "node ends at",
        tokens_above(request.last_node),
    )


def _do_finish(side: Side, operation: Operation) -> Observation:
    """Prefill what is left without caching it, decode a few tokens, and end."""
    if not side.running:
        return ("no request to finish",)
    request: Request = side.running.pop(operation.number % len(side.running))
    outputs = operation.number % (2 * side.page_size)
    request.output_ids = array("q", [OUTPUT_SYMBOL + at for at in range(outputs)])
    computed = len(request.origin_input_ids) + outputs
    if not _extend(side, request, computed):
        return _retract(side, request)
    side.cache.cache_finished_req(request, kv_len_to_handle=computed)
    side.requests.free(request)
    return ("computed", computed)


def _do_reset(side: Side, operation: Operation) -> Observation:
    """As the scheduler flushes: tree, request rows and slots."""
    side.held.clear()
    side.begun.clear()
    side.running.clear()
    side.load_queued = False
    side.cache.reset()
    side.requests.clear()
    side.allocator.clear()
    return ()


_ACTIONS = {
    Kind.MATCH: _do_match,
    Kind.LOCK: _do_lock,
    Kind.UNLOCK: _do_unlock,
    Kind.LOAD_BACK: _do_load_back,
    Kind.READY: _do_ready,
    Kind.SETTLE: _do_settle,
    Kind.EVICT: _do_evict,
    Kind.INSERT: _do_insert,
    Kind.BEGIN: _do_begin,
    Kind.COMMIT: _do_commit,
    Kind.START: _do_start,
    Kind.CHUNK: _do_chunk,
    Kind.FINISH: _do_finish,
    Kind.RESET: _do_reset,
}
