"""What a storage tier calls one page of one shard.

    <hash of the page and all before it>.<store>.keyed.<tokens a page>.<shard>of<shards>

A key says what the bytes are and nothing about where they lie at the moment: no slot, no row, no host page, no
number of the rank that asks. So it is the same on every rank and in every run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from sglang.srt.mem_cache.layouts import LayoutConfigError

LAYOUT = "keyed"
_STORE = re.compile(r"[A-Za-z0-9-]{1,64}")
_KEY = re.compile(r"([0-9a-f]+)\.([A-Za-z0-9-]{1,64})\.keyed\.(\d+)\.(\d+)of(\d+)")


def check_store(store: str) -> str:
    """Return `store`; raise `LayoutConfigError` if it cannot be part of a key, which may become a file name."""
    if not _STORE.fullmatch(store):
        raise LayoutConfigError(f"--kv-layout-config: store must be 1 to 64 letters, digits or '-', got {store!r}")
    return store


@dataclass(frozen=True, slots=True, kw_only=True)
class PageKey:
    """Key of the page with content hash `page_hash` in shard `shard` of `shard_count`.

    `page_hash` is hexadecimal and covers the page's tokens and, through its parent's hash, all tokens before
    them. `store` names what else the bytes depend on and no backend says: the KV dtype, the weights' revision.
    """

    page_hash: str
    store: str
    page_tokens: int
    shard: int
    shard_count: int

    def __str__(self) -> str:
        return f"{self.page_hash}.{self.store}.{LAYOUT}.{self.page_tokens}.{self.shard}of{self.shard_count}"

    @classmethod
    def parse(cls, text: str) -> PageKey:
        """Inverse of `str`. Raises `ValueError` if `text` is no such key."""
        found = _KEY.fullmatch(text)
        if found is None:
            raise ValueError(f"not a key of layout {LAYOUT}: {text!r}")
        page_hash, store, *numbers = found.groups()
        page_tokens, shard, shard_count = (int(number) for number in numbers)
        return cls(page_hash=page_hash, store=store, page_tokens=page_tokens, shard=shard, shard_count=shard_count)
