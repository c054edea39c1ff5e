"""The cache on page counts: every decision of the real one, no slot, no host page, no byte.

The counterpart of `tiers.TieredRadixTree`, `radix_cache.HiRadixCache` and `replay.rank.RankReplay`, for one request at
a time whose copies have ended when the next one comes, as in a replay. What makes it fast is what it leaves out: which
slot or host page it is never changes a decision, only how many of them each lane has. What it keeps is the order of
every step, so that its hits, evictions, backups and loads are those of a replay, token for token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from kvlayouts.common.errors import RunError
from kvlayouts.plan.nodes import PageNode, PageTree
from sglang.srt.mem_cache.hicache.host.ledger import HostLedger

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvlayouts.common.values import WritePolicy
    from kvlayouts.plan.chains import ChainLanes
    from kvlayouts.plan.prompts import Prompt, Prompts
    from sglang.srt.mem_cache.layouts.pages import PageArray

LOAD_BACK_THRESHOLD_TOKENS: Final = 10
"""`HiCacheSettings.load_back_threshold`: a shorter host hit is computed again."""


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


class CacheSimulation:
    """One layout's cache: `device_pages` slot pages in each lane, shape ``[lanes]``, `host_pages` host pages a lane."""

    def __init__(
        self,
        prompts: Prompts,
        chains: ChainLanes,
        *,
        device_pages: PageArray,
        host_pages: int,
        policy: WritePolicy,
        eviction_policy: str,
    ) -> None:
        self._prompts = prompts
        self._chains = chains
        self._page_size = prompts.page_size
        self._write_back = policy == "write_back"
        self._hits_to_back_up = 1 if policy == "write_through" else 2
        self._tree = PageTree(
            chains,
            page_size=prompts.page_size,
            block_tokens=prompts.block_tokens,
            eviction_policy=eviction_policy,
        )
        self._free = device_pages.astype(np.int64)
        self._ledger = HostLedger(lane_count=chains.lane_count, capacity_pages=host_pages)
        self._backing_up: list[PageNode] = []
        self._totals = [0, 0, 0]
        self._evicted_device_pages = self._evicted_host_pages = 0
        self._refused_backups = self._backups = self._loads = 0
        self._backed_up = np.zeros(chains.lane_count, dtype=np.int64)
        self._loaded = np.zeros(chains.lane_count, dtype=np.int64)

    def run(self, on_request: Callable[[int], None] | None = None) -> SimulatedHits:
        """Serve every prompt. Raises `RunError` if one finds no room, which the caller's check of sizes excludes."""
        for done, prompt in enumerate(self._prompts, 1):
            for tier, tokens in enumerate(self._serve(prompt)):
                self._totals[tier] += tokens
            if on_request is not None:
                on_request(done)
        device, host, computed = self._totals
        return SimulatedHits(
            requests=len(self._prompts),
            device_hit_tokens=device,
            host_hit_tokens=host,
            computed_tokens=computed,
            evicted_device_tokens=self._evicted_device_pages * self._page_size,
            evicted_host_tokens=self._evicted_host_pages * self._page_size,
            refused_backups=self._refused_backups,
            backups=self._backups,
            loads=self._loads,
            backed_up_lane_pages=tuple(self._backed_up.tolist()),
            loaded_lane_pages=tuple(self._loaded.tolist()),
        )

    # One request.

    def _serve(self, prompt: Prompt) -> tuple[int, int, int]:
        """Tokens from device, from host, and computed."""
        tree, size = self._tree, self._page_size
        # The last token of a prompt is always computed: its logits are the answer.
        node, device_pages = self._match(prompt, (prompt.tokens - 1) // size)
        last, host_pages = node, 0
        while not node.on_device:
            host_pages += node.pages
            node = node.above
        loading = bool(host_pages) and self._load_back(last, node, host_pages)
        above, node = node, last if loading else node
        loaded_pages = host_pages if loading else 0
        tree.lock(node, 1)
        cached = device_pages + loaded_pages
        pages, whole = -(-prompt.tokens // size), prompt.tokens // size
        self._allocate(prompt, cached, pages)
        known = self._insert(prompt, whole)
        if known > cached:
            self._free += self._chains.count(prompt.first_page, cached, known)
        if pages > whole:
            self._free += self._chains.count(prompt.first_page, whole, pages)
        tree.lock(node, -1)
        self._settle(last if loading else None, above)
        computed = prompt.tokens - cached * size
        return device_pages * size, loaded_pages * size, computed

    def _match(self, prompt: Prompt, end: int) -> tuple[PageNode, int]:
        """The last node that agrees with the first `end` pages, and the pages of that path on the device."""
        node, device_pages = self._tree.root, 0
        if not end:
            return node, 0
        tick = self._tree.tick()
        at = 0
        while at < end and (child := self._tree.step(node, prompt, at, end, tick)) is not None:
            node, at = child, child.end_page
            if child.on_device:
                device_pages = at
        return node, device_pages

    def _allocate(self, prompt: Prompt, cached: int, pages: int) -> None:
        wanted = self._chains.count(prompt.first_page, cached, pages)
        self._make_device_room(wanted)
        if bool((wanted > self._free).any()):
            raise RunError(f"no room for {pages - cached} pages though nothing but this prompt is locked")
        self._free -= wanted

    def _insert(self, prompt: Prompt, end: int) -> int:
        """Give the first `end` pages to the tree; returns those that it had on the device already."""
        if not end:
            return 0
        tree = self._tree
        tick = tree.tick()
        node, at, known = tree.root, 0, 0
        while at < end and (child := tree.step(node, prompt, at, end, tick)) is not None:
            node, at = child, child.end_page
            if node.on_device:
                known += node.pages
                self._hit(node)
            else:
                tree.put_on_device(node)
        if at < end:
            leaf = tree.add_leaf(node, prompt, at, end)
            tree.put_on_device(leaf)
            self._hit(leaf)
        return known

    def _settle(self, loaded: PageNode | None, above: PageNode) -> None:
        """All copies have ended: unlock what was backed up or loaded."""
        for node in self._backing_up:
            self._tree.lock(node, -1)
        self._backing_up.clear()
        if loaded is not None:
            node = loaded
            while node is not above:
                self._tree.protect(node, -1)
                node = node.above
            self._tree.lock(loaded, -1)

    # Load back.

    def _load_back(self, last: PageNode, above: PageNode, host_pages: int) -> bool:
        """Bring the nodes from `last` up to, but without, `above` back; all of them or none."""
        tree = self._tree
        if host_pages * self._page_size < LOAD_BACK_THRESHOLD_TOKENS:
            return False
        nodes = [last]
        while nodes[-1].above is not above:
            nodes.append(nodes[-1].above)
        wanted = np.sum([node.lane_pages for node in nodes], axis=0)
        tree.lock(above, 1)
        for node in nodes:
            tree.protect(node, 1)
        if bool((wanted > self._free).any()):
            self._make_device_room(wanted)
        refused = bool((wanted > self._free).any())
        if refused:
            for node in nodes:
                tree.protect(node, -1)
        tree.lock(above, -1)
        if refused:
            return False
        self._free -= wanted
        for node in reversed(nodes):
            tree.put_on_device(node)
        tree.lock(last, 1)
        self._loads += 1
        self._loaded += wanted
        return True

    # Backup.

    def _hit(self, node: PageNode) -> None:
        if self._write_back:
            return
        node.hit_count += 1
        self._tree.touch(node)
        if not node.on_host and node.hit_count >= self._hits_to_back_up and node.above.on_host and self._back_up(node):
            self._backing_up.append(node)
            self._tree.lock(node, 1)

    def _back_up(self, node: PageNode) -> bool:
        demand = node.lane_pages.tolist()
        if not self._ledger.admits(demand) and not self._make_host_room(demand):
            self._refused_backups += 1
            return False
        self._ledger.take(demand)
        self._tree.put_on_host(node)
        self._backups += 1
        self._backed_up += node.lane_pages
        return True

    # Host eviction.

    def _make_host_room(self, demand: list[int]) -> bool:
        if not self._ledger.ever_admits(demand):
            return False
        while not self._ledger.admits(demand):
            node = self._tree.first_to_leave(self._tree.host_order)
            if node is None:
                return False
            self._drop_host_copy(node)
            self._tree.unlink(node)
        return True

    def _drop_host_copy(self, node: PageNode) -> None:
        self._ledger.give(node.lane_pages.tolist())
        self._evicted_host_pages += node.pages
        self._tree.take_off_host(node)

    # Device eviction.

    def _make_device_room(self, wanted: PageArray) -> None:
        """Evict until each lane has room for `wanted` pages, or nothing where one lane is beyond help."""
        short = wanted - self._free
        evictable = self._tree.evictable_pages
        if bool((short > evictable).any()) and int(short.sum()) <= int(evictable.sum()):
            return
        freed = np.zeros_like(short)
        staged: list[PageNode] = []
        kept: list[PageNode] = []
        order = self._tree.device_order
        while not bool((freed >= short).all()) and (node := self._tree.first_to_leave(order)) is not None:
            if self._evict_node(node, staged):
                freed += node.lane_pages
            else:
                kept.append(node)
        self._finish_staged(staged)
        for node in kept:
            self._tree.refresh(node)

    def _evict_node(self, node: PageNode, staged: list[PageNode]) -> bool:
        tree = self._tree
        if not node.on_host:
            if self._write_back and self._back_up(node):
                tree.protect(node, 1)
                staged.append(node)
            else:
                self._finish_staged(staged)
                if not self._drop_below(node):
                    return False
        tree.take_off_device(node)
        self._free += node.lane_pages
        self._evicted_device_pages += node.pages
        if not node.on_host:
            tree.unlink(node)
        return True

    def _finish_staged(self, staged: list[PageNode]) -> None:
        for node in staged:
            self._tree.protect(node, -1)
        staged.clear()

    def _drop_below(self, root: PageNode) -> bool:
        """Delete the host-only nodes below a leaf without a host copy; False, with nothing changed, if one is kept."""
        below = list(root.children.values())
        for node in below:
            below.extend(node.children.values())
        if any(node.host_ref_counter for node in below):
            return False
        for node in reversed(below):
            self._drop_host_copy(node)
        return True
