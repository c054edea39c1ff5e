"""Random operations on one rank's cache, the same on every rank but for when its copies end.

All choices come from a generator that the ranks share and from what the cache answers, which must be equal on all
ranks; only the delays of copies come from the rank's own generator. Bytes are checked wherever a request reads them.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from typing_extensions import override

from sglang.srt.mem_cache.hicache.check.digest import tree_digest
from sglang.srt.mem_cache.hicache.tree.calls import Insertion
from support.caches import Rank, chain, page_views
from support.groups import chain_lanes, check_host, check_nodes, check_orders, check_slots, pages_of

if TYPE_CHECKING:
    from array import array

    from sglang.srt.mem_cache.hicache.tree.node import LayoutTreeNode
    from sglang.srt.mem_cache.hicache.tree.stats import CacheStats
    from sglang.srt.mem_cache.layouts.pages import PageArray
    from support.gloo.ranks import World

ROOTS = 5
MAX_PAGES = 8
MAX_RUNNING = 4
MAX_PINS = 2
CHECK_EVERY = 5


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A running request. Its first `cached` pages belong to the tree and are locked, the others are its own."""

    tokens: array[int]
    namespace: str | None
    priority: int
    pages: PageArray
    cached: int
    node: LayoutTreeNode[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficReport:
    """What one rank saw. `digests`, `answers`, `acks`, `operations` and the logical counts must be equal on all ranks.

    `ready` holds the acks that the rank could have settled at each step, `collectives` how many collectives each
    `check_hicache_events` made in each group.
    """

    digests: list[int]
    answers: str
    acks: list[tuple[tuple[int, ...], int]]
    operations: Counter[str]
    stats: CacheStats
    ready: list[tuple[int, int]]
    collectives: set[tuple[int, ...]]
    verified_pages: int


class RankTraffic:
    """Drives one rank; `step` is one operation and one turn of the event loop."""

    def __init__(self, *, rank: Rank, world: World, seed: int) -> None:
        self.rank = rank
        self.world = world
        self.running: list[Request] = []
        self.pins: list[LayoutTreeNode[Any]] = []
        self.shared = random.Random(seed)
        self.own = random.Random(f"{seed} {world.number}")
        self.rank.engine.held = True
        self.operations: Counter[str] = Counter()
        self.answers = hashlib.blake2b(digest_size=16)
        self.acks: list[tuple[tuple[int, ...], int]] = []
        self.rank.controller.ack_write_queue = AckQueue(self.acks)
        self.rank.controller.ack_load_queue = AckQueue(self.acks)
        self.digests: list[int] = []
        self.ready: list[tuple[int, int]] = []
        self.collectives: set[tuple[int, ...]] = set()
        self.verified_pages = 0

    # Operations.

    def step(self, number: int) -> None:
        """One random operation on the cache; then some copies end, and finished ones are settled."""
        operation = self._choose()
        self.operations[operation] += 1
        getattr(self, operation)()
        self._turn()
        if number % CHECK_EVERY == 0:
            self.check()

    def _choose(self) -> str:
        weights = {
            "start": 9 if len(self.running) < MAX_RUNNING else 0,
            "start_two": 3 if len(self.running) < MAX_RUNNING - 1 else 0,
            "chunk": 5 if self.running else 0,
            "finish": 9 if self.running else 0,
            "abort": 2 if self.running else 0,
            "pin": 2 if len(self.pins) < MAX_PINS else 0,
            "unpin": 3 if self.pins else 0,
            "evict": 2,
            "evict_host": 1,
            "settle_everything": 1,
            "reset": 0.15,
        }
        return self.shared.choices(list(weights), list(weights.values()))[0]

    def start(self) -> None:
        """Match, load back, lock, allocate, verify what was cached, write the rest."""
        self._start(1)

    def start_two(self) -> None:
        """The same for a batch of two, whose loads are one transfer with one ack."""
        self._start(2)

    def _start(self, count: int) -> None:
        cache = self.rank.cache
        admitted = [request for request in (self._admit() for _ in range(count)) if request is not None]
        self._answer(cache.ready_to_load_host_cache())
        self.rank.engine.run_loads()
        for request in admitted:
            self._verify(request, request.cached)
            own = request.pages[request.cached :]
            self.rank.write(request.tokens, own, first_page=request.cached)
            self.running.append(request)

    def _admit(self) -> Request | None:
        cache, size = self.rank.cache, self.rank.spec.page_size
        tokens, namespace = self._tokens(), self.shared.choice((None, None, "adapter"))
        quota = self.shared.choice((None, None, size, 3 * size))
        priority = self.shared.randrange(3)
        match = cache.match(self.rank.key(tokens, namespace))
        cached, node = pages_of(match.slots, size), match.device_node
        if match.host_tokens:
            loaded, node = cache.bring_back(match.host_node, quota)
            self.operations["loads" if len(loaded) else "loads refused"] += 1
            cached = np.concatenate([cached, pages_of(loaded, size)])
        self._answer(len(match.slots), match.host_tokens, cached.tolist(), node.id)
        cache.inc_lock_ref(node)
        lanes = chain_lanes(self.rank, tokens, namespace, len(cached), len(tokens) // size)
        own = cache.alloc_slots(lanes)
        self._answer(None if own is None else own.tolist())
        if own is None:
            self.operations["no room"] += 1
            cache.dec_lock_ref(node)
            return None
        return Request(
            tokens=tokens,
            namespace=namespace,
            priority=priority,
            pages=np.concatenate([cached, own]),
            cached=len(cached),
            node=node,
        )

    def chunk(self) -> None:
        """Insert the first part of a running request, as chunked prefill does, and lock it instead of its prefix."""
        request = self.shared.choice(self.running)
        if request.cached >= len(request.pages):
            return
        pages = self.shared.randrange(request.cached + 1, len(request.pages) + 1)
        self._insert(request, pages, chunked=True)
        cache, size = self.rank.cache, self.rank.spec.page_size
        key = self.rank.key(request.tokens[: pages * size], request.namespace)
        match = cache.match(key)
        assert len(match.slots) == pages * size, "what was just inserted is not on the device"
        cache.inc_lock_ref(match.device_node)
        cache.dec_lock_ref(request.node)
        request.pages = np.concatenate([pages_of(match.slots, size), request.pages[pages:]])
        request.cached, request.node = pages, match.device_node
        self._verify(request, len(request.pages))

    def finish(self) -> None:
        """Insert a whole request and unlock it."""
        request = self.running.pop(self.shared.randrange(len(self.running)))
        self._verify(request, len(request.pages))
        self._insert(request, len(request.pages), chunked=False)
        self.rank.cache.dec_lock_ref(request.node)

    def _insert(self, request: Request, pages: int, *, chunked: bool) -> None:
        size = self.rank.spec.page_size
        result = self.rank.cache.put(
            Insertion(
                key=self.rank.key(request.tokens[: pages * size], request.namespace),
                value=self.rank.cache.slots.slots(request.pages[:pages]),
                priority=request.priority,
                is_use=not chunked,
            )
        )
        self._answer(result.known_tokens)
        self.rank.allocator.free_slot_pages(request.pages[request.cached : result.known_tokens // size])

    def abort(self) -> None:
        """Drop a running request."""
        request = self.running.pop(self.shared.randrange(len(self.running)))
        self.rank.allocator.free_slot_pages(request.pages[request.cached :])
        self.rank.cache.dec_lock_ref(request.node)

    def pin(self) -> None:
        """Lock what a match finds on the device, for no request."""
        match = self.rank.cache.match(self.rank.key(self._tokens()))
        self._answer(self.rank.cache.inc_lock_ref(match.device_node).delta)
        self.pins.append(match.device_node)

    def unpin(self) -> None:
        """Undo a pin."""
        self._answer(self.rank.cache.dec_lock_ref(self.pins.pop()).delta)

    def evict(self) -> None:
        """Make room on the device; then other bytes lie in every free row."""
        tokens = self.shared.randrange(1, 3 * MAX_PAGES) * self.rank.spec.page_size
        self._answer(self.rank.cache.evict(EvictParams(num_tokens=tokens)).num_tokens_evicted)
        free = np.sort(self.rank.allocator.get_all_free_pages().numpy())
        rows = [row for _, row in self.rank.rows(free)]
        for pages in page_views(self.rank.device_pool):
            pages[rows] = 0xA5

    def evict_host(self) -> None:
        """Make room on the host."""
        self._answer(self.rank.cache.evict_host(self.shared.randrange(1, MAX_PAGES) * self.rank.spec.page_size))

    def settle_everything(self) -> None:
        """All copies of this rank end; the others may lag behind."""
        self.rank.cache.parts.transfers.submit_backups()
        self.rank.engine.finish_writes()
        self.rank.engine.finish_loads()

    def reset(self) -> None:
        """Flush the cache, with requests running and transfers unsettled; SGLang clears the allocator beside it."""
        self.settle_everything()
        self.rank.cache.reset()
        self.rank.allocator.clear()
        self.running.clear()
        self.pins.clear()

    # Around them.

    def _turn(self) -> None:
        """Some copies of this rank end, then one turn of the event loop, with its collectives counted."""
        engine, cache = self.rank.engine, self.rank.cache
        cache.parts.transfers.submit_backups()  # as the turn does, before the copies that end are counted here
        engine.finish_writes(self.own.choice((0, 0, 1, 3)))
        # An exchange waits for all ranks with the thread that would see to anything else.
        draw = self.shared if self.rank.spec.exchanges else self.own
        engine.finish_loads(draw.choice((0, 0, 1)))
        writes, loads = self._queues()
        self.ready.append((_ready(writes), _ready(loads)))
        before = self.world.collectives()
        cache.check_hicache_events()
        self.collectives.add(tuple(after - at for after, at in zip(self.world.collectives(), before, strict=True)))
        self._answer(*(len(queue) for queue in self._queues()))

    def _queues(self) -> tuple[list[Any], list[Any]]:
        return self.rank.controller.ack_write_queue, self.rank.controller.ack_load_queue

    def drain(self) -> None:
        """End all requests and copies, and settle everything."""
        while self.running:
            self.finish()
        while self.pins:
            self.unpin()
        self.settle_everything()
        self._turn()
        self.check()
        assert not any(self._queues()), "acks are left though every copy has ended on every rank"
        assert self.rank.cache.protected_size() == 0, "locks are left"

    def check(self) -> None:
        """Raise AssertionError unless this rank's tree, tiers, orders and ledger are sound; note the digest."""
        check_slots(self.rank, held_pages=sum(len(request.pages) - request.cached for request in self.running))
        check_nodes(self.rank)
        check_orders(self.rank)
        check_host(self.rank)
        self.digests.append(tree_digest(self.rank.cache))

    def report(self) -> TrafficReport:
        """What this rank saw."""
        return TrafficReport(
            digests=self.digests,
            answers=self.answers.hexdigest(),
            acks=self.acks,
            operations=self.operations,
            stats=self.rank.cache.stats,
            ready=self.ready,
            collectives=self.collectives,
            verified_pages=self.verified_pages,
        )

    def _verify(self, request: Request, pages: int) -> None:
        wrong = self.rank.mismatches(request.tokens, request.pages[:pages])
        assert not wrong, f"{wrong} of {pages} pages of a request hold other bytes on rank {self.rank.number}"
        self.verified_pages += sum(1 for _ in self.rank.rows(request.pages[:pages]))

    def _answer(self, *values: object) -> None:
        self.answers.update(repr(values).encode())

    def _tokens(self) -> array[int]:
        root, pages, branch = (
            self.shared.randrange(ROOTS),
            self.shared.randrange(1, MAX_PAGES + 1),
            self.shared.randrange(3),
        )
        return chain(self.rank.spec, *(root * 100 + (at if at < 3 else at + 10 * branch) for at in range(pages)))


class AckQueue(list[Any]):
    """SGLang's list of acks, which writes down the ids and tokens of every ack that it is given."""

    def __init__(self, log: list[tuple[tuple[int, ...], int]]) -> None:
        super().__init__()
        self._log = log

    @override
    def append(self, ack: Any) -> None:  # whatever SGLang calls an ack
        """As a list, and write it down."""
        super().append(ack)
        self._log.append((tuple(ack.node_ids), ack.num_tokens))


def _ready(queue: list[Any]) -> int:
    seen = [ack.finish_event.query() for ack in queue]
    return seen.index(False) if False in seen else len(seen)
