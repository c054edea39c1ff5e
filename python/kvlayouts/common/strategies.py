"""Strategies by name for the commands that only ask them: one a rank, errors in the words of the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvlayouts.common.alone import load_alone, rejoin
from kvlayouts.common.errors import InputError
from kvlayouts.common.own_flags import in_own_words

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sglang.srt.mem_cache.layouts.protocol import AnyKVLayoutStrategy

_LIGHT: Final = (
    *("layouts.errors", "layouts.config", "layouts.registry", "layouts.capabilities", "layouts.facts"),
    *("hicache", "hicache.server", "hicache.host", "hicache.device"),
)
"""What knows names and settings of strategies and sizes of pools. Neither PyTorch nor SGLang comes with it."""


def load_layouts() -> None:
    """Make `sglang.srt.mem_cache.layouts` importable without SGLang. PyTorch and numpy come with it."""
    _load(*_LIGHT, "layouts")


def check_known(name: str) -> None:
    """Raise `InputError` unless there is a layout strategy called `name`."""
    _load(*_LIGHT)
    from sglang.srt.mem_cache.layouts.registry import known_layouts

    if name not in known_layouts():
        raise InputError(f"--layout {name}: unknown; known layouts are {', '.join(known_layouts())}")


def read_options(layouts: Sequence[str], text: str | None) -> Mapping[str, object]:
    """The settings of the one strategy in `layouts` from JSON or @FILE, as a server reads them; none for None.

    Raises `InputError`, for a name that is not known too.
    """
    for name in layouts:
        check_known(name)
    if text is None:
        return {}
    if len(layouts) != 1:
        raise InputError(f"--layout-config {text}: needs exactly one --layout, got {len(layouts)}")
    from sglang.srt.mem_cache.hicache.server.choice import choose

    try:
        choice = choose(layouts[0], text, enable_cp_shared=False)
    except ValueError as error:
        raise InputError(in_own_words(error)) from error
    return choice.options if choice is not None else {}


def create_rank(
    name: str, *, page_size: int, shard_size: int, rank: int, options: Mapping[str, object]
) -> AnyKVLayoutStrategy:
    """The strategy of one rank of a group. Raises `InputError` if it refuses its settings or its geometry."""
    load_layouts()
    from sglang.srt.mem_cache.layouts.config import LayoutConfig
    from sglang.srt.mem_cache.layouts.registry import BUILT_IN, create_layout

    if name not in BUILT_IN:
        rejoin()  # another distribution's may use what it likes of SGLang
    try:
        return create_layout(
            LayoutConfig(name=name, page_size=page_size, shard_size=shard_size, shard_rank=rank, options=options)
        )
    except ValueError as error:
        raise InputError(f"--layout {name}: {in_own_words(error)}") from error


def create_group(
    name: str, *, page_size: int, shard_size: int, options: Mapping[str, object]
) -> Sequence[AnyKVLayoutStrategy]:
    """The strategies of all ranks. Raises `InputError` besides where a page would not have exactly one owner."""
    layouts = [
        create_rank(name, page_size=page_size, shard_size=shard_size, rank=rank, options=options)
        for rank in range(shard_size)
    ]
    from sglang.srt.mem_cache.layouts.errors import LayoutConfigError
    from sglang.srt.mem_cache.layouts.owner_check import refuse_shared_owners

    try:
        refuse_shared_owners(layouts)
    except LayoutConfigError as error:
        raise InputError(in_own_words(error)) from error
    return layouts


def _load(*names: str) -> None:
    for name in names:
        load_alone(name)
