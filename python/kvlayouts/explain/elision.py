"""Which parts of a long row are shown: its ends, and what lies around a point of interest."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

ItemT = TypeVar("ItemT")


def shown_ranges(length: int, most: int, around: int | None = None) -> list[range]:
    """At most `most` of the positions ``0 .. length - 1``, ascending, as ranges with gaps of at least two between them.

    Everything if it fits. Else the first and the last, and those on both sides of `around`.
    """
    if length <= most:
        return [range(length)]
    inner = around is not None and 0 < around < length
    share = most // (4 if inner else 2)
    points = {*range(most - share if not inner else most // 4), *range(length - share, length)}
    if around is not None and inner:
        points |= set(range(max(0, around - share), min(length, around + share)))
    return _closed(sorted(points))


def _closed(points: list[int]) -> list[range]:
    """Ranges of neighbouring points; a gap of one point is closed, for an ellipsis takes as much room."""
    ranges: list[range] = []
    for point in points:
        if ranges and point <= ranges[-1].stop + 1:
            ranges[-1] = range(ranges[-1].start, point + 1)
        else:
            ranges.append(range(point, point + 1))
    return ranges


def shown_items(items: Sequence[ItemT], most: int) -> tuple[Sequence[ItemT], Sequence[ItemT], Sequence[ItemT]]:
    """The items shown first, those left out, and those shown last; nothing is left out if all fit."""
    if len(items) <= most:
        return items, (), ()
    head = max(1, most - 2)
    return items[:head], items[head:-1], items[-1:]
