"""SGLang 0.5.20: see `seam.calls`. Requests hold the slots of their prefix, and say whether they have ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic

import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertResult, MatchResult
from typing_extensions import override

from sglang.srt.mem_cache.layouts.errors import LayoutInvariantError
from sglang.srt.mem_cache.layouts.protocol import MetadataT

from ..tree.calls import Insertion
from .features import SINCE_0_5_23
from .own_calls import OwnCalls

assert not SINCE_0_5_23

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams, InsertParams, MatchPrefixParams

    from ..requests.uses import SchedulerRequest
    from ..tree.node import LayoutTreeNode


class SchedulerCalls(OwnCalls[MetadataT], Generic[MetadataT]):
    """A chunk of a prompt is no use of the nodes that it passes; whatever else is inserted is."""

    @override
    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """See `HiRadixCache.match`."""
        found = self.match(params.key)
        return MatchResult(
            device_indices=found.slots,
            last_device_node=found.device_node,
            last_host_node=found.host_node,
            best_match_node=found.host_node,
            host_hit_length=found.host_tokens,
        )

    @override
    def insert(self, params: InsertParams) -> InsertResult:
        """See `HiRadixCache.put`. Raises `LayoutInvariantError` without slots."""
        if params.value is None:
            raise LayoutInvariantError(f"insert of {len(params.key)} tokens came without slots")
        inserted = self.put(
            Insertion(
                key=params.key,
                value=params.value,
                is_use=not params.chunked,
                priority=params.priority or 0,
            )
        )
        return InsertResult(prefix_len=inserted.known_tokens, last_device_node=inserted.node)

    @override
    def init_load_back(self, params: InitLoadBackParams) -> tuple[torch.Tensor, LayoutTreeNode[MetadataT]]:
        """See `HiRadixCache.bring_back`."""
        return self.bring_back(params.best_match_node, params.mem_quota)

    @override
    def cache_finished_req(self, req: SchedulerRequest, is_insert: bool = True, *, kv_len_to_handle: int) -> None:
        """Put the whole pages of a request that has ended into the tree, or give all back, and unlock its prefix."""
        kept = req.kv.cache_protected_len
        if is_insert and not self.disable and not self.disable_finished_insert:
            computed = (req.origin_input_ids + req.output_ids)[:kv_len_to_handle]
            kept = len(self.insertion.put(req, computed, splits_prompt=True))
        self.insertion.give_back(req, kept, kv_len_to_handle)
        if req.last_node is not None:
            self.dec_lock_ref(req.last_node)
        self.insertion.ended(req, kv_len_to_handle)

    @override
    def cache_unfinished_req(self, req: SchedulerRequest, chunked: bool = False) -> None:
        """Put the whole pages of a request that goes on into the tree, and lock them for it."""
        if self.disable:
            return
        computed = req.get_fill_ids()
        key = self.insertion.put(req, computed, is_use=not chunked)
        found = self.insertion.repoint(req, key)
        self.dec_lock_ref(req.last_node)
        self.inc_lock_ref(found.device_node)
        req.last_node = found.device_node
        own = self.insertion.slots(req, len(computed))[len(key) :]
        req.prefix_indices = torch.cat([found.slots, own]) if len(own) else found.slots
