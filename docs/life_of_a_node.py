"""Prints the worked example of life-of-a-node.md: one node of five pages on three ranks, on SGLang's real CPU pools.

    .venv/bin/python docs/life_of_a_node.py

All three ranks live in this one process and get the same calls, as the schedulers of a shard group do.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang.srt.mem_cache.hicache.assemble import assemble_cache
from sglang.srt.mem_cache.hicache.check.digest import tree_digest
from sglang.srt.mem_cache.hicache.cpu.support import install_cpu_support
from sglang.srt.mem_cache.hicache.device.pools import MlaGeometry, build_device_pool
from sglang.srt.mem_cache.hicache.radix_cache import HiRadixCache
from sglang.srt.mem_cache.hicache.runtime import standalone_runtime
from sglang.srt.mem_cache.hicache.settings import HiCacheSettings, ShardGroup
from sglang.srt.mem_cache.hicache.slots.allocator import LaneSlotAllocator
from sglang.srt.mem_cache.hicache.tree.calls import Insertion
from sglang.srt.mem_cache.layouts import CpSharedLayout, GroupKind, PoolKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sglang.srt.mem_cache.hicache.tree.node import LayoutTreeNode

PAGE, RANKS, DEVICE_PAGES = 4, 3, 8
FIRST = 300  # the hash of tokens 300 .. 303 puts the chain's first page in lane 1
LONG = array("q", range(FIRST, FIRST + 5 * PAGE))
FORK = array("q", [*LONG[: 2 * PAGE], *range(900, 900 + PAGE)])  # two pages of it, then one of its own


class AllAlike:
    """The agreement of ranks whose copies all end at once: everybody has the same numbers."""

    def minimum(self, values: Sequence[int]) -> tuple[int, ...]:
        """See `Agreement`."""
        return tuple(values)

    def capacity(self, value: int) -> int:
        """See `Agreement`."""
        return value


def make_rank(rank: int) -> HiRadixCache[Any]:
    """One rank's cache with its device pool, allocator, controller and host pool."""
    layout = CpSharedLayout(page_size=PAGE, shard_size=RANKS, shard_rank=rank)
    pool = build_device_pool(
        PoolKind.MLA,
        tokens=DEVICE_PAGES * PAGE,
        page_size=PAGE,
        layers=1,
        geometry=MlaGeometry(kv_lora_rank=4, qk_rope_head_dim=4),
    )
    allocator = LaneSlotAllocator(
        layout=layout, physical_size=DEVICE_PAGES * PAGE, dtype=torch.bfloat16, device="cpu", kvcache=pool
    )
    params = CacheInitParams(
        disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=allocator, page_size=PAGE
    )
    return assemble_cache(
        params,
        layout=layout,
        settings=HiCacheSettings(host_ratio=1.0),
        group=ShardGroup(kind=GroupKind.ATTENTION_CP, size=RANKS, rank=rank),
        agreement=AllAlike(),
    )


def compute_and_insert(cache: HiRadixCache[Any], tokens: array[int]) -> None:
    """What a scheduler does for a prompt whose cached prefix is on the device: match, allocate, insert, copy."""
    found = cache.match(RadixKey(array("q", tokens))).slots
    cached = len(found) // PAGE
    base = cache.layout.chain_base(tokens[:PAGE].tobytes(), "")
    pages = cache.alloc_slots(cache.layout.extend_lanes(base, cached, len(tokens) // PAGE - cached))
    assert pages is not None
    slots = torch.cat([found, cache.slots.slots(pages)])
    cache.put(Insertion(key=RadixKey(array("q", tokens)), value=slots))
    cache.parts.transfers.submit_backups()


def load_back(cache: HiRadixCache[Any], tokens: array[int]) -> None:
    """Bring back what the host has of `tokens`, and start the copy."""
    match = cache.match(RadixKey(array("q", tokens)))
    cache.bring_back(match.host_node)
    cache.ready_to_load_host_cache()


def row(label: str, cells: Sequence[object]) -> str:
    """A line of a table with one column a page."""
    return f"  {label:<22}" + "".join(f"{cell!s:>5}" for cell in cells)


def describe(caches: Sequence[HiRadixCache[Any]], number: int) -> Iterator[str]:
    """Node `number` of every rank's tree: what they share, then what each rank holds."""
    nodes: list[LayoutTreeNode[Any]] = [list(cache.nodes())[number] for cache in caches]
    node = nodes[0]
    yield f"  node {node.id}: {node.tokens} tokens, on the {place(node)}, locks {node.lock_ref}"
    if node.value is not None:
        yield row("slot page", node.slot_pages.tolist())
    if node.metadata is not None:
        yield row("lane (owner)", node.metadata.lanes.tolist())
    for rank, own in enumerate(nodes):
        if own.metadata is not None:
            held = iter(own.metadata.host_pages.tolist())
            cells = [next(held) if lane == rank else "." for lane in own.metadata.lanes.tolist()]
            if own.metadata.host_pages.size:
                yield row(f"host page on rank {rank}", cells)


def place(node: LayoutTreeNode[Any]) -> str:
    """The tiers that hold a node."""
    device, host = node.value is not None, node.metadata is not None
    return "device and host" if device and host else "device" if device else "host"


def summary(caches: Sequence[HiRadixCache[Any]]) -> Iterator[str]:
    """Free pages by lane, and acks that wait if any do. All ranks have the same tree and ledger."""
    cache = caches[0]
    ledger = cache.cache_controller.ledger
    acks = [(len(own.cache_controller.ack_write_queue), len(own.cache_controller.ack_load_queue)) for own in caches]
    assert len({tree_digest(own) for own in caches}) == 1, "the ranks differ"
    yield f"  free by lane: slot pages {tuple(cache.slots.room_pages().tolist())}, host pages {ledger.free_pages}"
    if any(writes or loads for writes, loads in acks):
        yield f"  acks that wait (write, load), by rank: {', '.join(str(pair) for pair in acks)}"


def story() -> Iterator[str]:
    """The example, one block of lines a step."""
    with standalone_runtime(page_size=PAGE):
        caches = [make_rank(rank) for rank in range(RANKS)]
        yield "\n".join(["before", *summary(caches)])
        for title, act, nodes in STEPS:
            for cache in caches:
                act(cache)
            lines = [line for number in nodes for line in describe(caches, number)]
            yield "\n".join([title, *lines, *summary(caches)])


def delete(cache: HiRadixCache[Any]) -> None:
    """Take everything off the device, then off the host."""
    cache.check_hicache_events()
    cache.evict(EvictParams(num_tokens=5 * PAGE))
    cache.evict_host(6 * PAGE)


def fork(cache: HiRadixCache[Any]) -> None:
    """A second prompt with the same first two pages; its backup is settled too."""
    compute_and_insert(cache, FORK)
    cache.check_hicache_events()


STEPS: Sequence[tuple[str, Callable[[HiRadixCache[Any]], object], Sequence[int]]] = (
    ("insert and backup", lambda cache: compute_and_insert(cache, LONG), [0]),
    ("acknowledgement", HiRadixCache.check_hicache_events, []),
    ("split", fork, [0, 1, 2]),
    ("evict", lambda cache: cache.evict(EvictParams(num_tokens=6 * PAGE)), [1]),
    ("load back", lambda cache: load_back(cache, LONG), [1]),
    ("delete", delete, []),
)


def main() -> None:
    """Print the example."""
    install_cpu_support()
    print("\n\n".join(story()))


if __name__ == "__main__":
    main()
