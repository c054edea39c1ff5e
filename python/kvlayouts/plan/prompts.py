"""The prompts of a trace as prefix ids: what a radix tree over pages needs of them, without any token.

Two prompts have equal tokens up to some token if, and only if, they have equal block ids up to that token's block. So
the trace is walked once through a prefix tree of blocks, and a *prefix id* stands for a block and all before it. Page
`p` of one prompt equals page `p` of another, all earlier pages included, exactly if the prefix ids of the blocks in
which the page ends are equal::

    block ids       7    2    9         7    2    4
    prefix ids      0    1    2         0    1    3          a page that ends in the third block differs
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from kvlayouts.common.trace import token_ids
from kvlayouts.common.values import ceil_div

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvlayouts.common.trace import Trace, TraceRequest
    from sglang.srt.mem_cache.layouts.pages import PageArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt: `tokens` of them, `prefix_ids` one a block, `first_page` a number of its first page's content."""

    tokens: int
    prefix_ids: tuple[int, ...]
    first_page: int


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """All prompts of a trace, in order, cut into pages. `first_pages` are the contents that `Prompt.first_page` counts:
    int64 token ids of at most one page, as bytes.
    """

    page_size: int
    block_tokens: int
    prompts: tuple[Prompt, ...]
    first_pages: tuple[bytes, ...]

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self.prompts)

    def __len__(self) -> int:
        return len(self.prompts)

    def page_keys(self, prompt: Prompt) -> array[int]:
        """A token for each whole page of `prompt`: the prefix id of the block in which the page ends."""
        blocks = self._last_blocks[: prompt.tokens // self.page_size]
        keys = array("q")
        keys.frombytes(np.array(prompt.prefix_ids, dtype=np.int64)[blocks].tobytes())
        return keys

    @cached_property
    def _last_blocks(self) -> PageArray:
        """For each page of the longest prompt, the block in which it ends."""
        ends = np.arange(1, self.longest_pages + 1, dtype=np.int64) * self.page_size
        return (ends - 1) // self.block_tokens

    @property
    def longest_pages(self) -> int:
        """Pages of the longest prompt, the partial one at its end included."""
        return max(ceil_div(prompt.tokens, self.page_size) for prompt in self.prompts)

    @property
    def distinct_pages(self) -> int:
        """Whole pages of the trace that differ in content or in what precedes them: what a cache of all of it holds."""
        size, block = self.page_size, self.block_tokens
        longest: dict[int, int] = {}  # by prefix id: the tokens of that block that some prompt has
        first: dict[int, int] = {}  # by prefix id: number of the block in its prompt
        for prompt in self.prompts:
            for number, prefix in enumerate(prompt.prefix_ids):
                have = min(block, prompt.tokens - number * block)
                longest[prefix] = max(longest.get(prefix, 0), have)
                first[prefix] = number
        return sum(
            (first[prefix] * block + have) // size - first[prefix] * block // size for prefix, have in longest.items()
        )


def read_prompts(trace: Trace, page_size: int) -> Prompts:
    """Walk `trace` once; pages have `page_size` tokens."""
    prefixes: dict[tuple[int, int], int] = {}
    contents: dict[bytes, int] = {}
    prompts = []
    for request in trace.requests:
        prefix_ids, prefix = [], -1
        for block_id in request.block_ids:
            prefix = prefixes.setdefault((prefix, block_id), len(prefixes))
            prefix_ids.append(prefix)
        content = _first_page(request, trace.block_tokens, page_size)
        prompts.append(
            Prompt(
                tokens=request.prompt_tokens,
                prefix_ids=tuple(prefix_ids),
                first_page=contents.setdefault(content, len(contents)),
            )
        )
    return Prompts(
        page_size=page_size, block_tokens=trace.block_tokens, prompts=tuple(prompts), first_pages=tuple(contents)
    )


def _first_page(request: TraceRequest, block_tokens: int, page_size: int) -> bytes:
    """The token ids of a prompt's first page, or of all of a shorter prompt."""
    blocks = ceil_div(page_size, block_tokens)
    head = replace(
        request,
        prompt_tokens=min(request.prompt_tokens, page_size),
        block_ids=request.block_ids[:blocks],
    )
    return token_ids(head, block_tokens).tobytes()
