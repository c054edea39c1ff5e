"""The sentences that terminal and picture share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvlayouts.explain.elision import shown_items, shown_ranges

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvlayouts.explain.story import NodeStory, RankStory
    from sglang.srt.mem_cache.layouts.plans import CopyRun

MOST_RANKS: Final = 8
MOST_LANES: Final = 12


def headline(story: NodeStory) -> str:
    """Layout, ranks, lanes, page size."""
    config = story.config
    ranks, lanes = count(config.shard_size, "rank"), count(story.lane_count, "lane")
    where = " on the host, exchanged after a load" if story.exchanges else ""
    return f"{config.layout}: {ranks}, {lanes}{where}, pages of {count(config.page_size, 'token')}"


def node_line(story: NodeStory) -> str:
    """How large the node is, and what of the tokens is no part of it."""
    config = story.config
    left = config.tokens - config.pages * config.page_size
    text = f"A node of {count(config.pages, 'page')}, {config.pages * config.page_size:,} tokens"
    if left:
        text += f" (the last {left} of {config.tokens:,} fill no page and stay out of the tree)"
    return text


def chain_line(story: NodeStory) -> str:
    """Where the chain starts, and how its pages are spread."""
    start = "Every rank stores every page" if story.exchanges else f"The chain starts in lane {story.base}"
    return f"{start}; host pages needed in each lane: {by_lane(story.demand_pages)}"


def by_lane(pages: Sequence[int]) -> str:
    """A number for each lane, those of a large group left out in the middle."""
    head, hidden, tail = shown_items(pages, MOST_LANES)
    return ", ".join([*(f"{number:,}" for number in head), *(["..."] if hidden else []), *(f"{n:,}" for n in tail)])


def metadata_line(story: NodeStory) -> str:
    """Metadata bytes of all ranks."""
    total = sum(rank.metadata_bytes for rank in story.ranks)
    each = total / story.config.pages / story.config.shard_size
    return f"Metadata: {total:,} bytes on all ranks, {each:.3g} a page and rank"


def split_lines(story: NodeStory) -> list[str]:
    """What the split does, and what each half has; nothing without a split."""
    config = story.config
    if config.split_tokens is None:
        return []
    lines = [
        f"Split after {config.split_tokens:,} tokens: slot pages and lanes are cut by position, host pages stay where "
        "they are"
    ]
    for name, half in zip(("first", "second"), story.halves, strict=True):
        lines.append(
            f"  {name} half: {count(half.pages, 'page')}, {half.pages * config.page_size:,} tokens; "
            f"host pages by lane: {by_lane(half.pages_per_lane)}; metadata of all ranks {half.metadata_bytes:,} bytes"
        )
    return lines


def pools_line(story: NodeStory) -> str:
    """What the free lists were."""
    if story.config.seed is None:
        return "Free pages: empty pools, lowest page first"
    return f"Free pages: pools of which a random half is in use (seed {story.config.seed}), lowest page first"


def shown_ranks(story: NodeStory) -> list[RankStory]:
    """The chosen rank alone, else all of a small group, else the first and the last ones."""
    if story.config.rank is not None:
        return [story.ranks[story.config.rank]]
    return [story.ranks[rank] for part in shown_ranges(len(story.ranks), MOST_RANKS) for rank in part]


def span(first: int, pages: int) -> str:
    """Page numbers from `first` on."""
    return f"{first}" if pages == 1 else f"{first}..{first + pages - 1}"


def backup_run(run: CopyRun) -> str:
    """One run of a backup: row pages to host pages."""
    return f"row {span(run.device_page, run.pages)} → host {span(run.host_page, run.pages)}"


def load_run(run: CopyRun) -> str:
    """One run of a load: host pages to row pages."""
    return f"host {span(run.host_page, run.pages)} → row {span(run.device_page, run.pages)}"


def count(number: int, word: str) -> str:
    """``1 page``, ``2,000 pages``."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"
