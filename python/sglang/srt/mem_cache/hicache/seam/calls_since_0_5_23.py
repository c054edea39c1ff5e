"""SGLang 0.5.23: see `seam.calls`. Requests count their prefix; the row, the lock and the tree know the slots.

while it runs, and before it ends    checkpoint(req, up_to=...)    in the tree, row repointed, nothing given back
when it ends                         free_kv_row, unlock           SGLang's own
                                     on_release                    the row has nothing of its own any more
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic

from sglang.srt.mem_cache.base_prefix_cache import InsertResult, MatchResult
from typing_extensions import override

from sglang.srt.mem_cache.layouts.errors import LayoutInvariantError
from sglang.srt.mem_cache.layouts.protocol import MetadataT

from ..tree.calls import Insertion, RequestUse
from .features import SINCE_0_5_23
from .own_calls import OwnCalls

assert SINCE_0_5_23

if TYPE_CHECKING:
    import torch
    from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams, InsertParams, MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    from ..requests.uses import SchedulerRequest
    from ..tree.node import LayoutTreeNode


class SchedulerCalls(OwnCalls[MetadataT], Generic[MetadataT]):
    """A request uses a node once, with the chunk of its prompt that passes it first."""

    @override
    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """See `HiRadixCache.match`."""
        found = self.match(params.key)
        return MatchResult(
            device_prefix_len=len(found.slots),
            last_device_node=found.device_node,
            last_host_node=found.host_node,
            best_match_node=found.host_node,
            host_hit_length=found.host_tokens,
        )

    @override
    def touch_prefix(self, key: RadixKey) -> None:
        """The cached prefix of `key` is the most recently used, by the tree's own clock.

        SGLang's would give our nodes times of this rank's clock, by which each rank evicts others.
        """
        self.match(key)

    @override
    def path_device_indices(self, node: LayoutTreeNode[MetadataT]) -> torch.Tensor:
        """Slots from the root down to `node`, int64, shape ``[tokens]``, on the pool's device."""
        return self.parts.tree.slots_down_to(node)

    @override
    def insert(self, params: InsertParams) -> InsertResult:
        """See `HiRadixCache.put`. Raises `LayoutInvariantError` without slots."""
        if params.value is None:
            raise LayoutInvariantError(f"insert of {len(params.key)} tokens came without slots")
        inserted = self.put(
            Insertion(
                key=params.key,
                value=params.value,
                use=RequestUse(counted=params.inserted_len),
                priority=params.priority or 0,
            )
        )
        return InsertResult(prefix_len=inserted.known_tokens, last_device_node=inserted.node)

    @override
    def init_load_back(self, params: InitLoadBackParams) -> tuple[int, LayoutTreeNode[MetadataT]]:
        """See `HiRadixCache.bring_back`; its tokens and its node."""
        loaded = self.bring_back(params.best_match_node, params.mem_quota)
        return len(loaded.slots), loaded.node

    @override
    def flush_pending_backups(self) -> None:
        """See `Transfers.submit_backups`. Called when the results of a batch have been put into the tree."""
        self.parts.transfers.submit_backups()

    @override
    def checkpoint(self, req: SchedulerRequest, *, up_to: int) -> None:
        """Put the whole pages of a request's first `up_to` tokens into the tree, and lock them for it."""
        if self.disable:
            return
        key = self.insertion.put(req, req.full_untruncated_fill_ids[:up_to], splits_prompt=True)
        found = self.insertion.repoint(req, key)
        self.unlock(req.lock)
        req.lock = self.lock(found.device_node)
        req.last_node = found.device_node

    @override
    def on_release(self, req: SchedulerRequest, *, checkpointed: bool) -> None:
        """A request has ended and given everything back."""
        if self.requests is not None:
            self.requests.ended(req, req.kv.kv_allocated_len)
