"""What a cache of shared prefixes is, in plain Python: sets of prefixes and lists of locks. No tensor, no tree.

A prefix is a tuple: the namespace, then the names of its pages. A cached page is the prefix that ends with it, so a
tier is a set of prefixes. What the model cannot know is *which* pages an eviction takes; it is told what is left, and
checks that nothing appeared, that nothing locked or needed went, and that the count is what the cache said.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Prefix: TypeAlias = tuple[str | int | None, ...]
Pages: TypeAlias = frozenset[Prefix]

AHEAD: Prefix = ()


def prefixes(chain: Prefix) -> Iterator[Prefix]:
    """Every page of a chain, as the prefix that ends with it, shortest first."""
    return (chain[: length + 1] for length in range(1, len(chain)))


def is_closed(pages: Iterable[Prefix]) -> bool:
    """Whether each page's own prefix is there too."""
    every = set(pages)
    return all(len(page) == 2 or page[:-1] in every for page in every)


@dataclass(slots=True, kw_only=True)
class Queue:
    """Transfers under way, oldest first, as the prefixes that they lock; how many of them each rank has seen end.

    Those that are copied together are one of `pending`; `queued` are not yet submitted. A copy that is made ahead of an
    eviction locks nothing: it is `AHEAD`.
    """

    ranks: int
    pending: list[tuple[Prefix, ...]] = field(default_factory=list)
    queued: tuple[Prefix, ...] = ()
    seen: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.seen = [0] * self.ranks

    @property
    def locks(self) -> list[Prefix]:
        """What all of them lock."""
        return [prefix for together in (*self.pending, self.queued) for prefix in together]

    def deliver(self, rank: int, count: int) -> None:
        """A rank sees the end of up to `count` more."""
        self.seen[rank] = min(self.seen[rank] + count, len(self.pending))

    def settle(self) -> int:
        """Those that every rank has seen are done; returns how many."""
        done = sum(map(len, self.pending[: min(self.seen)]))
        self.finish(min(self.seen))
        return done

    def finish(self, done: int) -> None:
        """The first ones are done, as every rank has waited for them."""
        del self.pending[:done]
        self.seen = [max(seen - done, 0) for seen in self.seen]

    def clear(self) -> None:
        """None is under way."""
        self.pending.clear()
        self.queued = ()
        self.seen = [0] * self.ranks


@dataclass(slots=True, kw_only=True)
class Model:
    """The cache of all ranks. `capacity` is in logical pages, `threshold` in pages that a load needs at least."""

    ranks: int
    capacity: int
    policy: str
    threshold: int
    device: Pages = frozenset()
    host: Pages = frozenset()
    locks: list[Prefix] = field(default_factory=list)
    held: int = 0
    writes: Queue = field(init=False)
    loads: Queue = field(init=False)

    def __post_init__(self) -> None:
        self.writes, self.loads = Queue(ranks=self.ranks), Queue(ranks=self.ranks)

    @property
    def protected(self) -> Pages:
        """Pages on the device that a request, a pin or a transfer locks."""
        return frozenset(p for lock in (*self.locks, *self.writes.locks, *self.loads.locks) for p in prefixes(lock))

    @property
    def evictable(self) -> Pages:
        """Pages on the device that nobody locks."""
        return self.device - self.protected

    @property
    def free(self) -> int:
        """Logical pages that neither the tree nor a request has."""
        return self.capacity - len(self.device) - self.held

    def match(self, chain: Prefix) -> tuple[int, int]:
        """Pages of a chain found on the device, and below them on the host only."""
        on_device = on_host = 0
        for page in prefixes(chain):
            if page in self.device and not on_host:
                on_device += 1
            elif page in self.host:
                on_host += 1
            else:
                break
        return on_device, on_host

    def may_load(self, chain: Prefix, quota: int | None) -> bool:
        """Whether threshold and quota admit the load of what a match of the chain finds on the host."""
        on_device, on_host = self.match(chain)
        unlocked = sum(page in self.evictable for page in prefixes(chain[: on_device + 1]))
        return 0 < on_host >= self.threshold and (quota is None or on_host <= quota - unlocked)

    def evicted(self, device: Pages, host: Pages) -> int:
        """Take over what is left after an eviction from the device; the pages that went.

        Any host copy may have given way to those of pages that left, of what lies above them, and, except under
        write_back, of pages that will leave next.
        """
        gone = self.device - device
        assert device <= self.device, f"an eviction brought {sorted(device - self.device, key=repr)} to the device"
        assert not gone & self.protected, f"locked pages were evicted: {sorted(gone & self.protected, key=repr)}"
        copied = gone if self.policy == "write_back" else self.device
        assert host <= self.host | copied, f"copied from nowhere: {sorted(host - self.host, key=repr)}"
        assert gone or host == self.host, "nothing left the device, yet the host changed"
        self.device, self.host = device, host
        return len(gone)

    def host_evicted(self, host: Pages) -> int:
        """Take over what is left after an eviction from the host; the pages that went."""
        gone = self.host - host
        assert not gone & self.device, (
            f"host copies of pages on the device went: {sorted(gone & self.device, key=repr)}"
        )
        self.host = host
        return len(gone)

    def inserted(self, chain: Prefix, device: Pages, host: Pages, *, chunked: bool) -> int:
        """A chain was inserted; the pages of it that were on the device before."""
        new = frozenset(prefixes(chain))
        duplicates = len(new & self.device)
        assert device == self.device | new, "an insert makes exactly its own pages present"
        assert host <= self.host | new
        if chunked or self.policy == "write_back":
            assert host == self.host, "chunks, and inserts under write_back, change nothing on the host"
        assert host >= self.host, "a hit displaced a host copy"
        self.device, self.host = device, host
        return duplicates

    def reset(self) -> None:
        """Nothing is cached and nothing under way."""
        self.device = self.host = frozenset()
        self.writes.clear()
        self.loads.clear()

    def check(self) -> None:
        """What holds of the sets themselves."""
        assert self.free >= 0
        assert is_closed(self.device), "a page on the device lacks its prefix"
        assert is_closed(self.device | self.host), "a page on the host lacks its prefix"
        assert self.policy == "write_back" or is_closed(self.host), "a page is backed up, its prefix is not"
        assert self.protected <= self.device, f"locked pages left: {sorted(self.protected - self.device, key=repr)}"
