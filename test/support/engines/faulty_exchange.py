"""A plugin for the negative control: ranks leave the exchange after a load out, so that pages of others stay stale.

Installed by a test as an entry point of the group ``sglang.srt.plugins``; SGLang loads it in every scheduler.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.hicache.copies import exchange


def register() -> None:
    """Make `PageExchanger` give nothing and take nothing."""
    exchanger: Any = exchange.PageExchanger

    def give_nothing(*_arguments: object) -> None:
        return

    exchanger._give = give_nothing  # noqa: SLF001  # the fault is meant to be inside
