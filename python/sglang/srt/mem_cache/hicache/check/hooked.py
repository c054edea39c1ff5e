"""Whether our hooks take what SGLang's functions are called with."""

from __future__ import annotations

import inspect
import pkgutil
from inspect import Parameter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ..server.hooks import Hook

_VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def misfits(hooks: Iterable[Hook]) -> Iterator[str]:
    """Each hook that a call of its function would break, with Python's reason."""
    for hook in hooks:
        try:
            _bind(hook)
        except TypeError as error:
            yield f"{hook.target}: {error}"


def _bind(hook: Hook) -> None:
    """Try the calls that the function takes: with and without its options, by position and by name.

    SGLang puts one argument in front, the original or its result. Raises TypeError for a call that ours refuses.
    """
    function: Any = pkgutil.resolve_name(hook.target)
    ours = inspect.signature(hook.function)
    parameters = [p for p in inspect.signature(function).parameters.values() if p.kind not in _VARIADIC]
    first = [None, *([None] if inspect.ismethod(function) else [])]  # the class, of a class method
    for chosen in (parameters, [p for p in parameters if p.default is Parameter.empty]):
        for by_name in (Parameter.KEYWORD_ONLY,), (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD):
            named = [p.name for p in chosen if p.kind in by_name and p.name != "self"]
            ours.bind(*first, *[None] * (len(chosen) - len(named)), **dict.fromkeys(named))
