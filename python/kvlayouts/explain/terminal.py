"""The picture in the terminal: a strip of pages coloured by owner, and a row of copies and metadata for each rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvlayouts.explain import words
from kvlayouts.explain.elision import shown_items, shown_ranges

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import Console, RenderableType

    from kvlayouts.explain.story import NodeStory, RankStory
    from sglang.srt.mem_cache.layouts.plans import CopyRun

LANE_STYLES: Final = (
    "black on #56b4e9",
    "black on #e69f00",
    "black on #2fbf93",
    "black on #cc79a7",
    "black on #f0e442",
    "white on #0072b2",
    "white on #d55e00",
    "black on #b8c0c8",
)
LABEL_WIDTH: Final = 18
MOST_LINES: Final = 3
MOST_RUNS: Final = 4
ELLIPSIS: Final = "…"


def print_story(console: Console, story: NodeStory) -> None:
    """Print everything; wider consoles get longer strips."""
    console.print(Text(words.headline(story), style="bold"), highlight=False, soft_wrap=True)
    console.print(Text(words.node_line(story)), soft_wrap=True)
    console.print(Text(words.chain_line(story)), soft_wrap=True)
    console.print(Text(words.pools_line(story)), soft_wrap=True)
    console.print()
    console.print(page_strips(story, console.width))
    console.print()
    console.print(rank_table(story))
    hidden = len(story.ranks) - len(words.shown_ranks(story))
    if hidden:
        console.print(Text(f"{words.count(hidden, 'more rank')}; --rank shows one of them, --json all", style="dim"))
    console.print()
    for line in (words.metadata_line(story), *words.split_lines(story)):
        console.print(Text(line), soft_wrap=True)


def page_strips(story: NodeStory, width: int) -> RenderableType:
    """Blocks of columns, one a page: token, lane, slot page, row pages, host page, half."""
    config = story.config
    last_token = (config.pages - 1) * config.page_size
    highest = max(last_token, int(story.slot_pages.max()), int(story.new_slot_pages.max()))
    cell = max(4, len(str(highest)) + 1)
    columns = max(4, (width - LABEL_WIDTH) // cell)
    cells = list(_cells(story, columns * MOST_LINES))
    blocks = [_block(story, cells[start : start + columns], cell) for start in range(0, len(cells), columns)]
    return Group(*(Text("\n").join((*block, Text(""))) for block in blocks))


def _cells(story: NodeStory, most: int) -> Iterator[int | None]:
    """Pages to show; None stands for those left out."""
    ranges = shown_ranges(story.config.pages, most - 2, around=story.config.split_pages)
    for number, pages in enumerate(ranges):
        if number:
            yield None
        yield from pages


def _block(story: NodeStory, cells: Sequence[int | None], cell: int) -> list[Text]:
    lines = [
        _line("page", cells, cell, str, "bold"),
        _line("first token", cells, cell, lambda page: str(page * story.config.page_size), "dim"),
        _line("lane (owner)", cells, cell, lambda page: str(story.lanes[page]), lambda page: _style(story, page)),
        _line("slot page", cells, cell, lambda page: str(story.slot_pages[page])),
        _line("row page", cells, cell, lambda page: str(story.row_page(page))),
        _line("host page", cells, cell, lambda page: str(story.host_page(page))),
        _line("loaded to slot", cells, cell, lambda page: str(story.new_slot_pages[page])),
        _line("loaded to row", cells, cell, lambda page: str(story.new_row_page(page))),
    ]
    split = story.config.split_pages
    if split is not None:
        lines.append(_line("half", cells, cell, lambda page: "1st" if page < split else "2nd", "italic"))
    return lines


def _line(
    label: str,
    cells: Sequence[int | None],
    cell: int,
    show: Callable[[int], str],
    style: str | Callable[[int], str] = "",
) -> Text:
    line = Text(label.ljust(LABEL_WIDTH), style="dim", end="")
    for page in cells:
        if page is None:
            line.append(ELLIPSIS.rjust(cell), style="dim")
        else:
            line.append(" ")
            line.append(show(page).rjust(cell - 1), style=style if isinstance(style, str) else style(page))
    return line


def _style(story: NodeStory, page: int) -> str:
    chosen = story.config.rank
    style = LANE_STYLES[int(story.lanes[page]) % len(LANE_STYLES)]
    return style if chosen is None or story.ranks[chosen].lane == story.lanes[page] else "dim"


def rank_table(story: NodeStory) -> Table:
    """What each rank copies and keeps; small nodes, with their halves, fit 80 columns."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for header in ("rank", "lane", "pages"):
        table.add_column(header, justify="right")
    table.add_column("backup, copy runs", no_wrap=True)
    table.add_column("load back, copy runs", no_wrap=True)
    table.add_column("metadata", justify="right")
    before = -1
    for rank in words.shown_ranks(story):
        if story.config.rank is None and rank.rank > before + 1:
            table.add_row(*[ELLIPSIS] * len(table.columns), style="dim")
        before = rank.rank
        table.add_row(*_rank_cells(rank))
    return table


def _rank_cells(rank: RankStory) -> list[str | Text]:
    return [
        f"{rank.rank}",
        Text(f" {rank.lane} ", style=LANE_STYLES[rank.lane % len(LANE_STYLES)]),
        _and_halves(len(rank.positions), rank.half_pages),
        _runs(rank.backup, words.backup_run),
        _runs(rank.load, words.load_run),
        f"{_and_halves(rank.metadata_bytes, rank.half_bytes)} B",
    ]


def _and_halves(whole: int, halves: tuple[int, int] | None) -> str:
    return f"{whole:,}" if halves is None else f"{whole:,} = {halves[0]:,}+{halves[1]:,}"


def _runs(runs: Sequence[CopyRun], show: Callable[[CopyRun], str]) -> str:
    if not runs:
        return "nothing to copy"
    head, hidden, tail = shown_items(runs, MOST_RUNS)
    lines = [show(run) for run in head]
    if hidden:
        lines.append(f"{ELLIPSIS} {words.count(len(hidden), 'more run')}, {sum(run.pages for run in hidden):,} pages")
    lines += [show(run) for run in tail]
    return "\n".join(lines)
