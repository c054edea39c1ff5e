"""What the scheduler asks of a cache about the storage (L3) tier, answered for a cache that has none.

A storage backend is refused at construction, by the strategy's `validate` and, whatever that says, here, and at run
time: also where the strategy could name its pages for one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.layouts.capabilities import names_pages
from sglang.srt.mem_cache.layouts.checks import storage_refusal
from sglang.srt.mem_cache.layouts.errors import LayoutConfigError

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle

    from sglang.srt.mem_cache.layouts.protocol import KVLayoutStrategy


def refuse_storage_backend(layout: KVLayoutStrategy[Any], backend: str | None) -> None:
    """Raise `LayoutConfigError` for a storage backend, which nothing would ever be stored in."""
    if backend is not None:
        raise LayoutConfigError(_refusal(layout, backend))


def _refusal(layout: KVLayoutStrategy[Any], backend: str) -> str:
    name = layout.name
    if names_pages(layout):
        return storage_refusal(name, backend, "it can name its pages, but no storage tier asks it to yet")
    return storage_refusal(name, backend)


class NoStorageTier:
    """Mixin with the scheduler's storage calls. Nothing is ever prefetched, attached or stored."""

    layout: KVLayoutStrategy[Any]

    enable_storage = False
    enable_storage_metrics = False
    hicache_storage_pass_prefix_keys = False

    def attach_storage_backend(self, storage_backend: str, **_settings: object) -> tuple[bool, str]:
        """Refuse, naming both settings; nothing is changed."""
        return False, _refusal(self.layout, storage_backend)

    def detach_storage_backend(self) -> tuple[bool, str]:
        """There is none to detach."""
        return True, "No HiCache storage backend is attached."

    def clear_storage_backend(self) -> bool:
        """Nothing was cleared."""
        return False

    def prefetch_from_storage(self, *_request: object, **_named: object) -> None:
        """No prefetch is started."""

    def check_prefetch_progress(self, handle: CacheRequestHandle) -> bool:
        """A request never waits for a prefetch."""
        return True

    def has_ongoing_prefetch(self, handle: CacheRequestHandle) -> bool:
        """No prefetch is under way."""
        return False

    def pop_prefetch_loaded_tokens(self, handle: CacheRequestHandle) -> int:
        """No token came from storage."""
        return 0

    def query_storage_hit_length(self, *_request: object, **_named: object) -> int:
        """Storage holds nothing."""
        return 0
