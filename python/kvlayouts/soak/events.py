"""One rank of a soak: random events, the same on every rank, with faults that differ between them.

What to do next is drawn from a generator that all ranks seed alike and from mirrored state, so equal ranks make
equal calls without talking. Only delays and naps are drawn per rank. If ranks ever disagree, their digests
differ at the next check at the latest; more often a collective or an allocation fails before.
"""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from typing import TYPE_CHECKING, Any

import numpy as np
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from kvlayouts.soak.late_copies import LateTransfer
from kvlayouts.soak.pressure import Pressure
from kvlayouts.soak.prompts import Prompts
from kvlayouts.soak.requests import Requests
from sglang.srt.mem_cache.hicache.check.invariants import violations
from sglang.srt.mem_cache.layouts.facts import exchanges_pages

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvlayouts.replay.content import KVContent
    from kvlayouts.soak.config import SoakConfig
    from sglang.srt.mem_cache.hicache.radix_cache import HiRadixCache

MAX_RUNNING = 3
MAX_DELAY_POLLS = 20
NAP_SECONDS = 0.002
KEPT_EVENTS = 20


class SoakRank:
    """Drives one cache. `events` counts primitive calls on it; `last_events` are the latest actions."""

    def __init__(self, config: SoakConfig, cache: HiRadixCache[Any], content: KVContent, rank: int) -> None:
        self._config = config
        self._rank = rank
        self._plan = random.Random(config.seed)
        self._own = random.Random(f"{config.seed}/{rank}")
        self.cache = cache
        in_step = self._plan if exchanges_pages(cache.layout) else self._own
        self.transfer = LateTransfer(
            cache.cache_controller.transfer, lambda: self._delay(self._own), lambda: self._delay(in_step)
        )
        cache.cache_controller.transfer = self.transfer
        self.prompts = Prompts(self._plan, config.page_size)
        self.requests = Requests(cache, content, self.transfer, seed=config.seed)
        self.pressure = Pressure(cache)
        self.faults: Counter[str] = Counter(dict.fromkeys(config.faults, 0))
        self.last_events: deque[str] = deque(maxlen=KEPT_EVENTS)
        self._polls = 0
        self._actions, self._weights = self._action_table()

    @property
    def events(self) -> int:
        """Primitive calls made on the cache so far; equal on all ranks."""
        return self.requests.calls + self._polls

    def step(self) -> None:
        """One random action. Raises `LayoutInvariantError` or whatever else the cache finds wrong."""
        (action,) = self._plan.choices(self._actions, self._weights)
        self.last_events.append(f"event {self.events}: {action.__name__.strip('_')} {action() or ''}".rstrip())

    def check(self) -> list[str]:
        """Recount every invariant and check the bytes of everything on the device. Relieves the pressure."""
        self.pressure.release()
        held = self.requests.held_pages
        return violations(self.cache, held_slot_pages=held) + self.requests.wrong_bytes()

    # Actions: what they return is for the log.

    def _action_table(self) -> tuple[list[Callable[[], str | None]], list[float]]:
        table: list[tuple[Callable[[], str | None], float, str | None]] = [
            (self._start, 30, None),
            (self._continue, 20, None),
            (self._finish, 25, None),
            (self._poll, 25, None),
            (self._evict, 3, None),
            (self._evict_host, 1, None),
            (self._abort, 3, "abort"),
            (self._press, 1, "alloc"),
            (self._relieve, 4, "alloc"),
            (self._nap, 1, "slow-rank"),
            (self._split_in_flight, 1, "split-in-flight"),
            (self._evict_in_flight, 1, "evict-in-flight"),
            (self._reset, 0.05, "reset"),
        ]
        chosen = [(action, weight) for action, weight, fault in table if fault is None or fault in self.faults]
        return [action for action, _ in chosen], [weight for _, weight in chosen]

    def _start(self) -> str:
        if len(self.requests.running) >= MAX_RUNNING:
            return self._finish()
        quota = self._plan.choice([None, None, 0, 3 * self._config.page_size, 10**6])
        chunked = self._plan.random() < 0.4
        return self.requests.start(
            self.prompts.draw(),
            quota=quota,
            first_chunk_pages=self._plan.randrange(1, 4) if chunked else None,
            priority=self._plan.randrange(3),
            start_load=self._plan.random() < 0.7,
        )

    def _continue(self) -> str:
        request = self.requests.pick(self._plan)
        return self.requests.continue_(request, self._plan.randrange(1, 4)) if request else "nothing runs"

    def _finish(self) -> str:
        request = self.requests.pick(self._plan)
        return self.requests.finish(request) if request else "nothing runs"

    def _abort(self) -> str:
        request = self.requests.pick(self._plan)
        if request is None:
            return "nothing runs"
        self.faults["abort"] += 1
        return self.requests.abort(request)

    def _poll(self) -> None:
        self._polls += 1
        self.cache.check_hicache_events()

    def _evict(self) -> str:
        return self._evict_tokens(self._plan.randrange(1, 8) * self._config.page_size)

    def _evict_tokens(self, tokens: int) -> str:
        self._polls += 1
        return f"{self.cache.evict(EvictParams(num_tokens=tokens)).num_tokens_evicted} of {tokens} tokens"

    def _evict_host(self) -> str:
        self._polls += 1
        return f"{self.cache.evict_host(self._plan.randrange(1, 8) * self._config.page_size)} tokens"

    def _press(self) -> str:
        self.faults["alloc"] += 1
        return self.pressure.apply(self._plan)

    def _relieve(self) -> None:
        self.pressure.release()

    def _nap(self) -> None:
        sleeper = self._plan.randrange(self._config.ranks)
        self.faults["slow-rank"] += 1
        if sleeper == self._rank:
            time.sleep(NAP_SECONDS)

    def _split_in_flight(self) -> str:
        node = self.requests.node_in_flight(self._plan)
        if node is None:
            return "nothing is in flight"
        tokens = self.prompts.diverging(self.requests.prompt_of(node), node.tokens)
        self.faults["split-in-flight"] += 1
        return self.requests.start(tokens, quota=None, first_chunk_pages=None, priority=0, start_load=True)

    def _evict_in_flight(self) -> str:
        if not self.cache.parts.in_flight.backups and not self.cache.parts.in_flight.loads:
            return "nothing is in flight"
        self.faults["evict-in-flight"] += 1
        return self._evict_tokens(self.cache.token_to_kv_pool_allocator.size)

    def _reset(self) -> None:
        self.faults["reset"] += 1
        self._polls += 1
        self.pressure.release()
        self.requests.running.clear()
        self.cache.reset()
        self.cache.token_to_kv_pool_allocator.clear()

    def _delay(self, draw: random.Random) -> int:
        if "delay" not in self.faults or draw.random() < 0.3:
            return 0
        self.faults["delay"] += 1
        return draw.randrange(1, MAX_DELAY_POLLS + 1)


def drain(soak: SoakRank) -> list[str]:
    """End every request, settle every copy, evict everything; what is left over then is a violation.

    Host pages, ledger, slots and locks must be back where they started.
    """
    cache = soak.cache
    soak.pressure.release()
    while soak.requests.running:
        soak.requests.abort(soak.requests.running[0])
    cache.ready_to_load_host_cache()
    for _ in range(MAX_DELAY_POLLS * 50):
        if not cache.parts.in_flight.backups and not cache.parts.in_flight.loads:
            break
        cache.check_hicache_events()
    size = cache.token_to_kv_pool_allocator.size
    cache.evict(EvictParams(num_tokens=size))
    cache.evict_host(10**12)
    found = violations(cache)
    left = {
        "nodes": sum(1 for _ in cache.nodes()),
        "slots in use": size - cache.token_to_kv_pool_allocator.available_size(),
        "host pages in use": int(np.sum(cache.cache_controller.ledger.used_pages)),
        "backups in flight": len(cache.parts.in_flight.backups),
        "loads in flight": len(cache.parts.in_flight.loads),
    }
    return found + [f"after everything was evicted: {count} {what} left" for what, count in left.items() if count]
