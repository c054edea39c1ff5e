"""The table by which a server refuses, asked about a server that is only planned."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from kvlayouts.common.errors import InputError
from kvlayouts.common.own_flags import in_own_words
from sglang.srt.mem_cache.hicache.server.choice import STRATEGY_FLAG
from sglang.srt.mem_cache.hicache.server.facts import ModelFacts, ServerFacts, SettingUnknownError
from sglang.srt.mem_cache.hicache.server.refusals import refuse_what_does_not_fit
from sglang.srt.mem_cache.hicache.server.rule import Scope
from sglang.srt.mem_cache.layouts.errors import LayoutConfigError

if TYPE_CHECKING:
    from collections.abc import Collection


class _PlannedSettings:
    """The settings of a server as far as a plan has them. Rows of the table that ask for another one do not apply."""

    def __init__(self, known: dict[str, object]) -> None:
        self.__dict__.update(known)

    def __getattr__(self, name: str) -> NoReturn:
        raise SettingUnknownError(name)


def refuse_as_a_server(
    model: ModelFacts, layout: str, scopes: Collection[Scope], *, ranks: int, **settings: object
) -> None:
    """Raise `LayoutConfigError`, in a server's words, if one with NVIDIA GPUs refuses the model and the settings.

    `scopes` are those of the strategy called `layout`; `settings` are fields of SGLang's server args by name.
    """
    facts = ServerFacts(args=_PlannedSettings(settings), model=model, shard_size=ranks, on_cpu=False, on_nvidia=True)
    refuse_what_does_not_fit(facts, f"{STRATEGY_FLAG} {layout}", scopes)


def refuse_for_every_layout(model: ModelFacts, layout: str) -> None:
    """Raise `InputError` for a model that no strategy is served with, of which `layout` is one."""
    try:
        refuse_as_a_server(model, layout, {Scope.ANY}, ranks=1)
    except LayoutConfigError as error:
        raise InputError(in_own_words(error)) from error
