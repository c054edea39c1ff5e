"""Requests as a scheduler runs them, step by step, so that faults can come between any two steps.

start       match, load back, lock, allocate (all or a first chunk), write the rows
continue    give the chunk to the tree, go on from the tree's own slots, allocate the next chunk
finish      check every row, give all whole pages to the tree, free the rest, unlock
abort       free what the tree does not have, unlock
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.mem_cache.radix_cache import RadixKey

from kvlayouts.ranks.rows import stored_rows
from kvlayouts.replay.content import KVContent, Words, prefix_sums
from sglang.srt.mem_cache.hicache.tree.calls import Insertion
from sglang.srt.mem_cache.layouts.pages import PageArray, pages_of_tokens
from sglang.srt.mem_cache.layouts.rounding import ceil_div

if TYPE_CHECKING:
    import random

    from kvlayouts.soak.late_copies import LateTransfer
    from sglang.srt.mem_cache.hicache.radix_cache import HiRadixCache
    from sglang.srt.mem_cache.hicache.tree.node import LayoutTreeNode


@dataclass(slots=True, kw_only=True, eq=False)
class Running:
    """A request: `pages` are all its logical pages, the first `shared` of them the tree's; `node` is locked."""

    tokens: array[int]
    sums: Words
    pages: PageArray
    shared: int
    node: LayoutTreeNode[Any]
    priority: int


class Requests:
    """The running requests of one rank, equal on all ranks. `calls` counts primitive calls on the cache."""

    def __init__(self, cache: HiRadixCache[Any], content: KVContent, transfer: LateTransfer, *, seed: int) -> None:
        self._cache = cache
        self._content = content
        self._transfer = transfer
        self._seed = seed
        self._page_size = cache.page_size
        self.running: list[Running] = []
        self.calls = 0
        self.verified_tokens = 0
        self._wrong: list[str] = []

    @property
    def held_pages(self) -> int:
        """Logical pages that requests have and the tree does not."""
        return sum(len(request.pages) - request.shared for request in self.running)

    def pick(self, plan: random.Random) -> Running | None:
        """One of the running requests."""
        return plan.choice(self.running) if self.running else None

    def start(
        self, tokens: array[int], *, quota: int | None, first_chunk_pages: int | None, priority: int, start_load: bool
    ) -> str:
        """Begin a request; it runs afterwards unless there was no room."""
        cache = self._cache
        match = cache.match(RadixKey(tokens[:-1]))
        loaded, node = match.slots[:0], match.device_node
        if match.host_tokens:
            loaded, node = cache.bring_back(match.host_node, quota)
        cache.inc_lock_ref(node)
        self.calls += 3
        if start_load:
            self._run_loads()
        prefix = pages_of_tokens(torch.cat([match.slots, loaded]), self._page_size)
        request = Running(
            tokens=tokens,
            sums=prefix_sums(np.frombuffer(tokens, dtype=np.int64), self._seed),
            pages=prefix,
            shared=len(prefix),
            node=node,
            priority=priority,
        )
        total = ceil_div(len(tokens), self._page_size)
        chunk = total - len(prefix) if first_chunk_pages is None else min(first_chunk_pages, total - len(prefix))
        self.running.append(request)
        grown = self._grow(request, chunk)
        hits = f"device {len(match.slots)}, host {match.host_tokens}, loaded {len(loaded)}"
        return f"{len(tokens)} tokens: {hits}, {chunk} new pages{'' if grown else ', no room'}"

    def continue_(self, request: Running, pages: int) -> str:
        """Insert what is computed so far and allocate up to `pages` more."""
        self._give_to_tree(request, chunked=True)
        left = ceil_div(len(request.tokens), self._page_size) - len(request.pages)
        if left == 0:
            return "nothing left to compute"
        return f"{min(pages, left)} more pages{'' if self._grow(request, min(pages, left)) else ', no room'}"

    def finish(self, request: Running) -> str:
        """Complete a request, however far it got."""
        self._give_to_tree(request, chunked=False)
        return self._end(request)

    def abort(self, request: Running) -> str:
        """End a request without giving the tree anything."""
        return self._end(request)

    def node_in_flight(self, plan: random.Random) -> LayoutTreeNode[Any] | None:
        """A node whose backup or load is under way."""
        flight = self._cache.parts.in_flight
        nodes = [backup.node for backup in flight.backups.values()] + [load.last for load in flight.loads.values()]
        return plan.choice(nodes) if nodes else None

    def prompt_of(self, node: LayoutTreeNode[Any]) -> array[int]:
        """All tokens from the root to the end of `node`."""
        path: list[LayoutTreeNode[Any]] = []
        while node.parent is not None:
            path.append(node)
            node = node.parent
        tokens = array("q")
        for part in reversed(path):
            tokens.extend(part.key.token_ids)
        return tokens

    def wrong_bytes(self) -> list[str]:
        """Check every node on the device that is not being loaded, and report all that was found wrong so far."""
        loading = {node for load in self._cache.parts.in_flight.loads.values() for node in load.nodes()}
        for node in self._cache.nodes():
            if node.value is not None and node not in loading:
                tokens = self.prompt_of(node)
                sums = prefix_sums(np.frombuffer(tokens, dtype=np.int64), self._seed)[-node.tokens :]
                self._check(node.slot_pages, sums, f"node {node.id}")
        wrong, self._wrong = self._wrong, []
        return wrong

    # Steps.

    def _grow(self, request: Running, pages: int) -> bool:
        """Allocate and write `pages` more pages; without room the request is aborted."""
        cache, have = self._cache, len(request.pages)
        base = cache.layout.chain_base(request.tokens[: self._page_size].tobytes(), "")
        fresh = cache.alloc_slots(cache.layout.extend_lanes(base, have, pages))
        self.calls += 1
        if fresh is None:
            self._end(request)
            return False
        request.pages = np.concatenate([request.pages, fresh])
        sums = self._sums(request, have, len(request.pages))
        self._content.write(*stored_rows(cache.layout, fresh, sums))
        return True

    def _give_to_tree(self, request: Running, *, chunked: bool) -> None:
        """Insert whole pages, free duplicates, and hold the tree's pages and lock from now on."""
        cache, size = self._cache, self._page_size
        whole = min(len(request.pages), len(request.tokens) // size)
        self._run_loads()
        self._check(request.pages[:whole], self._sums(request, 0, whole), "a running request")
        if whole == 0:
            return
        key = RadixKey(request.tokens[: whole * size])
        value = cache.slots.slots(request.pages[:whole])
        inserted = cache.put(Insertion(key=key, value=value, priority=request.priority, is_use=not chunked))
        known = inserted.known_tokens // size
        cache.slots.free_slot_pages(request.pages[request.shared : known])
        match = cache.match(RadixKey(request.tokens[: whole * size]))
        cache.inc_lock_ref(match.device_node)
        cache.dec_lock_ref(request.node)
        self.calls += 4
        request.node = match.device_node
        request.pages = np.concatenate([pages_of_tokens(match.slots, size), request.pages[whole:]])
        request.shared = whole

    def _end(self, request: Running) -> str:
        self._cache.slots.free_slot_pages(request.pages[request.shared :])
        self._cache.dec_lock_ref(request.node)
        self.calls += 1
        self.running.remove(request)
        return f"{len(request.tokens)} tokens"

    def _run_loads(self) -> None:
        """Start what is queued and wait for it, as the forward pass that needs it does."""
        self._cache.ready_to_load_host_cache()
        self._transfer.finish_loads()
        self.calls += 1

    # Rows.

    def _sums(self, request: Running, first: int, end: int) -> Words:
        """Prefix sums of pages ``first .. end - 1``, ``[pages, page_size]``; a partial page is padded."""
        size = self._page_size
        padded = np.pad(request.sums, (0, -len(request.sums) % size), mode="edge")
        return padded[first * size : end * size].reshape(end - first, size)

    def _check(self, pages: PageArray, sums: Words, whose: str) -> None:
        rows, expected = stored_rows(self._cache.layout, pages, sums)
        self.verified_tokens += expected.size
        wrong = self._content.mismatched_tokens(rows, expected)
        if wrong:
            self._wrong.append(f"{wrong} tokens of {whose} have wrong bytes among slot pages {pages}")
