"""What happens to one node under a layout strategy, rank by rank, told by the strategy's own plans.

A node is backed up, split, and loaded back into other slots. Nothing is copied: slot pages and host pages come from
free lists that are made up here, everything else is what the strategy answers::

    chain_base, extend_lanes  ->  slot pages in these lanes
    plan_backup               ->  row pages of this rank, demand on every rank     + host pages -> copy runs, metadata
    split                     ->  metadata of both halves
    load_lanes                ->  new slot pages   ->  plan_load -> copy runs
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvlayouts.common.errors import RunError
from kvlayouts.common.strategies import create_rank
from kvlayouts.explain.made_up_pages import HostPages, SlotPages
from sglang.srt.mem_cache.layouts.capabilities import has_host_lanes
from sglang.srt.mem_cache.layouts.errors import LayoutConfigError, LayoutInvariantError
from sglang.srt.mem_cache.layouts.facts import host_lanes
from sglang.srt.mem_cache.layouts.testing_metadata import stored_arrays

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from sglang.srt.mem_cache.layouts.pages import LaneArray, PageArray
    from sglang.srt.mem_cache.layouts.plans import CopyRun
    from sglang.srt.mem_cache.layouts.protocol import AnyKVLayoutStrategy, NodeMetadata


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainConfig:
    """What to tell about. `split_tokens` is None without a split; `seed` is None for empty pools, else pools of which a
    random half is in use.
    """

    layout: str
    options: Mapping[str, object]
    shard_size: int
    page_size: int
    tokens: int
    split_tokens: int | None = None
    rank: int | None = None
    seed: int | None = None

    @property
    def pages(self) -> int:
        """Whole pages of the node; what is left over is part of no node."""
        return self.tokens // self.page_size

    @property
    def split_pages(self) -> int | None:
        """Pages of the first half."""
        return None if self.split_tokens is None else self.split_tokens // self.page_size


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankStory:
    """One rank's part. `positions` are the node-local numbers of the pages that it stores, `row_pages`, `host_pages`
    and `new_row_pages` where they lie on the device, on the host, and on the device after the load.

    `half_pages` and `half_bytes` are pages and metadata bytes of both halves; None without a split.
    """

    rank: int
    lane: int
    positions: PageArray
    row_pages: PageArray
    host_pages: PageArray
    new_row_pages: PageArray
    backup: tuple[CopyRun, ...]
    load: tuple[CopyRun, ...]
    metadata_bytes: int
    half_pages: tuple[int, int] | None
    half_bytes: tuple[int, int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfStory:
    """One half of the split node: pages, host pages by lane as the metadata of every rank says, bytes on all ranks."""

    pages: int
    pages_per_lane: tuple[int, ...]
    metadata_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NodeStory:
    """The whole node. `lanes`, `slot_pages` and `new_slot_pages` have one entry a page; `demand_pages` one a lane.
    Where every rank stores all pages but backs up some, `lanes` are the owners on the host, and they exchange the rest.

    `halves` is empty without a split.
    """

    config: ExplainConfig
    lane_count: int
    base: int
    lanes: LaneArray
    slot_pages: PageArray
    new_slot_pages: PageArray
    demand_pages: tuple[int, ...]
    halves: tuple[HalfStory, ...]
    ranks: tuple[RankStory, ...]
    exchanges: bool = False

    def row_page(self, page: int) -> int:
        """Row page of a page of the node on the ranks that store it."""
        return self._there(page, "row_pages")

    def host_page(self, page: int) -> int:
        """Host page of a page of the node on the first rank that stores it."""
        return self._there(page, "host_pages")

    def new_row_page(self, page: int) -> int:
        """Row page after the load."""
        return self._there(page, "new_row_pages")

    def _there(self, page: int, what: str) -> int:
        owner = next(rank for rank in self.ranks if rank.lane == self.lanes[page])
        return int(getattr(owner, what)[np.searchsorted(owner.positions, page)])


NO_LANE: Final = -1
"""Of a rank that keeps nothing on the host."""


def tell(config: ExplainConfig) -> NodeStory:
    """Ask the strategy of every rank. Raises `InputError` if it refuses its settings, and `RunError` if its
    answers contradict each other.
    """
    layouts = tuple(
        create_rank(
            config.layout, page_size=config.page_size, shard_size=config.shard_size, rank=rank, options=config.options
        )
        for rank in range(config.shard_size)
    )
    try:
        return _tell(config, layouts)
    except (LayoutInvariantError, LayoutConfigError) as error:
        raise RunError(f"--layout {config.layout}: the strategy contradicts itself: {error}") from error


def _tell(config: ExplainConfig, layouts: Sequence[AnyKVLayoutStrategy]) -> NodeStory:
    first = layouts[0]
    base = first.chain_base(np.arange(config.page_size, dtype=np.int64).tobytes(), "")
    lanes = first.extend_lanes(base, 0, config.pages)
    orphans = set(lanes.tolist()) - {layout.lane for layout in layouts}
    if orphans:
        raise LayoutInvariantError(f"pages lie in lane {min(orphans)}, which no rank stores")
    slots = SlotPages(first, pages=config.pages, seed=config.seed)
    slot_pages = slots.take(lanes)
    if has_host_lanes(first):  # what a backup and a load do is told by who owns a page on the host
        lanes = first.plan_backup(slot_pages).lanes
    new_slot_pages: PageArray | None = None
    stories = []
    for rank, layout in enumerate(layouts):
        plan = layout.plan_backup(slot_pages)
        own = host_lanes(layout).own
        positions = np.flatnonzero(plan.lanes == own)
        if len(positions) != plan.owned_pages:
            raise LayoutInvariantError(
                f"rank {rank} stores {len(positions)} pages of the node but copies {plan.owned_pages}"
            )
        host_pages = HostPages(pages=config.pages, seed=config.seed, rank=rank).take(plan.owned_pages)
        metadata = layout.finish_backup(plan, host_pages)
        halves = None if config.split_tokens is None else metadata.split(config.split_tokens)
        parts: Sequence[Any] = [metadata] if halves is None else halves  # the registry erases the metadata's type
        if new_slot_pages is None:
            new_slot_pages = slots.take(layout.load_lanes(parts))
        load = layout.plan_load(parts, new_slot_pages).copies
        stories.append(
            RankStory(
                rank=rank,
                lane=NO_LANE if own is None else own,
                positions=positions,
                row_pages=plan.device_pages,
                host_pages=metadata.host_pages,
                new_row_pages=load.device_pages(),
                backup=tuple(plan.bind(host_pages).runs()),
                load=tuple(load.runs()),
                metadata_bytes=_bytes_of(metadata),
                half_pages=None if halves is None else _both(len(half.host_pages) for half in halves),
                half_bytes=None if halves is None else _both(_bytes_of(half) for half in halves),
            )
        )
        demand_pages = plan.demand_pages
        half_lanes = [] if halves is None else [(half.logical_len, half.pages_per_lane) for half in halves]
    assert new_slot_pages is not None
    return NodeStory(
        config=config,
        lane_count=host_lanes(first).count,
        base=base,
        lanes=lanes,
        slot_pages=slot_pages,
        new_slot_pages=new_slot_pages,
        demand_pages=demand_pages,
        halves=tuple(
            HalfStory(
                pages=tokens // config.page_size,
                pages_per_lane=pages_per_lane,
                metadata_bytes=sum(rank.half_bytes[number] for rank in stories if rank.half_bytes is not None),
            )
            for number, (tokens, pages_per_lane) in enumerate(half_lanes)
        ),
        ranks=tuple(stories),
        exchanges=has_host_lanes(first),
    )


def _bytes_of(metadata: NodeMetadata) -> int:
    return sum(array.nbytes for array in stored_arrays(metadata))


def _both(numbers: Iterable[int]) -> tuple[int, int]:
    first, second = numbers
    return first, second


def to_json(story: NodeStory) -> dict[str, object]:
    """The story as plain JSON values; nothing is left out, however large the node is."""
    config = story.config
    return {
        "layout": config.layout,
        "options": dict(config.options),
        "ranks": config.shard_size,
        "page_size": config.page_size,
        "tokens": config.tokens,
        "pages": config.pages,
        "split_tokens": config.split_tokens,
        "seed": config.seed,
        "lane_count": story.lane_count,
        "base": story.base,
        "lanes": story.lanes.tolist(),
        "slot_pages": story.slot_pages.tolist(),
        "new_slot_pages": story.new_slot_pages.tolist(),
        "demand_pages": list(story.demand_pages),
        "halves": [asdict(half) for half in story.halves],
        "by_rank": [_rank_json(rank) for rank in story.ranks],
    }


def _rank_json(rank: RankStory) -> dict[str, object]:
    return {
        "rank": rank.rank,
        "lane": rank.lane,
        "positions": rank.positions.tolist(),
        "row_pages": rank.row_pages.tolist(),
        "host_pages": rank.host_pages.tolist(),
        "new_row_pages": rank.new_row_pages.tolist(),
        "backup_runs": [_run_json(run) for run in rank.backup],
        "load_runs": [_run_json(run) for run in rank.load],
        "metadata_bytes": rank.metadata_bytes,
        "half_pages": rank.half_pages,
        "half_bytes": rank.half_bytes,
    }


def _run_json(run: CopyRun) -> dict[str, int]:
    return {"host_page": run.host_page, "device_page": run.device_page, "pages": run.pages}
