"""The picture as SVG: the node's pages with their owners, then for each rank what it copies and keeps.

page strip      one cell a page: number, lane, slot page; the two halves of a split above it
rank panels     device rows over host pages, a frame around each copy run; the backup left, the load right
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from kvlayouts.explain import words
from kvlayouts.explain.elision import shown_ranges
from kvlayouts.explain.svg import LANE_COLOURS, Drawing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvlayouts.explain.story import NodeStory, RankStory
    from sglang.srt.mem_cache.layouts.pages import PageArray
    from sglang.srt.mem_cache.layouts.plans import CopyRun

WIDTH: Final = 1000
MARGIN: Final = 28
LABEL: Final = 78
LEAST_PAGE: Final = 40
PAGE_HEIGHT: Final = 42
PAGE_LINES: Final = 2
LEAST_CELL: Final = 24
DIGIT: Final = 6.6
CELL_HEIGHT: Final = 20
RUN_GAP: Final = 12
MOST_CELLS_OF_RUN: Final = 5
ELLIPSIS_WIDTH: Final = 16
SIDE: Final = 362
PANEL_HEIGHT: Final = 116
HIDDEN_WIDTH: Final = 100


def to_svg(story: NodeStory) -> str:
    """The text of an SVG file. Large nodes and groups are elided as in the terminal."""
    drawing = Drawing(width=WIDTH, title=words.headline(story), description=words.node_line(story))
    y = MARGIN + 14.0
    drawing.text(MARGIN, y, words.headline(story), "title")
    for line in (words.node_line(story), words.chain_line(story), words.pools_line(story)):
        y += 19
        drawing.text(MARGIN, y, line, "soft")
    y = _page_strips(drawing, story, y + 34)
    y = _rank_panels(drawing, story, y + 36)
    y += 6
    for line in (words.metadata_line(story), *words.split_lines(story)):
        y += 19
        drawing.text(MARGIN, y, line, "soft")
    return drawing.finish(MARGIN)


# The node.


def _page_strips(drawing: Drawing, story: NodeStory, y: float) -> float:
    drawing.text(MARGIN, y, "The node", "head")
    drawing.text(MARGIN + 78, y, "page number, lane of its owner, slot page", "soft")
    y += 16
    width = _page_width(story)
    columns = int((WIDTH - LABEL - MARGIN) / width)
    most = PAGE_LINES * columns - 2
    cells: list[int | None] = []
    for number, pages in enumerate(shown_ranges(story.config.pages, most, around=story.config.split_pages)):
        cells += [None] if number else []
        cells += pages
    split = story.config.split_pages
    for start in range(0, len(cells), columns):
        line = cells[start : start + columns]
        if split is not None:
            _halves(drawing, line, split, y + 12, width)
            y += 20
        for column, page in enumerate(line):
            _page(drawing, story, page, LABEL + column * width, y, width)
        for label, offset in (("page", 12), ("lane", 28), ("slot page", 56)):
            drawing.text(LABEL - 10, y + offset, label, "soft small", anchor="end")
        y += PAGE_HEIGHT + 26
    return y - 10


def _page_width(story: NodeStory) -> float:
    return max(LEAST_PAGE, DIGIT * len(str(int(story.slot_pages.max()))) + 8)


def _page(drawing: Drawing, story: NodeStory, page: int | None, x: float, y: float, width: float) -> None:
    middle = x + width / 2 - 1
    if page is None:
        drawing.text(middle, y + PAGE_HEIGHT / 2 + 4, "…", "bold", anchor="middle")
        return
    lane = int(story.lanes[page])
    colour = lane % len(LANE_COLOURS)
    drawing.rect(x, y, width - 2, PAGE_HEIGHT - 6, f"lane{colour}")
    drawing.text(middle, y + 13, f"{page}", f"small on{colour}", anchor="middle")
    drawing.text(middle, y + 29, f"{lane}", f"bold on{colour}", anchor="middle")
    drawing.text(middle, y + PAGE_HEIGHT + 14, f"{story.slot_pages[page]}", "soft mono", anchor="middle")


def _halves(drawing: Drawing, line: Sequence[int | None], split: int, y: float, width: float) -> None:
    """A bracket over the columns of each half that this line shows; an ellipsis belongs to the half before it."""
    halves: list[int] = []
    for page in line:
        halves.append((halves[-1] if halves else 0) if page is None else int(page >= split))
    for half, name, short in ((0, "first half", "1st"), (1, "second half", "2nd")):
        columns = [column for column, its in enumerate(halves) if its == half]
        if columns:
            left, right = LABEL + columns[0] * width + 2, LABEL + (columns[-1] + 1) * width - 4
            drawing.path(f"M{left:g} {y + 4:g}v-5H{right:g}v5", "half")
            drawing.text(left, y - 5, name if right - left > 64 else short, "small bold")


# The ranks.


def _rank_panels(drawing: Drawing, story: NodeStory, y: float) -> float:
    left, right = _sides()
    drawing.text(MARGIN, y, "Each rank", "head")
    drawing.text(left, y, "backup: device rows to host pages", "soft")
    drawing.text(right, y, "load back: host pages to new device rows", "soft")
    y += 12
    before = -1
    for rank in words.shown_ranks(story):
        if story.config.rank is None and rank.rank > before + 1:
            drawing.text(
                WIDTH / 2, y + 12, f"… {words.count(rank.rank - before - 1, 'more rank')} …", "soft", anchor="middle"
            )
            y += 24
        before = rank.rank
        _panel(drawing, story, rank, y)
        y += PANEL_HEIGHT + 10
    return y


def _sides() -> tuple[float, float]:
    left = MARGIN + 160.0
    return left, left + SIDE + 40


def _panel(drawing: Drawing, story: NodeStory, rank: RankStory, y: float) -> None:
    left, right = _sides()
    colour = rank.lane % len(LANE_COLOURS)
    drawing.rect(MARGIN, y, WIDTH - 2 * MARGIN, PANEL_HEIGHT, "panel", radius=8)
    drawing.rect(MARGIN + 12, y + 12, 5, PANEL_HEIGHT - 24, f"lane{colour}", radius=2)
    drawing.text(MARGIN + 26, y + 26, f"rank {rank.rank}", "bold")
    drawing.text(MARGIN + 26, y + 43, f"lane {rank.lane}", "soft small")
    drawing.text(MARGIN + 26, y + 63, words.count(len(rank.positions), "page"), "small")
    drawing.text(MARGIN + 26, y + 78, f"{rank.metadata_bytes:,} bytes", "small")
    if rank.half_pages is not None and rank.half_bytes is not None:
        pages, size = rank.half_pages, rank.half_bytes
        drawing.text(MARGIN + 26, y + 95, f"{pages[0]:,} + {pages[1]:,} pages", "soft small")
        drawing.text(MARGIN + 26, y + 108, f"{size[0]:,} + {size[1]:,} bytes", "soft small")
    _runs(drawing, story, rank, rank.backup, left, y, to_host=True)
    _runs(drawing, story, rank, rank.load, right, y, to_host=False)


def _runs(
    drawing: Drawing, story: NodeStory, rank: RankStory, runs: Sequence[CopyRun], x: float, y: float, *, to_host: bool
) -> None:
    """Device rows over host pages; the arrow of each run points to where it copies."""
    if not runs:
        drawing.text(x, y + PANEL_HEIGHT / 2 + 4, "owns nothing: copies nothing, acknowledges all the same", "soft")
        return
    top, end = y + 27, x + SIDE
    at = 0
    for number, run in enumerate(runs):
        cells = _cells_of_run(rank.positions[at : at + run.pages], story.config.split_pages)
        width = _width(cells, story)
        last = number == len(runs) - 1
        if x + max(width, _label_width(run)) > end - (0 if last else HIDDEN_WIDTH):
            hidden = runs[number:]
            pages = sum(other.pages for other in hidden)
            drawing.text(x, y + PANEL_HEIGHT / 2 - 2, f"… {words.count(len(hidden), 'more run')},", "soft")
            drawing.text(x, y + PANEL_HEIGHT / 2 + 13, words.count(pages, "page"), "soft")
            return
        _run(drawing, story, cells, run, x, top, to_host=to_host)
        x += max(width, _label_width(run)) + RUN_GAP
        at += run.pages


def _cells_of_run(positions: PageArray, split: int | None) -> list[int | None]:
    """Pages of a run; None for those left out."""
    around = None if split is None else int(np.searchsorted(positions, split))
    cells: list[int | None] = []
    most = MOST_CELLS_OF_RUN if around in (None, 0, len(positions)) else 2 * MOST_CELLS_OF_RUN - 2
    for number, part in enumerate(shown_ranges(len(positions), most, around)):
        cells += [None] if number else []
        cells += [int(positions[place]) for place in part]
    return cells


def _cell_width(story: NodeStory) -> float:
    return max(LEAST_CELL, DIGIT * len(str(story.config.pages)) + 6)


def _width(cells: Sequence[int | None], story: NodeStory) -> float:
    return sum(ELLIPSIS_WIDTH if cell is None else _cell_width(story) for cell in cells)


def _label_width(run: CopyRun) -> float:
    return 5.6 * max(len(text) for text in _labels(run))


def _labels(run: CopyRun) -> tuple[str, str]:
    return f"row {words.span(run.device_page, run.pages)}", f"host {words.span(run.host_page, run.pages)}"


def _run(
    drawing: Drawing,
    story: NodeStory,
    cells: Sequence[int | None],
    run: CopyRun,
    x: float,
    y: float,
    *,
    to_host: bool,
) -> None:
    rows, hosts = y, y + CELL_HEIGHT + 24
    width = _width(cells, story)
    device_label, host_label = _labels(run)
    drawing.text(x, rows - 5, device_label, "small")
    drawing.text(x, hosts + CELL_HEIGHT + 13, host_label, "small")
    for line in (rows, hosts):
        at, before = x, None
        for cell in cells:
            _cell(drawing, story, cell, at, line)
            split = story.config.split_pages
            if split is not None and before is not None and cell is not None and before < split <= cell:
                drawing.path(f"M{at - 1:g} {line - 3:g}v{CELL_HEIGHT + 6:g}", "cut")
            at, before = at + (ELLIPSIS_WIDTH if cell is None else _cell_width(story)), cell
        drawing.rect(x - 2, line - 2, width + 2, CELL_HEIGHT + 4, "frame", radius=4)
    middle = x + width / 2 - 1
    start, stop = rows + CELL_HEIGHT + 5, hosts - 5
    if not to_host:
        start, stop = stop, start
    tip = -4 if to_host else 4
    drawing.path(f"M{middle:g} {start:g}V{stop:g}m-4 {tip}l4 {-tip}l4 {tip}", "arrow")


def _cell(drawing: Drawing, story: NodeStory, page: int | None, x: float, y: float) -> None:
    if page is None:
        drawing.text(x + ELLIPSIS_WIDTH / 2 - 1, y + 14, "…", anchor="middle")
        return
    colour = int(story.lanes[page]) % len(LANE_COLOURS)
    width = _cell_width(story)
    drawing.rect(x, y, width - 2, CELL_HEIGHT, f"lane{colour}", radius=3)
    drawing.text(x + width / 2 - 1, y + 14, f"{page}", f"small on{colour}", anchor="middle")
