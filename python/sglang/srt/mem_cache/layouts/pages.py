"""Page and token index arithmetic on the host.

A *page* is ``page_size`` consecutive tokens::

    page      0        1        2
    token   0 .. 3   4 .. 7   8 .. 11      page_size = 4

Everything below works on numpy ``int64`` arrays in host memory. Strategies and the tree keep one
number a page, never one a token; token-wise tensors are made only where SGLang asks for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from .errors import LayoutConfigError, LayoutInvariantError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

PageArray: TypeAlias = "npt.NDArray[np.int64]"
"""Page numbers, shape ``[pages]``, int64, host memory."""

LaneArray: TypeAlias = "npt.NDArray[np.int16]"
"""Owner of each page, shape ``[pages]``, int16, host memory."""

NO_PAGES: PageArray = np.empty(0, dtype=np.int64)
NO_PAGES.flags.writeable = False

_ONE_RUN_FROM = 8


def page_array(pages: Iterable[int] | PageArray) -> PageArray:
    """Page numbers as a contiguous int64 array, shape ``[pages]``, that nobody else holds a view of."""
    return np.array(pages if isinstance(pages, np.ndarray) else list(pages), dtype=np.int64)


def whole_pages(tokens: int, page_size: int, what: str) -> int:
    """Number of pages in `tokens`; `LayoutConfigError` if that is not a whole number >= 0."""
    pages, rest = divmod(tokens, page_size)
    if tokens < 0 or rest:
        raise LayoutConfigError(f"{what} must be a multiple of page_size {page_size} and >= 0, got {tokens}")
    return pages


def tokens_of_pages(pages: PageArray, page_size: int) -> torch.Tensor:
    """Token indices of `pages` in order: int64 CPU tensor, shape ``[pages * page_size]``."""
    count = len(pages)
    if count > _ONE_RUN_FROM and pages[-1] - pages[0] == count - 1 and (pages[1:] - pages[:-1] == 1).all():
        first = int(pages[0]) * page_size
        return torch.arange(first, first + count * page_size)  # several times faster than page by page
    tokens = pages[:, None] * page_size + np.arange(page_size, dtype=np.int64)
    return torch.from_numpy(tokens.reshape(-1))


def pages_of_tokens(tokens: torch.Tensor, page_size: int) -> PageArray:
    """Page numbers of a token index tensor that consists of whole pages.

    `tokens` is int64, shape ``[pages * page_size]``. A tensor on another device is copied to the
    host, which waits for that device; callers on a hot path pass page numbers instead.

    Raises `LayoutInvariantError` if the length or the first token is not page-aligned.
    """
    if tokens.numel() % page_size:
        raise LayoutInvariantError(f"{tokens.numel()} tokens are no whole number of pages of {page_size}")
    firsts = tokens[::page_size].to("cpu", torch.int64).numpy()
    if page_size > 1 and firsts.size and int((firsts % page_size).max()):
        raise LayoutInvariantError(f"a page starts at a token that is no multiple of page_size {page_size}: {firsts}")
    # Floor division makes a new array, so a caller that keeps the pages does not keep the tokens.
    pages: PageArray = firsts // page_size
    return pages
