"""What the tests of docs/faults.md share: each runs with every layout, on four ranks with the same room together."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang.srt.mem_cache.layouts.registry import BUILT_IN
from support.caches import CacheSpec, CacheTestCase, chain

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.mem_cache.hicache.tree.node import LayoutTreeNode
    from support.caches import Rank
    from support.groups import Group, Request

RANKS = 4
LAYOUTS = tuple(BUILT_IN)

TestT = TypeVar("TestT", bound=CacheTestCase)


def each_layout(test: Callable[[TestT, str], None]) -> Callable[[TestT], None]:
    """Run a test method once with the name of every built-in layout."""

    @functools.wraps(test)
    def with_every_layout(self: TestT) -> None:
        for layout in LAYOUTS:
            with self.subTest(layout=layout):
                test(self, layout)

    return with_every_layout


def fault_spec(layout: str, *, pages: int = 32, host: int = 64, **fields: Any) -> CacheSpec:  # noqa: ANN401  # of CacheSpec
    """Four ranks; `pages` and `host` are logical, so that every layout has the same room."""
    asked = CacheSpec(layout=layout, ranks=RANKS)
    return replace(asked, device_pages=pages // asked.lanes, host_pages=host // asked.host_lanes, **fields)


def begin(group: Group, *pages: int, quota: int | None = None) -> Request:
    """A request that must find room, still running."""
    request = group.start(chain(group.spec, *pages), quota=quota)
    assert request is not None, "the request finds no room"
    return request


def roots(group: Group, lane: int, count: int) -> list[int]:
    """First pages whose chains begin in `lane`, modulo the lanes that the layout has."""
    rank = group.ranks[0]
    wanted = lane % rank.layout.lane_count
    found = [
        page
        for page in range(1, 200)
        if rank.layout.chain_base(chain(group.spec, page).tobytes(), "") % rank.layout.lane_count == wanted
    ]
    return found[:count]


def fill_host_lane(group: Group, lane: int) -> None:
    """Leave no host page in one lane: one-page chains that stay on the device, so that none of them can go."""
    ledger = group.ranks[0].controller.ledger
    for root in roots(group, lane, group.capacity_pages * group.spec.host_lanes):
        if not ledger.free_pages[lane % group.spec.host_lanes]:
            return
        group.serve(chain(group.spec, root))
    assert not ledger.free_pages[lane % group.spec.host_lanes]


def evict(group: Group, pages: int) -> int:
    """Evict from the device on every rank; the pages that each of them says it freed."""
    tokens = group.agreed(
        lambda rank: rank.cache.evict(EvictParams(num_tokens=pages * rank.spec.page_size)).num_tokens_evicted
    )
    return tokens // group.spec.page_size


def locks(group: Group) -> set[tuple[int, int]]:
    """Locks and host protections of the nodes of all ranks."""
    return {(node.lock_ref, node.host_ref_counter) for rank in group.ranks for node in rank.nodes()}


def node_of(rank: Rank, *pages: int) -> LayoutTreeNode[Any]:
    """The node at the end of a chain."""
    tree = rank.cache.parts.tree
    return tree._walk(rank.key(chain(rank.spec, *pages)), [])  # noqa: SLF001  # on either tier
