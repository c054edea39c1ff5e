"""Compares SGLang as our stubs describe it with SGLang as it is installed.

mypy believes the stubs; this tells whether they are true. Every ``.pyi`` file is read with `ast`, its module is
imported, and each name that the file declares is looked up there::

    import x as x        the module has it
    name: T              the module has it; on a class: a class attribute, an annotation, or ``self.name = ...`` in
                         the source of the class or of a base; never a method
    class C(B)           a class with B among its bases; an enum's values and a dataclass's fields as declared
    def f(a, *, b=1)     every call that the stub allows can be made: see `signature_parameters`

Of ``if SINCE_0_5_23:`` only the branch of the release in question counts, see `releases`. A module of which nothing is
left is none of that release's.

Types are not compared, as SGLang annotates few. What exists for type checkers only is left out: aliases annotated
``TypeAlias`` and classes marked ``@type_check_only``. Any other statement is reported, never skipped.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import textwrap
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from typing_extensions import override

from sglang.srt.mem_cache.layouts.errors import LayoutConfigError

from ..releases import declares_something, stub_for
from .parameters import call_differences, declared_parameters, field_parameters

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import ModuleType

_ABSENT = object()
_TYPING_BASES = frozenset({"Generic", "NamedTuple", "Protocol"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SignatureMismatch:
    """One difference between a stub and the installed module, as one line of text."""

    module: str
    symbol: str
    difference: str

    @override
    def __str__(self) -> str:
        return (
            f"{self.module}: {self.symbol}: {self.difference}" if self.symbol else f"{self.module}: {self.difference}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SignatureReport:
    """How many modules and declared names were compared, and what differs, in the order of the stubs."""

    modules: int
    symbols: int
    mismatches: tuple[SignatureMismatch, ...]


def check_signatures(stub_dir: Path, *, release: str, package: str = "sglang") -> SignatureReport:
    """Compare the stubs of `package` and its subpackages, as `release` has them, with what is installed.

    Imports every module that has a stub, for SGLang a matter of ten seconds; a module that cannot be imported is a
    mismatch. Raises `LayoutConfigError` if `stub_dir` holds no stub of `package`.
    """
    root = stub_dir.joinpath(*package.split("."))
    files = sorted([*root.rglob("*.pyi"), *root.parent.glob(f"{root.name}.pyi")])
    if not files:
        raise LayoutConfigError(f"stub directory must hold stubs (.pyi) of {package}, got {stub_dir}")
    modules, symbols, mismatches = 0, 0, []
    for file in files:
        stub = stub_for(ast.parse(file.read_text(encoding="utf-8"), str(file)), release)
        if not declares_something(stub.body):
            continue
        modules += 1
        name = ".".join(file.relative_to(stub_dir).with_suffix("").parts).removesuffix(".__init__")
        module_check = _ModuleCheck(name)
        module_check.run(stub)
        symbols += module_check.symbols
        mismatches += module_check.mismatches
    return SignatureReport(modules=modules, symbols=symbols, mismatches=tuple(mismatches))


class _ModuleCheck:
    def __init__(self, module_name: str) -> None:
        self.module_name = module_name
        self.symbols = 0
        self.mismatches: list[SignatureMismatch] = []

    def run(self, stub: ast.Module) -> None:
        try:
            module = importlib.import_module(self.module_name)
        except Exception as error:  # a module may fail in any way while it is imported
            reason = (str(error).splitlines() or [""])[0]
            self._report("", f"cannot be imported: {type(error).__name__}: {reason}")
            return
        for statement in stub.body:
            self._statement(statement, module, "")

    def _report(self, symbol: str, difference: str) -> None:
        self.mismatches.append(SignatureMismatch(module=self.module_name, symbol=symbol, difference=difference))

    def _statement(self, statement: ast.stmt, owner: ModuleType | type, prefix: str) -> None:
        match statement:
            case ast.Expr(value=ast.Constant()) | ast.Pass() | ast.Import():
                pass
            case ast.ImportFrom(names=names):
                self._reexports(names, owner)
            case ast.AnnAssign(annotation=annotation) if _last_name(annotation) == "TypeAlias":
                pass
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation):
                self._attribute(name, owner, prefix, on_class=_last_name(annotation) == "ClassVar")
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if isinstance(owner, type):
                self._class_value(name, value, owner, prefix)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._function(statement, owner, prefix)
            case ast.ClassDef() if "type_check_only" not in _decorators(statement):
                self._class(statement, owner, prefix)
            case ast.ClassDef():
                pass
            case _:
                self._report(prefix.rstrip("."), f"line {statement.lineno} of the stub is nothing that can be compared")

    def _reexports(self, names: list[ast.alias], owner: ModuleType | type) -> None:
        for alias in names:
            if alias.name == alias.asname:  # the form that exports a name from a stub
                self.symbols += 1
                if not hasattr(owner, alias.name):
                    self._report(alias.name, "is not there")

    def _attribute(self, name: str, owner: ModuleType | type, prefix: str, *, on_class: bool) -> None:
        self.symbols += 1
        if isinstance(owner, type):
            found = inspect.getattr_static(owner, name, _ABSENT)
        else:
            found = getattr(owner, name, _ABSENT)  # a module may make an attribute when it is asked for
        if _is_method(found):
            self._report(prefix + name, "is a method, the stub says an attribute")
        elif found is not _ABSENT:
            return
        elif not isinstance(owner, type):
            self._report(prefix + name, "is not there")
        elif on_class:
            self._report(prefix + name, "is no class attribute of the class or its bases")
        elif name not in _instance_attributes(owner):
            self._report(prefix + name, "is no attribute of the class or its bases")

    def _class_value(self, name: str, stub_value: ast.expr, owner: type, prefix: str) -> None:
        self.symbols += 1
        found = inspect.getattr_static(owner, name, _ABSENT)
        value = found.value if isinstance(found, Enum) else found
        if found is _ABSENT:
            self._report(prefix + name, "is not there")
        elif isinstance(stub_value, ast.Constant) and stub_value.value not in (..., value):
            self._report(prefix + name, f"is {value!r}, the stub says {stub_value.value!r}")

    def _class(self, stub: ast.ClassDef, owner: ModuleType | type, prefix: str) -> None:
        self.symbols += 1
        symbol = prefix + stub.name
        found = getattr(owner, stub.name, _ABSENT)
        if found is _ABSENT:
            self._report(symbol, "is not there")
            return
        if not isinstance(found, type):
            self._report(symbol, f"is a {type(found).__name__}, the stub says a class")
            return
        bases = [_last_name(base) for base in stub.bases]
        for base in set(bases) - _TYPING_BASES - {cls.__name__ for cls in found.__mro__}:
            self._report(symbol, f"is not derived from {base}")
        if "dataclass" in _decorators(stub) or "NamedTuple" in bases:
            self._calls(symbol, found, field_parameters(stub))
        for statement in stub.body:
            self._statement(statement, found, f"{symbol}.")

    def _function(self, stub: ast.FunctionDef | ast.AsyncFunctionDef, owner: ModuleType | type, prefix: str) -> None:
        self.symbols += 1
        symbol = prefix + stub.name
        found = inspect.getattr_static(owner, stub.name, _ABSENT)
        if found is _ABSENT:
            self._report(symbol, "is not there")
            return
        declared, actual = _declared_kind(stub, owner), _actual_kind(found, owner)
        if declared != actual:
            self._report(symbol, f"is a {actual}, the stub says a {declared}")
        elif declared != "property":
            # A static look-up finds the function under its decorator, with `self` or `cls` as in the stub.
            function = found.__func__ if isinstance(found, (staticmethod, classmethod)) else found
            self._calls(symbol, function, declared_parameters(stub.args))

    def _calls(self, symbol: str, function: object, declared: list[inspect.Parameter]) -> None:
        if not callable(function):
            self._report(symbol, f"is a {type(function).__name__}, the stub says a function")
            return
        try:
            actual = inspect.signature(function)
        except ValueError:
            self._report(symbol, "has no signature that can be read")
            return
        for difference in call_differences(declared, list(actual.parameters.values())):
            self._report(symbol, difference)


def _declared_kind(stub: ast.FunctionDef | ast.AsyncFunctionDef, owner: ModuleType | type) -> str:
    decorators = _decorators(stub)
    if decorators & {"property", "cached_property", "setter", "deleter"}:
        return "property"
    special = decorators & {"staticmethod", "classmethod"}
    return special.pop() if special else "method" if isinstance(owner, type) else "function"


def _actual_kind(found: object, owner: ModuleType | type) -> str:
    if isinstance(found, (property, functools.cached_property)) or inspect.isdatadescriptor(found):
        return "property"
    if isinstance(found, (staticmethod, classmethod)):
        return type(found).__name__
    if not callable(found):
        return "plain attribute"
    return "method" if isinstance(owner, type) else "function"


def _is_method(found: object) -> bool:
    return inspect.isroutine(found) and not inspect.isdatadescriptor(found)


def _decorators(stub: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    return {_last_name(decorator) for decorator in stub.decorator_list}


def _last_name(expression: ast.expr) -> str:
    """``C`` of ``C``, ``a.b.C``, ``C[...]`` and ``C(...)``."""
    match expression:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(value=inner) | ast.Call(func=inner):
            return _last_name(inner)
    return ast.unparse(expression)


def _instance_attributes(cls: type) -> set[str]:
    """Names that the class or a base annotates or assigns to ``self``."""
    return set().union(*(_own_instance_attributes(base) for base in cls.__mro__ if base is not object))


@functools.cache
def _own_instance_attributes(cls: type) -> frozenset[str]:
    try:
        source = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError):  # built in, or made at run time
        return frozenset(inspect.get_annotations(cls))
    return frozenset(inspect.get_annotations(cls)) | frozenset(_assigned_to_self(source))


def _assigned_to_self(source: ast.Module) -> Iterator[str]:
    for node in ast.walk(source):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name
