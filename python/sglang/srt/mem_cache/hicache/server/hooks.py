"""Hooks on SGLang's functions, and whether they are where they must be.

SGLang logs and swallows whatever goes wrong in a plugin, so nothing is taken for granted: the check before the launch
and the factory of the cache both ask `refuse_missing_hooks`, which looks for our functions. `hook_table` says which.
"""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.registry import get_radix_cache_factory

from sglang.srt.mem_cache.layouts.errors import LayoutConfigError

from .choice import RADIX_BACKEND

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from sglang.srt.plugins.hook_registry import HookType


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    """A function of ours on a function of SGLang's."""

    target: str
    function: Callable[..., Any]
    kind: HookType


_expected: list[Hook] = []  # in this process, since the plugin was registered in it


def expect_hooks(hooks: Iterable[Hook]) -> None:
    """From now on `refuse_missing_hooks` looks for these."""
    _expected[:] = hooks


def refuse_missing_hooks(asked: str, hooks: Sequence[Hook] | None = None) -> None:
    """Raise `LayoutConfigError` that names every function of SGLang's that our hooks did not reach.

    `hooks` are those that are expected, unless others are given. Where none are, the plugin was never registered.
    """
    wrong = missing_hooks(hooks)
    if wrong is not None:
        raise LayoutConfigError(f"{asked}: {wrong}")


def missing_hooks(hooks: Sequence[Hook] | None = None) -> str | None:
    """Which of SGLang's functions our hooks did not reach, and what to do; None if all are in place."""
    hooks = _expected if hooks is None else hooks
    missing = [hook.target for hook in hooks if not _is_applied(hook)] if hooks else ["any function"]
    if get_radix_cache_factory(RADIX_BACKEND) is None:
        missing.append(f"radix cache backend {RADIX_BACKEND}")
    if not missing:
        return None
    return (
        f"SGLang did not apply our hooks on {', '.join(missing)}; look for plugin errors in the log, "
        "and, if SGLANG_PLUGINS is set, add kv_layouts to it"
    )


def _is_applied(hook: Hook) -> bool:
    return any(hook.function in _closure(wrapper) for wrapper in _wrappers(hook.target))


def _wrappers(target: str) -> Iterator[Any]:
    """The function at `target`, what it wraps, what that wraps, ..."""
    try:
        function = pkgutil.resolve_name(target)
    except (ImportError, AttributeError):
        return
    while function is not None:
        function = getattr(function, "__func__", function)
        yield function
        function = getattr(function, "__wrapped__", None)


def _closure(function: Any) -> list[object]:  # noqa: ANN401  # any callable
    return [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
