"""Whether a function takes every call that its stub allows.

A stub may leave out what it does not use and may demand more than the function does::

    function                    stub that is true                        stub that is not, and why
    f(a, b=1, c=2)              f(a), f(a, b=1), f(a, *, c=2)            f(a, c=2): `c` is third, not second
    f(a, *, b)                  f(a, *, b)                               f(a): `b` is required
    f(a)                        f(a), f(x, /)                            f(a=1): `a` is required
"""

from __future__ import annotations

import ast
from inspect import Parameter
from itertools import zip_longest
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from inspect import _ParameterKind  # the type of Parameter.kind has no public name

_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
_VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def declared_parameters(arguments: ast.arguments) -> list[Parameter]:
    """The parameters of a function in a stub, in order; a default stands for any default."""
    positional = [*arguments.posonlyargs, *arguments.args]
    first_default = len(positional) - len(arguments.defaults)
    parameters = [
        _parameter(
            argument.arg,
            Parameter.POSITIONAL_ONLY if at < len(arguments.posonlyargs) else Parameter.POSITIONAL_OR_KEYWORD,
            at >= first_default,
        )
        for at, argument in enumerate(positional)
    ]
    if arguments.vararg:
        parameters.append(_parameter(arguments.vararg.arg, Parameter.VAR_POSITIONAL, False))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parameters.append(_parameter(argument.arg, Parameter.KEYWORD_ONLY, default is not None))
    if arguments.kwarg:
        parameters.append(_parameter(arguments.kwarg.arg, Parameter.VAR_KEYWORD, False))
    return parameters


def field_parameters(stub: ast.ClassDef) -> list[Parameter]:
    """The parameters with which a dataclass or named tuple of a stub is made: its fields, in order."""
    kind = Parameter.KEYWORD_ONLY if _is_keyword_only(stub) else Parameter.POSITIONAL_OR_KEYWORD
    return [
        _parameter(field.target.id, kind, field.value is not None)
        for field in stub.body
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and "ClassVar" not in ast.unparse(field.annotation)
    ]


def call_differences(declared: Sequence[Parameter], actual: Sequence[Parameter]) -> Iterator[str]:
    """What keeps a call that `declared` allows from being made with `actual`, a phrase each."""
    by_name = {parameter.name: parameter for parameter in actual}
    kinds = {parameter.kind for parameter in actual}
    for parameter in declared:
        if parameter.kind in _VARIADIC:
            if parameter.kind not in kinds:
                yield f"takes no {parameter}"
        elif parameter.kind is not Parameter.POSITIONAL_ONLY and parameter.name not in by_name:
            yield f"has no parameter {parameter.name!r}: {_listed(actual)}"
        elif parameter.kind is Parameter.KEYWORD_ONLY and by_name[parameter.name].kind not in _BY_NAME:
            yield f"does not take {parameter.name!r} by name, the stub does"
        elif parameter.default is not Parameter.empty and _is_required(by_name.get(parameter.name)):
            yield f"requires {parameter.name!r}, the stub has a default"
    yield from _order_differences(declared, actual)
    known = {parameter.name for parameter in declared}
    unnamed = sum(parameter.kind is Parameter.POSITIONAL_ONLY for parameter in declared)
    for parameter in actual[unnamed:]:
        if _is_required(parameter) and parameter.name not in known:
            yield f"requires {parameter.name!r}, which the stub lacks"


def _order_differences(declared: Sequence[Parameter], actual: Sequence[Parameter]) -> Iterator[str]:
    """Positional parameters of the stub must be the function's first ones, in its order."""
    places = [parameter for parameter in actual if parameter.kind in _POSITIONAL]
    names = {parameter.name: parameter for parameter in actual}
    wanted = [parameter for parameter in declared if parameter.kind in _POSITIONAL]
    for number, (stub, real) in enumerate(zip_longest(wanted, places[: len(wanted)]), start=1):
        by_place_only = stub.kind is Parameter.POSITIONAL_ONLY
        if real is None and by_place_only:
            yield f"takes {len(places)} parameters by position, the stub {len(wanted)}"
            return
        if by_place_only or stub.name not in names or (real is not None and real.name == stub.name):
            continue
        if names[stub.name].kind not in _POSITIONAL:
            yield f"takes {stub.name!r} by name only, the stub by position"
        else:
            yield f"has {stub.name!r} at position {places.index(names[stub.name]) + 1}, the stub at {number}"


def _parameter(name: str, kind: _ParameterKind, optional: bool) -> Parameter:
    return Parameter(name, kind, default=... if optional else Parameter.empty)


def _is_required(parameter: Parameter | None) -> bool:
    return parameter is not None and parameter.kind not in _VARIADIC and parameter.default is Parameter.empty


def _is_keyword_only(stub: ast.ClassDef) -> bool:
    keywords = [
        key for decorator in stub.decorator_list if isinstance(decorator, ast.Call) for key in decorator.keywords
    ]
    return any(key.arg == "kw_only" and ast.unparse(key.value) == "True" for key in keywords)


def _listed(parameters: Sequence[Parameter]) -> str:
    return f"({', '.join(parameter.name for parameter in parameters)})"
