"""All ranks of a shard group in one process, driven in lockstep, and what must hold between two steps.

    group = Group(CacheSpec(ranks=4))
    request = group.start(chain(spec, 1, 2, 3))     match, load back, lock, allocate, write KV
    group.finish(request)                           insert, free duplicates, unlock
    group.settle()                                  check_hicache_events on every rank
    group.check()                                   the invariants below

Every call is made on each rank with the same arguments, and the answers must be equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from sglang.srt.mem_cache.hicache.check.digest import tree_digest
from sglang.srt.mem_cache.hicache.check.invariants import violations
from sglang.srt.mem_cache.hicache.tree.calls import Insertion
from support.caches import CacheSpec, Rank

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Sequence

    import torch
    from sglang.srt.mem_cache.memory_pool import KVCache

    from sglang.srt.mem_cache.hicache.tree.node import LayoutTreeNode
    from sglang.srt.mem_cache.layouts.pages import LaneArray, PageArray

ResultT = TypeVar("ResultT")


class Lockstep:
    """Minima over ranks that are called one after the other: all values are gathered before anyone hears one."""

    def __init__(self, ranks: int) -> None:
        self.calls = [0] * ranks
        self._values: list[tuple[int, ...]] = []

    def gather(self, values: Sequence[Sequence[int]]) -> None:
        """What each rank will ask about next."""
        self._values = [tuple(own) for own in values]

    def answer(self, rank: int, values: Sequence[int]) -> tuple[int, ...]:
        """The minimum, for a rank that asks about what was gathered from it."""
        self.calls[rank] += 1
        assert tuple(values) == self._values[rank], f"rank {rank} asks about {values}, not {self._values[rank]}"
        return tuple(min(column) for column in zip(*self._values, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One rank's `Agreement`."""

    lockstep: Lockstep
    rank: int

    def minimum(self, values: Sequence[int]) -> tuple[int, ...]:
        """See `Agreement`."""
        return self.lockstep.answer(self.rank, values)

    def capacity(self, value: int) -> int:
        """See `Agreement`."""
        return self.minimum([value])[0]


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A running request: its prefix is locked in the tree, the pages after `prefix_pages` are its own."""

    tokens: array[int]
    namespace: str | None
    pages: PageArray
    nodes: list[LayoutTreeNode[Any]]
    device_pages: int
    host_pages: int

    @property
    def prefix_pages(self) -> int:
        """Pages found in the cache."""
        return self.device_pages + self.host_pages


class Group:
    """The ranks of one shard group; `host_pages` and `device_pools` are theirs where they differ."""

    def __init__(
        self,
        spec: CacheSpec,
        *,
        host_pages: Sequence[int] | None = None,
        device_pools: Sequence[KVCache] | None = None,
    ) -> None:
        self.spec = spec
        self.lockstep = Lockstep(spec.ranks)
        sizes = list(host_pages) if host_pages is not None else [spec.host_pages] * spec.ranks
        self.capacity_pages = min(sizes)
        self.lockstep.gather([[size] for size in sizes])
        self.ranks = [
            Rank(
                spec,
                rank,
                Seat(lockstep=self.lockstep, rank=rank),
                device_pool=None if device_pools is None else device_pools[rank],
                host_ratio=(size - 0.5) / spec.device_pages,
            )
            for rank, size in enumerate(sizes)
        ]
        self.host_pages = sizes
        self.running: list[Request] = []
        self._turn = 0

    def each(self, call: Callable[[Rank], ResultT]) -> list[ResultT]:
        """`call` on every rank, in order."""
        return [call(rank) for rank in self.ranks]

    def agreed(self, call: Callable[[Rank], ResultT]) -> ResultT:
        """`call` on every rank; the answers must be equal."""
        answers = self.each(call)
        assert all(answer == answers[0] for answer in answers), f"the ranks answer {answers}"
        return answers[0]

    # What a scheduler does.

    def start(self, tokens: array[int], namespace: str | None = None, *, quota: int | None = None) -> Request | None:
        """Match, load back, lock, allocate the rest and write it; None, nothing held, if there is no room."""
        size = self.spec.page_size
        matches = self.each(lambda rank: rank.cache.match(rank.key(tokens, namespace)))
        device_pages, promised = self.agreed(
            lambda rank: (len(matches[rank.number].slots), matches[rank.number].host_tokens)
        )
        found = [pages_of(match.slots, size) for match in matches]
        nodes = [match.device_node for match in matches]
        if promised:
            loads = [
                rank.cache.bring_back(match.host_node, quota) for rank, match in zip(self.ranks, matches, strict=True)
            ]
            nodes = [node for _, node in loads]
            found = [np.concatenate([old, pages_of(new, size)]) for old, (new, _) in zip(found, loads, strict=True)]
            self.agreed(lambda rank: rank.cache.ready_to_load_host_cache())
        prefix = self._equal(found)
        self.each(lambda rank: rank.cache.inc_lock_ref(nodes[rank.number]))
        own = self._alloc(tokens, namespace, len(prefix))
        if own is None:
            self.each(lambda rank: rank.cache.dec_lock_ref(nodes[rank.number]))
            return None
        request = Request(
            tokens=tokens,
            namespace=namespace,
            pages=np.concatenate([prefix, own]),
            nodes=nodes,
            device_pages=device_pages // size,
            host_pages=len(prefix) - device_pages // size,
        )
        self.each(lambda rank: rank.engine.run_loads())
        self.verify(request, request.prefix_pages)
        self.each(lambda rank: rank.write(tokens, own, first_page=len(prefix)))
        self.running.append(request)
        return request

    def verify(self, request: Request, pages: int) -> None:
        """The first `pages` pages of a request hold, on their owners, the bytes of its prefix."""
        wrong = self.each(lambda rank: rank.mismatches(request.tokens, request.pages[:pages]))
        assert not any(wrong), f"wrong pages per rank: {wrong}"

    def finish(self, request: Request, *, submit: bool = True) -> int:
        """Insert a request's KV, free what the tree had already, unlock. Returns the duplicate tokens.

        Its backups are submitted, unless more requests end with the same batch.
        """
        self.running.remove(request)
        self.verify(request, len(request.pages))
        size = self.spec.page_size
        duplicates = self.agreed(
            lambda rank: (
                rank.cache.put(
                    Insertion(
                        key=rank.key(request.tokens, request.namespace), value=rank.cache.slots.slots(request.pages)
                    )
                ).known_tokens
            )
        )
        again = request.pages[request.prefix_pages : duplicates // size]
        self.each(lambda rank: rank.allocator.free_slot_pages(again))
        self.each(lambda rank: rank.cache.dec_lock_ref(request.nodes[rank.number]))
        if submit:
            self.submit()
        return duplicates

    def submit(self) -> None:
        """The results of a batch are in the tree: submit the backups that it queued."""
        self.each(lambda rank: rank.cache.parts.transfers.submit_backups())

    def abort(self, request: Request) -> None:
        """Drop a running request: its own pages are freed, its prefix unlocked."""
        self.running.remove(request)
        self.each(lambda rank: rank.allocator.free_slot_pages(request.pages[request.prefix_pages :]))
        self.each(lambda rank: rank.cache.dec_lock_ref(request.nodes[rank.number]))

    def serve(self, tokens: array[int], namespace: str | None = None) -> Request:
        """A whole request, acks settled."""
        request = self.start(tokens, namespace)
        assert request is not None, "the request finds no room"
        self.finish(request)
        self.settle()
        return request

    def settle(self) -> None:
        """One turn of the event loop on every rank: ready counts are gathered before anyone settles."""
        self.submit()  # as the turn does, whose counts are gathered here beforehand
        self.lockstep.gather([self.ready(rank) for rank in self.ranks])
        self.each(lambda rank: rank.cache.check_hicache_events())

    def ready(self, rank: Rank) -> tuple[int, int]:
        """Acks at the head of the write and of the load queue that the rank can see the end of."""
        queues = (rank.controller.ack_write_queue, rank.controller.ack_load_queue)
        seen = [[ack.finish_event.query() for ack in queue] for queue in queues]
        return seen[0].index(False) if False in seen[0] else len(seen[0]), (
            seen[1].index(False) if False in seen[1] else len(seen[1])
        )

    def hold(self, *ranks: int) -> None:
        """From now on the copies of these ranks, or of all, end only when told to."""
        for rank in ranks or range(self.spec.ranks):
            self.ranks[rank].engine.held = True

    def release(self, *ranks: int) -> None:
        """End what these ranks, or all, hold back, and hold no more."""
        for rank in ranks or range(self.spec.ranks):
            engine = self.ranks[rank].engine
            engine.held = False
            engine.finish_writes()
            engine.finish_loads()

    def evict_all(self) -> None:
        """Everything unlocked leaves the device, whatever the demand, and other bytes take its place."""
        self.agreed(lambda rank: rank.cache.parts.device_room.evict_until(lambda _, __: False))
        self.each(lambda rank: rank.scribble())

    def digests(self) -> list[int]:
        """One digest of the mirrored state a rank."""
        return self.each(lambda rank: tree_digest(rank.cache))

    def check(self) -> None:
        """Raise AssertionError unless every invariant of tree, tiers, locks, orders and ledger holds.

        What the digests show to be equal is looked at on one rank, another one each time.
        """
        assert len(set(self.digests())) == 1, "tree digests differ"
        held = sum(len(request.pages) - request.prefix_pages for request in self.running)
        self._turn = (self._turn + 1) % self.spec.ranks
        check_slots(self.ranks[self._turn], held_pages=held)
        check_nodes(self.ranks[self._turn])
        for rank in self.ranks:
            check_orders(rank)
            check_host(rank, surplus_pages=self.host_pages[rank.number] - self.capacity_pages)
        broken = violations(self.ranks[self._turn].cache, held_slot_pages=held)
        assert not broken, broken

    def _alloc(self, tokens: array[int], namespace: str | None, first_page: int) -> PageArray | None:
        size = self.spec.page_size
        pages = len(tokens) // size
        taken = self.each(lambda rank: rank.cache.alloc_slots(chain_lanes(rank, tokens, namespace, first_page, pages)))
        if taken[0] is None:
            assert all(own is None for own in taken)
            return None
        return self._equal([own for own in taken if own is not None])

    def _equal(self, arrays: list[PageArray]) -> PageArray:
        assert len(arrays) == self.spec.ranks
        assert all(np.array_equal(arrays[0], other) for other in arrays), f"the ranks have pages {arrays}"
        return arrays[0]


def chain_lanes(rank: Rank, tokens: array[int], namespace: str | None, first: int, end: int) -> LaneArray:
    """Owners that pages ``first .. end - 1`` of a chain must have."""
    base = rank.layout.chain_base(tokens[: rank.spec.page_size].tobytes(), namespace or "")
    return rank.layout.extend_lanes(base, first, end - first)


def pages_of(slots: torch.Tensor, page_size: int) -> PageArray:
    """Page numbers of whole pages of slots."""
    whole = slots.numpy().reshape(-1, page_size)
    pages = whole[:, 0] // page_size
    assert bool((whole == pages[:, None] * page_size + np.arange(page_size)).all()), f"no whole pages: {slots}"
    return pages


def check_slots(rank: Rank, *, held_pages: int = 0) -> None:
    """Every slot is free, in the tree, or a running request's, and the tree counts its own rightly."""
    cache, size = rank.cache, rank.spec.page_size
    evictable = sum(node.tokens for node in rank.nodes() if node.value is not None and node.lock_ref == 0)
    protected = sum(node.tokens for node in rank.nodes() if node.value is not None and node.lock_ref > 0)
    assert (cache.evictable_size(), cache.protected_size()) == (evictable, protected)
    total = rank.allocator.available_size() + evictable + protected + held_pages * size
    assert total == rank.allocator.size, f"{total} slots of {rank.allocator.size} are accounted for"
    assert len(set(cache.all_values_flatten().tolist())) == cache.total_size() == evictable + protected


def check_nodes(rank: Rank) -> None:
    """Each node's slots, metadata, locks and children go together."""
    for node in rank.nodes():
        parent = node.parent
        assert parent is not None
        assert parent.children[node.key.child_key(rank.spec.page_size)] is node
        assert node.value is not None or node.metadata is not None, f"node {node.id} holds nothing"
        assert node.host_len in (0, node.tokens)
        assert (node.host_value is None) == (rank.spec.layout == "cp_shared" or node.metadata is None)
        if node.value is not None:
            assert parent.value is not None, f"node {node.id} is on the device, its parent is not"
            assert np.array_equal(pages_of(node.value, rank.spec.page_size), node.slot_pages)
            assert len(node.value) == node.tokens
        if node.metadata is not None and rank.spec.policy != "write_back":
            assert parent.backuped, f"node {node.id} is backed up, its parent is not"
        if not parent.is_root:
            assert parent.lock_ref >= node.lock_ref


def check_orders(rank: Rank) -> None:
    """Both eviction orders hold exactly the nodes that a look at the whole tree finds."""
    nodes = rank.nodes()
    device = {n for n in nodes if n.value is not None and n.lock_ref == 0 and not _any(n, "value")}
    host = {n for n in nodes if n.value is None and n.lock_ref == 0 == n.host_ref_counter and not _any(n, "metadata")}
    assert set(rank.accounting.device_order) == device
    assert set(rank.accounting.host_order) == host


def check_host(rank: Rank, *, surplus_pages: int = 0) -> None:
    """The ledger is what the nodes hold, on every rank, and this rank's pool agrees with it."""
    parts = [node.metadata for node in rank.nodes() if node.metadata is not None]
    ledger = rank.controller.ledger
    used = tuple(np.sum([[0] * rank.spec.lanes, *(part.pages_per_lane for part in parts)], axis=0).tolist())
    assert ledger.used_pages == used
    lane = rank.number if rank.spec.lanes > 1 else 0
    assert ledger.free_pages[lane] + surplus_pages == rank.host_free_pages()
    pages = np.concatenate([np.empty(0, dtype=np.int64), *(part.host_pages for part in parts)])
    assert len(np.unique(pages)) == len(pages) == used[lane], "host pages are shared or lost"


def _any(node: LayoutTreeNode[Any], field: str) -> bool:
    return any(getattr(child, field) is not None for child in node.children.values())
