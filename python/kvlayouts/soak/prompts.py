"""Prompts that share prefixes in every way: equal, one longer than the other, parting within or between pages."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random

FAMILIES = 3
MAX_SEGMENTS = 4
MAX_SEGMENT_PAGES = 4
VARIANTS = 2


class Prompts:
    """Draws prompts: a chain of segments, each one of a few variants that differ from their middle on."""

    def __init__(self, plan: random.Random, page_size: int) -> None:
        self._plan = plan
        self._page_size = page_size

    def draw(self) -> array[int]:
        """A prompt of 1 token up to `MAX_SEGMENTS` x `MAX_SEGMENT_PAGES` pages; the last page may be partial."""
        tokens = array("q")
        prefix = self._plan.randrange(FAMILIES) + 1
        for segment in range(self._plan.randrange(1, MAX_SEGMENTS + 1)):
            variant = self._plan.randrange(VARIANTS)
            length = (1 + (prefix + segment) % MAX_SEGMENT_PAGES) * self._page_size
            start = prefix * 1_000_003 + segment * 10_007
            tokens.extend(start + at + (variant * 100_003 if 2 * at >= length else 0) for at in range(length))
            prefix = prefix * VARIANTS + variant
        cut = self._plan.randrange(self._page_size + 1) if self._plan.random() < 0.5 else 0
        return tokens[: max(1, len(tokens) - cut)]

    def diverging(self, tokens: array[int], within: int) -> array[int]:
        """`tokens` with another end: it parts from them somewhere in their last `within` tokens."""
        keep = len(tokens) - self._plan.randrange(1, within + 1)
        tail = self._plan.randrange(1, 2 * self._page_size)
        return tokens[:keep] + array("q", (-1 - self._plan.randrange(10**6) for _ in range(tail)))
