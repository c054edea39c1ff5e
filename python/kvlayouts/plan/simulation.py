"""One cache behind a plan: the tree of a server, over slots and host pages that are only counted.

Every decision is the tree's own (`hicache/tree`): what hits, what is backed up, what leaves which tier, what returns.
It works in pages here: the strategy has pages of one token, and a token stands for a page and all before it (see
`prompts`). Requests come one at a time and their copies have ended when the next one comes, as in a replay, whose hits
these are, token for token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic

import numpy as np
import torch
from sglang.srt.mem_cache.events import KVCacheEventRecorder
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_eviction_strategy

from kvlayouts.common.errors import RunError
from kvlayouts.common.values import ceil_div
from kvlayouts.plan.counting import CountingController, CountingSlots
from sglang.srt.mem_cache.hicache.agreement import RankAgreement
from sglang.srt.mem_cache.hicache.host.ledger import HostLedger
from sglang.srt.mem_cache.hicache.settings import HiCacheSettings
from sglang.srt.mem_cache.hicache.tree.calls import Insertion
from sglang.srt.mem_cache.hicache.tree.parts import build_tree_parts
from sglang.srt.mem_cache.hicache.tree.report import TrafficReport
from sglang.srt.mem_cache.layouts.facts import host_lanes
from sglang.srt.mem_cache.layouts.protocol import KVLayoutStrategy, MetadataT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvlayouts.common.values import WritePolicy
    from kvlayouts.plan.prompts import Prompt, Prompts
    from sglang.srt.mem_cache.hicache.tree.node import LayoutTreeNode
    from sglang.srt.mem_cache.layouts.pages import LaneArray, PageArray


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedHits:
    """What a trace gets from a cache. Tokens are logical; pages by lane are what the ranks of a lane copy."""

    requests: int
    device_hit_tokens: int
    host_hit_tokens: int
    computed_tokens: int
    evicted_device_tokens: int
    evicted_host_tokens: int
    refused_backups: int
    backups: int
    loads: int
    backed_up_lane_pages: tuple[int, ...]
    loaded_lane_pages: tuple[int, ...]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return self.device_hit_tokens + self.host_hit_tokens + self.computed_tokens

    @property
    def hit_share(self) -> float:
        """Share of the prompt tokens that device and host serve."""
        return (self.device_hit_tokens + self.host_hit_tokens) / self.prompt_tokens


class CacheSimulation(Generic[MetadataT]):
    """One layout's cache: `device_pages` device pages and `host_pages` host pages on each rank.

    `layout` is the strategy with pages of one token, `bases` the lanes in which it lets the chains of `prompts` begin,
    by the number of their first page.
    """

    def __init__(
        self,
        prompts: Prompts,
        layout: KVLayoutStrategy[MetadataT],
        bases: Sequence[int],
        *,
        device_pages: int,
        host_pages: int,
        policy: WritePolicy,
        eviction_policy: str,
    ) -> None:
        self._prompts = prompts
        self._page_size = prompts.page_size
        self._bases = bases
        longest = prompts.longest_pages
        self._lanes: dict[int, LaneArray] = {base: layout.extend_lanes(base, 0, longest) for base in set(bases)}
        self.slots = CountingSlots(layout, device_pages, longest)
        self.controller = CountingController(
            layout, self.slots, HostLedger(lane_count=host_lanes(layout).count, capacity_pages=host_pages)
        )
        settings = HiCacheSettings(write_policy=policy)  # thresholds in tokens
        least_pages = ceil_div(settings.load_back_threshold, self._page_size)
        self.parts = build_tree_parts(
            layout=layout,
            settings=replace(settings, load_back_threshold=least_pages),
            slots=self.slots,
            controller=self.controller,
            agreement=RankAgreement([]),
            priority=get_eviction_strategy(eviction_policy).get_priority,
            events=KVCacheEventRecorder(enabled=False, page_size=layout.page_size),
            report=TrafficReport(),
            device=torch.device("cpu"),
        )

    def run(self, on_request: Callable[[int], None] | None = None) -> SimulatedHits:
        """Serve every prompt. Raises `RunError` if one finds no room, which the caller's check of sizes excludes."""
        totals = [0, 0, 0]
        for done, prompt in enumerate(self._prompts, 1):
            for tier, tokens in enumerate(self.serve(prompt)):
                totals[tier] += tokens
            if on_request is not None:
                on_request(done)
        device, host, computed = totals
        stats, size = self.parts.report.stats, self._page_size
        return SimulatedHits(
            requests=len(self._prompts),
            device_hit_tokens=device,
            host_hit_tokens=host,
            computed_tokens=computed,
            evicted_device_tokens=stats.evicted_device_tokens * size,
            evicted_host_tokens=stats.evicted_host_tokens * size,
            refused_backups=stats.refused_backups,
            backups=stats.backups,
            loads=stats.loads,
            backed_up_lane_pages=tuple(self.controller.backed_up_pages.tolist()),
            loaded_lane_pages=tuple(self.controller.loaded_pages.tolist()),
        )

    def serve(self, prompt: Prompt) -> tuple[int, int, int]:
        """Put one request through the cache. Returns the prompt's tokens from device, from host, and computed."""
        parts, size = self.parts, self._page_size
        keys = self._prompts.page_keys(prompt)
        # The last token of a prompt is always computed: its logits are the answer.
        match = parts.tree.match(RadixKey(keys, limit=(prompt.tokens - 1) // size))
        node: LayoutTreeNode[Any] = match.device_node
        found = cached = match.slots.numel()
        if match.host_tokens:
            loaded = parts.load_backs.load_back(match.host_node)
            if loaded is not None:
                node, cached = match.host_node, found + loaded.numel()
        parts.accounting.lock(node)
        lanes = self._lanes[self._bases[prompt.first_page]][: ceil_div(prompt.tokens, size)]
        own = parts.device_room.alloc(lanes[cached:])
        if own is None:
            raise RunError(f"no room for {len(lanes) - cached} pages though nothing but this prompt is locked")
        pages: PageArray = np.zeros(len(lanes), dtype=np.int64)
        pages[cached:] = own  # before these, the tree looks at none: it has them on the device
        whole = pages[: len(keys)]
        known = parts.insert(
            Insertion(key=RadixKey(keys), value=self.slots.slots(whole), slot_pages=whole)
        ).known_tokens
        self.slots.free_slot_pages(np.concatenate((pages[cached:known], pages[len(keys) :])))
        parts.accounting.unlock(node)
        parts.transfers.settle()
        return found * size, (cached - found) * size, prompt.tokens - cached * size
