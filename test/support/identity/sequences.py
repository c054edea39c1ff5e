"""Random sequences of operations on a cache.

An operation is plain data; what it refers to ("the third of the running requests") is resolved modulo what there is,
so every sequence is valid.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random

    from support.identity.reference import Case


class Kind(Enum):
    """What an operation does."""

    MATCH = "match"
    LOCK = "match and lock"
    UNLOCK = "unlock"
    LOAD_BACK = "match and load back"
    READY = "start the queued loads"
    SETTLE = "settle acknowledgements"
    EVICT = "evict"
    INSERT = "allocate and insert without a match"
    BEGIN = "match, load back, lock and allocate"
    COMMIT = "insert what was begun"
    START = "start a request"
    CHUNK = "prefill a chunk of a request"
    FINISH = "finish a request"
    RESET = "reset"


WEIGHTS = {
    Kind.MATCH: 6,
    Kind.LOCK: 2,
    Kind.UNLOCK: 4,
    Kind.LOAD_BACK: 12,
    Kind.READY: 8,
    Kind.SETTLE: 12,
    Kind.EVICT: 7,
    Kind.INSERT: 5,
    Kind.BEGIN: 7,
    Kind.COMMIT: 11,
    Kind.START: 4,
    Kind.CHUNK: 7,
    Kind.FINISH: 6,
    Kind.RESET: 0.3,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One step. `symbols` are the pages of its key and `tail` the tokens after them; `number` picks and measures."""

    kind: Kind
    symbols: tuple[int, ...] = (0,)
    tail: int = 0
    namespace: str | None = None
    priority: int = 0
    chunked: bool = False
    quota: int | None = None
    number: int = 0

    def tokens(self, page_size: int) -> array[int]:
        """Token ids. Odd symbols differ from the even ones before them in the last token of the page only."""
        ids = array("q")
        for symbol in self.symbols:
            page = [symbol // 2 * 1000 + at for at in range(page_size)]
            page[-1] += symbol % 2 * 500
            ids.extend(page)
        ids.extend(7_000_000 + at for at in range(self.tail % page_size))
        return ids


def random_operations(rng: random.Random, case: Case, count: int) -> list[Operation]:
    """`count` operations over a dozen keys, their prefixes and their neighbours, so that much is reused."""
    kinds = rng.choices(list(WEIGHTS), weights=list(WEIGHTS.values()), k=count)
    keys = [_random_key(rng, case) for _ in range(12)]
    return [
        Operation(
            kind=kind,
            symbols=_vary(rng, case, rng.choice(keys)),
            tail=rng.choice((0, 0, rng.randrange(case.page_size))),
            namespace=rng.choice((None, None, None, "adapter")),
            priority=rng.choice((0, 0, 0, 1, 3)),
            chunked=rng.random() < 0.15,
            quota=rng.choice((None, None, rng.randrange(case.depth * case.page_size))),
            number=rng.randrange(1000),
        )
        for kind in kinds
    ]


def _random_key(rng: random.Random, case: Case) -> tuple[int, ...]:
    return tuple(rng.randrange(case.symbols) for _ in range(rng.randint(2, case.depth)))


def _vary(rng: random.Random, case: Case, key: tuple[int, ...]) -> tuple[int, ...]:
    """Mostly the key itself, else a prefix of it or one with another last page."""
    form = rng.random()
    if form < 0.65:
        return key
    if form < 0.85:
        return key[: rng.randint(1, len(key))]
    return (*key[:-1], rng.randrange(case.symbols))
