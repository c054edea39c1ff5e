"""`CopiesAhead`: once the host is full, the leaves that leave the device next are copied before they do.

A hit is then put off until its node leaves, and an eviction that copies waits for the copy, behind the forward pass
under way. So each eviction copies for the next ones::

    device order    leaves next ─────────────────────────────────────▶ leaves last
                    │ copied, or being copied │ put off
                    └──────── window ─────────┘

Nothing is locked: a leaf whose copy is under way can leave, and its slots are free when that copy has ended. So what
the scheduler is told to be evictable remains so. Everything is decided from mirrored state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Generic

from sglang.srt.mem_cache.layouts.protocol import MetadataT

if TYPE_CHECKING:
    from ..settings import HiCacheSettings
    from .accounting import Accounting
    from .backups import Backups
    from .node import LayoutTreeNode

DEVICE_SHARE: Final = 32
"""The window is this part of the device, and at least a page: what is in it is on both tiers."""

HOST_SHARE: Final = 8
"""It is at most this part of the host, which would serve little else: a host of fewer pages has none."""


class CopiesAhead(Generic[MetadataT]):
    """Copies for evictions to come. Under write_back nothing is copied before it leaves.

    `device_pages` and `host_pages` are those that the tiers hold, in all lanes, of `page_size` tokens.
    """

    def __init__(
        self,
        *,
        settings: HiCacheSettings,
        device_pages: int,
        host_pages: int,
        page_size: int,
        accounting: Accounting[MetadataT],
        backups: Backups[MetadataT],
    ) -> None:
        # Whole pages, so that a plan, which counts in pages, decides alike.
        window_pages = min(max(device_pages // DEVICE_SHARE, 1), host_pages // HOST_SHARE)
        self._wanted = settings.write_policy != "write_back" and window_pages > 0
        self._window = window_pages * page_size
        self._accounting = accounting
        self._backups = backups
        self._left = 0

    def evicted(self, tokens: int) -> None:
        """`tokens` have left the device: copy what comes next, if less than half a window is left of it.

        So a leaf is looked at about twice before it leaves. Nothing is done until a backup had to be put off, nor while
        all that is next has its copy.
        """
        self._left -= tokens
        if tokens and self._wanted and self._backups.put_off and self._left <= self._window // 2:
            self._backups.put_off = self._copy(self._next_leaves())
            self._left = self._window

    def _next_leaves(self) -> list[LayoutTreeNode[MetadataT]]:
        """The leaves that go first, a window of them and at least one."""
        tokens = 0

        def fills_the_window(leaf: LayoutTreeNode[MetadataT]) -> bool:
            nonlocal tokens
            tokens += leaf.tokens
            return tokens >= self._window

        return self._accounting.device_order.first_until(fills_the_window)

    def _copy(self, leaves: list[LayoutTreeNode[MetadataT]]) -> bool:
        """Those that lack a copy get one, while room can be made without giving up that of another.

        Returns whether any lacked one.
        """
        copies = self._accounting.host_copies
        for leaf in leaves:
            copies.hold(leaf)
        lacking = [leaf for leaf in leaves if not leaf.backuped and self._backups.earns_a_copy(leaf)]
        for leaf in lacking:
            if not self._backups.back_up_path(leaf):
                break
            self._backups.submit()  # by itself: an eviction that waits for this leaf waits for no later one
        for leaf in leaves:
            copies.release(leaf)
        return bool(lacking)
