"""Our options, on the parser of SGLang's server arguments and on its `Engine`: as they are, or refused.

They are refused, in one line, where the rest of ours is not in place. Nothing of SGLang's is imported, so that this
works on any release.
"""

from __future__ import annotations

import argparse
import multiprocessing
import pkgutil
import sys
from typing import TYPE_CHECKING, Any, Final, NoReturn

from sglang.srt.mem_cache.layouts.errors import LayoutConfigError
from sglang.srt.mem_cache.layouts.registry import known_layouts

from .choice import CONFIG_FLAG, CP_SHARED_FLAG, KEYWORDS, STRATEGY_FLAG

if TYPE_CHECKING:
    from collections.abc import Callable

_ENGINE_MODULE: Final = "sglang.srt.entrypoints.engine"


def add_to_parser(parser: argparse.ArgumentParser, *, refusal: str | None = None) -> None:
    """Add three options, in a group of their own. With `refusal`, each ends the process with that line."""
    group = parser.add_argument_group("KV layout strategies (sglang-kv-layouts)")
    group.add_argument(
        STRATEGY_FLAG,
        metavar="NAME",
        default=None,
        help="Which rank keeps which KV page, on the device and on the host. "
        f"One of: {', '.join(known_layouts())}. Needs --enable-hierarchical-cache.",
        action="store" if refusal is None else _refused(argparse._StoreAction, refusal),  # noqa: SLF001  # see there
    )
    group.add_argument(
        CONFIG_FLAG,
        metavar="JSON|@FILE",
        default=None,
        help="Settings of the layout strategy, as a JSON object.",
        action="store" if refusal is None else _refused(argparse._StoreAction, refusal),  # noqa: SLF001
    )
    group.add_argument(
        CP_SHARED_FLAG,
        help=f"The same as {STRATEGY_FLAG} cp_shared: ranks share pages out.",
        action="store_true" if refusal is None else _refused(argparse._StoreTrueAction, refusal),  # noqa: SLF001
    )


def add_to_engine(factory: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Let `Engine(...)` take our keywords: `factory` is given what makes its server arguments, and replaces it.

    Only where an engine can be made: not in SGLang's child processes.
    """
    if multiprocessing.parent_process() is not None and _ENGINE_MODULE not in sys.modules:
        return
    engine = pkgutil.resolve_name(f"{_ENGINE_MODULE}:Engine")
    engine.server_args_class = staticmethod(factory(engine.server_args_class))


def refusing_factory(refusal: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For `add_to_engine`: our keywords raise `LayoutConfigError` with that line, all others are handed on."""

    def factory(original: Callable[..., Any]) -> Callable[..., Any]:
        def build(*positional: object, **keywords: Any) -> Any:  # noqa: ANN401  # SGLang's ServerArgs
            for keyword, flag in KEYWORDS.items():
                if keywords.pop(keyword, None):
                    raise LayoutConfigError(f"{flag}: {refusal}")
            return original(*positional, **keywords)

        return build

    return factory


def _refused(stored: type[argparse.Action], refusal: str) -> type[argparse.Action]:
    """An action that ends the process with a line that says why.

    It is one of argparse's own kinds, for SGLang takes no others from a config file.
    """

    def refuse(
        _self: object, parser: argparse.ArgumentParser, _namespace: object, _values: object, option_string: str
    ) -> NoReturn:
        parser.exit(2, f"{parser.prog}: error: {option_string}: {refusal}\n")

    return type("_Refused", (stored,), {"__call__": refuse})
