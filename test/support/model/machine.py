"""The state machine that drives a `Group` of ranks and the plain `Model` side by side; see test_model_based.py."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from typing_extensions import override

from sglang.srt.mem_cache.hicache.accepted import WritePolicy
from sglang.srt.mem_cache.hicache.check.invariants import violations
from sglang.srt.mem_cache.hicache.tree.calls import Insertion
from support.caches import CacheSpec, chain
from support.groups import Group, Request, chain_lanes, pages_of
from support.model.sets import AHEAD, Model, Pages, Prefix, prefixes

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable

    from sglang.srt.mem_cache.hicache.tree.node import LayoutTreeNode
    from support.caches import Rank

CHAINS = st.builds(
    lambda namespace, pages: (namespace, *pages),
    st.sampled_from([None, None, None, "adapter"]),
    st.lists(st.integers(0, 1), min_size=1, max_size=6),
)
COUNTS = st.integers(1, 6)
MAX_RUNNING = 3
MAX_CHAIN = 8


class CacheMachine(RuleBasedStateMachine):
    """Random calls of a scheduler, the same on all ranks; copies end on each rank when the rules say so."""

    layout: str  # of the class that binds it

    @initialize(
        ranks=st.sampled_from([2, 3, 4, 1]),
        policy=st.sampled_from(get_args(WritePolicy)),
        eviction=st.sampled_from(["lru", "lfu", "slru", "priority"]),
        room=st.integers(6, 14),
        host=st.sampled_from([3, 4, 5, 8, 12, 20]),
        threshold=st.integers(1, 2),
    )
    def build(self, ranks: int, policy: WritePolicy, eviction: str, room: int, host: int, threshold: int) -> None:
        """Small pools, so that every tier is short of room."""
        asked = CacheSpec(layout=self.layout, ranks=ranks, policy=policy, eviction=eviction, load_back_pages=threshold)
        lanes = asked.lanes
        spec = replace(asked, device_pages=-(-room // lanes), host_pages=max(2, -(-host // asked.host_lanes)))
        self.group = Group(spec)
        self.group.hold()
        self.requests: list[tuple[Request, Prefix]] = []
        self.pins: list[tuple[list[LayoutTreeNode[Any]], Prefix]] = []
        self.model = Model(ranks=ranks, capacity=spec.device_pages * lanes, policy=policy, threshold=threshold)
        self.step = self.late = 0
        self.copies: dict[int, Prefix] = {}  # backups under way, oldest first, and what each locks
        self.copied_to_evict = False

    # Requests.

    @rule(chain=CHAINS, quota=st.sampled_from([None, None, None, 0, 2, 5]))
    def start(self, chain: Prefix, quota: int | None) -> None:
        """Match, load back within the quota, lock, allocate."""
        if len(self.requests) == MAX_RUNNING:
            return
        model, group = self.model, self.group
        on_device, on_host = model.match(chain)
        may_load, must_load = model.may_load(chain, quota), self._room_for(chain, on_device, on_device + on_host)
        before = self._count(lambda rank: len(rank.engine.loads))
        request = group.start(
            self._tokens(chain), _namespace(chain), quota=None if quota is None else quota * group.spec.page_size
        )
        group.each(lambda rank: rank.engine.run_loads())  # as the next forward pass waits for, whoever runs in it
        loaded = self._count(lambda rank: len(rank.engine.loads)) - before
        assert loaded <= may_load, "a load below the threshold or above the quota"
        assert loaded == 1 or not (may_load and must_load), "a load with room enough was refused"
        prefix = chain[: 1 + on_device + on_host * loaded]
        if loaded:
            model.device |= frozenset(prefixes(prefix))
            model.loads.pending.append((prefix,))
        model.locks.append(prefix)
        self._note_eviction()
        model.evicted(*self._tiers())
        if request is None:
            assert not self._room_with_evictions(chain, len(prefix) - 1), "a request with room enough was refused"
            model.locks.remove(prefix)
            return
        assert (request.device_pages, request.host_pages) == (on_device, on_host * loaded)
        model.held += len(chain) - len(prefix)
        self.requests.append((request, prefix))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), count=COUNTS)
    def insert_chunk(self, data: st.DataObject, count: int) -> None:
        """A chunk of a running request enters the tree; the request goes on below it."""
        at = data.draw(st.integers(0, len(self.requests) - 1))
        request, prefix = self.requests[at]
        namespace, size = request.namespace, self.group.spec.page_size
        pages = min(len(request.pages), request.prefix_pages + count)
        tokens, key = request.tokens[: pages * size], (*self._chain_of(request)[: pages + 1],)
        duplicates = self._insert(request, tokens, chunked=True, priority=0)
        assert duplicates == self.model.inserted(key, *self._tiers(), chunked=True)
        again = request.pages[request.prefix_pages : duplicates]
        for rank in self.group.ranks:
            rank.allocator.free_slot_pages(again)
            match = rank.cache.match(rank.key(tokens, namespace))
            rank.cache.inc_lock_ref(match.device_node)
            rank.cache.dec_lock_ref(request.nodes[rank.number])
            request.nodes[rank.number] = match.device_node
            found = pages_of(match.slots, size)
        self.model.held -= pages - request.prefix_pages
        request.pages = np.concatenate([found, request.pages[pages:]])
        request.device_pages, request.host_pages = pages, 0
        self.model.locks.remove(prefix)
        self.model.locks.append(key)
        self.requests[at] = (request, key)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), priority=st.integers(0, 3))
    def finish(self, data: st.DataObject, priority: int) -> None:
        """A request ends: its KV goes to the tree, with a priority, and is backed up as the policy says."""
        self._finish(data.draw(st.integers(0, len(self.requests) - 1)), priority)

    def _finish(self, at: int, priority: int) -> None:
        request, prefix = self._take(at)
        chain = self._chain_of(request)
        has_room = self._host_room_for(chain)
        self.group.verify(request, len(request.pages))
        duplicates = self._insert(request, request.tokens, chunked=False, priority=priority)
        assert duplicates == self.model.inserted(chain, *self._tiers(), chunked=False)
        self.group.each(lambda rank: rank.allocator.free_slot_pages(request.pages[request.prefix_pages : duplicates]))
        self._note_backups()
        self.group.each(lambda rank: rank.cache.dec_lock_ref(request.nodes[rank.number]))
        self._end(request, prefix)
        if self.model.policy == "write_through" and has_room:
            assert set(prefixes(chain)) <= self.model.host, "a hit was not backed up, though the host had room"

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """A request ends without a trace."""
        request, prefix = self._take(data.draw(st.integers(0, len(self.requests) - 1)))
        self.group.each(lambda rank: rank.allocator.free_slot_pages(request.pages[request.prefix_pages :]))
        self.group.each(lambda rank: rank.cache.dec_lock_ref(request.nodes[rank.number]))
        self._end(request, prefix)

    @rule(chain=CHAINS, ends=st.booleans())
    def serve(self, chain: Prefix, ends: bool) -> None:
        """A whole request at once, with all copies at its end or with none: what most calls of a server add up to."""
        running = len(self.requests)
        self.start(chain, None)
        if len(self.requests) > running:
            self._finish(len(self.requests) - 1, 0)
        if ends:
            self._all_copies_end()
            self.settle()

    @precondition(lambda self: self.model.host - self.model.device)
    @rule(data=st.data(), loads=st.lists(st.integers(0, 2), min_size=4, max_size=4), settles=st.booleans())
    def start_on_the_host(self, data: st.DataObject, loads: list[int], settles: bool) -> None:
        """A request for what has left the device; some ranks see the end of its load before the next turn, some not."""
        self.start(data.draw(st.sampled_from(sorted(self.model.host - self.model.device, key=repr))), None)
        self.copies_end([(0, count) for count in loads])
        if settles:
            self.settle()

    @precondition(lambda self: any(len(page) < MAX_CHAIN for page in self.model.device))
    @rule(data=st.data(), page=st.integers(0, 1))
    def serve_below(self, data: st.DataObject, page: int) -> None:
        """A request that goes on where an earlier one has ended."""
        known = sorted((known for known in self.model.device if len(known) < MAX_CHAIN), key=repr)
        self.serve((*data.draw(st.sampled_from(known)), page), False)

    # The tree alone.

    @rule(chain=CHAINS, pin=st.booleans())
    def match(self, chain: Prefix, pin: bool) -> None:
        """A match, which may split a node and keep its end locked."""
        size, namespace = self.group.spec.page_size, _namespace(chain)
        matches = self.group.each(lambda rank: rank.cache.match(rank.key(self._tokens(chain), namespace)))
        found = {(len(match.slots) // size, match.host_tokens // size) for match in matches}
        assert found == {self.model.match(chain)}
        if pin and len(self.pins) < MAX_RUNNING:
            self.group.each(lambda rank: rank.cache.inc_lock_ref(matches[rank.number].device_node))
            self.pins.append(([match.device_node for match in matches], chain[: 1 + found.pop()[0]]))
            self.model.locks.append(self.pins[-1][1])

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        """Undo a lock."""
        nodes, prefix = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        self.group.each(lambda rank: rank.cache.dec_lock_ref(nodes[rank.number]))
        self.model.locks.remove(prefix)

    @rule(pages=st.integers(1, 14))
    def evict_device(self, pages: int) -> None:
        """Eviction frees what is asked for, if so much is unlocked, and says how much."""
        size, evictable = self.group.spec.page_size, len(self.model.evictable)
        tokens = self._count(lambda rank: rank.cache.evict(EvictParams(num_tokens=pages * size)).num_tokens_evicted)
        assert tokens >= min(pages, evictable) * size
        self._note_eviction()
        assert tokens == self.model.evicted(*self._tiers()) * size

    @rule(pages=COUNTS)
    def evict_host(self, pages: int) -> None:
        """Eviction from the host takes pages that the device does not have."""
        tokens = self._count(lambda rank: rank.cache.evict_host(pages * rank.spec.page_size))
        device, host = self._tiers()
        assert device == self.model.device
        assert tokens == self.model.host_evicted(host) * self.group.spec.page_size

    # Acknowledgements.

    @rule()
    def submit(self) -> None:
        """The results of a batch are in the tree: what it queued is submitted, as one copy."""
        queued = sum(len(ids) for ids in self._backup_acks()) < len(self.copies)
        before = self._count(lambda rank: len(rank.engine.writes))
        self.group.submit()
        assert self._count(lambda rank: len(rank.engine.writes)) - before == queued, "not one copy for what was queued"
        self._note_acks()

    @rule(ends=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=4, max_size=4))
    def copies_end(self, ends: list[tuple[int, int]]) -> None:
        """On each rank some copies end; each sees it at its own time."""
        for rank, (writes, loads) in zip(self.group.ranks, ends, strict=False):
            rank.engine.finish_writes(writes)
            rank.engine.finish_loads(loads)
            self.model.writes.deliver(rank.number, writes)
            self.model.loads.deliver(rank.number, loads)

    def _all_copies_end(self) -> None:
        self.copies_end([(1_000, 1_000)] * self.group.spec.ranks)

    @rule()
    def settle(self) -> None:
        """One turn of the event loop, which submits what is queued before it settles what has ended."""
        self.submit()
        self.group.settle()
        done = self.model.writes.settle()
        self.model.loads.settle()
        self.copies = dict(list(self.copies.items())[done:])
        self._note_acks()

    @precondition(lambda self: not self.requests and not self.pins)
    @rule()
    def reset(self) -> None:
        """Drop everything, copies under way included."""
        for rank in self.group.ranks:
            rank.cache.reset()
            rank.allocator.clear()
            rank.engine.waits = 0
        self.model.reset()
        self.copies = {}

    # After every step.

    @invariant()
    def ranks_are_equal_and_the_model_agrees(self) -> None:
        """Digests, queues and locks on all ranks; recounted invariants; sets and bytes on one rank after the other."""
        group, model = self.group, self.model
        self.step += 1
        assert len(set(group.digests())) == 1, "tree digests differ"
        model.check()
        assert self._tiers() == (model.device, model.host)
        for rank in group.ranks:
            cache, size = rank.cache, group.spec.page_size
            assert not (broken := violations(cache, held_slot_pages=model.held)), broken
            assert cache.protected_size() == len(model.protected) * size
            assert cache.evictable_size() == len(model.evictable) * size
            assert rank.allocator.available_size() == model.free * size
            assert len(rank.controller.ack_write_queue) == len(model.writes.pending)
            assert len(rank.controller.ack_load_queue) == len(model.loads.pending)
            assert self.copied_to_evict or not rank.engine.waits, "the scheduler waited for a copy that nothing needed"
        self._check_bytes(group.ranks[self.step % group.spec.ranks])

    @override
    def teardown(self) -> None:
        """End everything; what is left on the host comes back byte for byte; nothing stays locked or taken."""
        if not hasattr(self, "group"):
            return
        for running in list(self.group.running):
            self.group.abort(running)
        for nodes, _ in self.pins:
            for rank, node in zip(self.group.ranks, nodes, strict=True):
                rank.cache.dec_lock_ref(node)
        self.group.release()
        self.group.settle()
        self.group.evict_all()
        for page in sorted(self._tiers()[1], key=lambda page: (-len(page), repr(page)))[:4]:
            request = self.group.start(self._tokens(page), _namespace(page))  # compares the bytes
            if request is not None:
                self.group.abort(request)
        self.group.settle()
        self.group.evict_all()
        self.group.agreed(lambda rank: rank.cache.evict_host(1_000_000))
        for rank in self.group.ranks:
            assert (rank.nodes(), rank.allocator.available_size()) == ([], rank.allocator.size)
            assert rank.host_free_pages() == self.group.host_pages[rank.number]
            assert not any(rank.controller.ledger.used_pages)

    # Helpers.

    def _tokens(self, pages: Prefix) -> array[int]:
        return chain(self.group.spec, *(int(page or 0) for page in pages[1:]))

    def _chain_of(self, request: Request) -> Prefix:
        size = self.group.spec.page_size
        return (request.namespace, *(token // 1_000 for token in request.tokens[::size]))

    def _count(self, call: Callable[[Rank], int]) -> int:
        return self.group.agreed(call)

    def _tiers(self) -> tuple[Pages, Pages]:
        """The pages that rank 0's tree has on the device and on the host."""
        device: set[Prefix] = set()
        host: set[Prefix] = set()
        for node, path in self._paths(self.group.ranks[0]):
            own = list(prefixes(path))[len(path) - 1 - node.tokens // self.group.spec.page_size :]
            device.update(own if node.value is not None else ())
            host.update(own if node.metadata is not None else ())
        return frozenset(device), frozenset(host)

    def _paths(self, rank: Rank) -> list[tuple[LayoutTreeNode[Any], Prefix]]:
        size = rank.spec.page_size
        paths: dict[LayoutTreeNode[Any], Prefix] = {}
        for node in rank.cache.nodes():
            assert node.parent is not None
            above = paths.get(node.parent, (node.key.extra_key,))
            paths[node] = (*above, *(token // 1_000 for token in node.key.token_ids[::size]))
        return list(paths.items())

    def _check_bytes(self, rank: Rank) -> None:
        for node, path in self._paths(rank):
            pages = len(path) - 1
            if node.value is not None:
                wrong = rank.mismatches(self._tokens(path), node.slot_pages, first_page=pages - len(node.slot_pages))
                assert not wrong, f"{wrong} pages of {path} on rank {rank.number}"

    def _insert(self, request: Request, tokens: array[int], *, chunked: bool, priority: int) -> int:
        pages = len(tokens) // self.group.spec.page_size

        def insert(rank: Rank) -> int:
            key, value = rank.key(tokens, request.namespace), rank.cache.slots.slots(request.pages[:pages])
            return rank.cache.put(Insertion(key=key, value=value, priority=priority, is_use=not chunked)).known_tokens

        return self._count(insert) // self.group.spec.page_size

    def _note_backups(self) -> None:
        """Backups that this insert queued, as the prefixes that they lock."""
        rank = self.group.ranks[0]
        paths = dict(self._paths(rank))
        for backup_id, backup in list(rank.cache.parts.in_flight.backups.items())[len(self.copies) :]:
            self.copies[backup_id] = paths[backup.node]
        self._note_acks()

    def _note_eviction(self) -> None:
        """Backups that evictions waited for are done, and all before them; those that they began lock nothing."""
        writes, before, after = self.model.writes, list(self.copies), self._backups()
        waited = next(done for done in range(len(before) + 1) if after[: len(before) - done] == before[done:])
        late, began = self._count(lambda rank: rank.cache.stats.late_backups), after[len(before) - waited :]
        self.copied_to_evict |= late > self.late or bool(began)
        submissions = len(writes.pending) if waited else 0
        if 0 < waited < len(before):
            submissions = [*accumulate(len(together) for together in writes.pending)].index(waited) + 1
            assert AHEAD in writes.pending[submissions - 1], "an eviction waited for a copy of what cannot leave"
        assert not began or self.model.policy != "write_back", "write_back copies ahead"
        writes.finish(submissions)
        self.late, self.copies = late, {backup_id: self.copies.get(backup_id, AHEAD) for backup_id in after}
        self._note_acks()
        assert not began or not writes.queued, "copies ahead were not submitted"

    def _note_acks(self) -> None:
        """Which of the backups under way were submitted together, and which are still queued."""
        ids = iter(self.copies)
        self.model.writes.pending = [tuple(self.copies[next(ids)] for _ in group) for group in self._backup_acks()]
        self.model.writes.queued = tuple(self.copies[backup_id] for backup_id in ids)

    def _backups(self) -> list[int]:
        """The backups under way, oldest first."""
        (ids,) = {tuple(rank.cache.parts.in_flight.backups) for rank in self.group.ranks}
        return list(ids)

    def _backup_acks(self) -> list[tuple[int, ...]]:
        """The backups of each ack, oldest first."""
        (acks,) = {tuple(tuple(ack.node_ids) for ack in rank.controller.ack_write_queue) for rank in self.group.ranks}
        return list(acks)

    def _take(self, at: int) -> tuple[Request, Prefix]:
        request, prefix = self.requests.pop(at)
        self.group.running.remove(request)
        return request, prefix

    def _end(self, request: Request, prefix: Prefix) -> None:
        self.model.held -= len(request.pages) - request.prefix_pages
        self.model.locks.remove(prefix)

    def _needs(self, chain: Prefix, first: int, end: int) -> np.ndarray[Any, Any]:
        rank = self.group.ranks[0]
        lanes = chain_lanes(rank, self._tokens(chain), _namespace(chain), first, end)
        return np.bincount(lanes, minlength=rank.layout.lane_count)

    def _host_room_for(self, chain: Prefix) -> bool:
        """Whether all pages of a chain that have no host copy fit into what is free there."""
        backed_up = sum(page in self.model.host for page in prefixes(chain))
        free = self.group.ranks[0].controller.ledger.free_pages
        spec = self.group.spec
        if spec.exchanges:  # owned by slot: which lanes are short, a chain does not say
            return len(chain) - 1 - backed_up <= min(free)
        return bool((self._needs(chain, backed_up, len(chain) - 1) <= free).all())

    def _room_for(self, chain: Prefix, first: int, end: int) -> bool:
        return bool((self._needs(chain, first, end) <= self.group.ranks[0].allocator.room_pages()).all())

    def _room_with_evictions(self, chain: Prefix, first: int) -> bool:
        rank = self.group.ranks[0]
        room = rank.allocator.room_pages()
        for node, path in self._paths(rank):
            for at, page in enumerate(reversed(node.slot_pages.tolist())):
                room[page % len(room)] += path[: len(path) - at] in self.model.evictable
        return bool((self._needs(chain, first, len(chain) - 1) <= room).all())


def _namespace(pages: Prefix) -> str | None:
    return None if pages[0] is None else str(pages[0])
