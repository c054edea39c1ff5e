"""Whole pages, blocks and windows: a part counts as one. Imports nothing, so that commands can load it alone."""

from __future__ import annotations


def ceil_div(amount: int, size: int) -> int:
    """How many pieces of `size`, at least 1, hold `amount`, the last of them perhaps in part."""
    return -(-amount // size)
