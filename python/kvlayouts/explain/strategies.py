"""Strategies by name for the commands that only ask them: one a rank, errors in the words of the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlayouts.own_flags import in_own_words
from kvlayouts.replay.config import ReplayInputError
from sglang.srt.mem_cache.hicache.server.choice import choose
from sglang.srt.mem_cache.layouts.config import LayoutConfig
from sglang.srt.mem_cache.layouts.errors import LayoutConfigError
from sglang.srt.mem_cache.layouts.owners import refuse_shared_owners
from sglang.srt.mem_cache.layouts.registry import create_layout, known_layouts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sglang.srt.mem_cache.layouts.registry import AnyKVLayoutStrategy


def check_known(name: str) -> None:
    """Raise `ReplayInputError` unless there is a layout strategy called `name`."""
    if name not in known_layouts():
        raise ReplayInputError(f"--layout {name}: unknown; known layouts are {', '.join(known_layouts())}")


def read_layout_options(name: str, text: str) -> Mapping[str, object]:
    """The settings of a strategy from JSON or @FILE, as a server reads them. Raises `ReplayInputError`."""
    try:
        choice = choose(name, text, enable_cp_shared=False)
    except ValueError as error:
        raise ReplayInputError(in_own_words(error)) from error
    return choice.options if choice is not None else {}


def read_options_of_one(layouts: Sequence[str], text: str) -> Mapping[str, object]:
    """The same for a command that takes several strategies. Raises `ReplayInputError` unless exactly one is given."""
    if len(layouts) != 1:
        raise ReplayInputError(f"--layout-config {text}: needs exactly one --layout, got {len(layouts)}")
    check_known(layouts[0])
    return read_layout_options(layouts[0], text)


def create_rank(
    name: str, *, page_size: int, ranks: int, rank: int, options: Mapping[str, object]
) -> AnyKVLayoutStrategy:
    """The strategy of one rank of a group. Raises `ReplayInputError` if it refuses its settings or its geometry."""
    try:
        return create_layout(
            LayoutConfig(name=name, page_size=page_size, shard_size=ranks, shard_rank=rank, options=options)
        )
    except ValueError as error:
        raise ReplayInputError(f"--layout {name}: {in_own_words(error)}") from error


def create_group(
    name: str, *, page_size: int, ranks: int, options: Mapping[str, object]
) -> Sequence[AnyKVLayoutStrategy]:
    """The strategies of all ranks. Raises `ReplayInputError` besides where a page would not have exactly one owner."""
    layouts = [create_rank(name, page_size=page_size, ranks=ranks, rank=rank, options=options) for rank in range(ranks)]
    try:
        refuse_shared_owners(layouts)
    except LayoutConfigError as error:
        raise ReplayInputError(in_own_words(error)) from error
    return layouts
