"""What is relied on of a release of SGLang and shows in no signature, read from its source without loading it.

Facts are names and hashes, never text of SGLang's. scripts/relied/RELEASE.json holds those of each supported release.
"""

from __future__ import annotations

import ast
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Facts = dict[str, dict[str, str]]
"""By section and name: a hash, parameters, or nothing where the name says it all."""

RECORDS: Final = Path(__file__).resolve().parent / "relied"
TREE: Final = "asked of the tree"
METHODS: Final = "inherited methods"
FLAGS: Final = "fields of ServerArgs"
TAGS: Final = "message tags"
HOOKS: Final = "hooked functions"
ABSENT: Final = "not there"
NODES: Final = ", touches nodes"

_TREE_NAMES: Final = ("tree_cache", "prefix_cache")


def read_record(release: str) -> Facts:
    """The recorded facts of a release."""
    facts: Facts = json.loads((RECORDS / f"{release}.json").read_text(encoding="utf-8"))
    return facts


def write_record(release: str, facts: Facts) -> Path:
    """Record the facts of a release."""
    path = RECORDS / f"{release}.json"
    path.write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return path


def facts_of(source: Source, *, classes: Iterable[str], hooks: Iterable[str]) -> Facts:
    """The facts of a release; `classes` are those that ours extend and `hooks` the functions that ours hook."""
    methods: dict[str, str] = {}
    for base in sorted({base for name in classes for base in source.with_bases(name)}):
        methods |= _methods(base, source)
    return {
        TREE: dict.fromkeys(sorted(set(source.names_asked_of_the_tree())), ""),
        METHODS: methods,
        FLAGS: dict.fromkeys(sorted(source.flags()), ""),
        TAGS: dict.fromkeys(source.members("sglang.srt.distributed.communication_tags.P2PTag"), ""),
        HOOKS: {target: _parameters(source.definition(target)) for target in sorted(hooks)},
    }


class Source:
    """The source of an installed or unpacked SGLang; `folder` is the one that holds ``sglang/``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._modules: dict[str, ast.Module] = {}

    def module(self, name: str) -> ast.Module | None:
        """The module of a dotted name, None if there is none."""
        if name not in self._modules:
            stem = self._folder.joinpath(*name.split("."))
            path = next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()), None)
            if path is None:
                return None
            self._modules[name] = ast.parse(path.read_bytes())
        return self._modules[name]

    def definition(self, target: str) -> ast.stmt | None:
        """The class or function of a dotted name, None if it is not there; a method is looked for in bases too."""
        owner, _, name = target.rpartition(".")
        if (module := self.module(owner)) is not None:
            return _member(module.body, name)
        cls = self.definition(owner) if owner else None
        if not isinstance(cls, ast.ClassDef):
            return None
        found = _member(cls.body, name)
        if found is None:
            found = next((self.definition(f"{base}.{name}") for base in self._bases(owner, cls)), None)
        return found

    def with_bases(self, target: str) -> list[str]:
        """A class and all classes of SGLang's below it, by their full names."""
        cls = self.definition(target)
        bases = self._bases(target, cls) if isinstance(cls, ast.ClassDef) else ()
        return [target, *(each for base in bases if base.startswith("sglang.") for each in self.with_bases(base))]

    def members(self, target: str) -> list[str]:
        """The names that a class assigns or annotates, in alphabetical order."""
        cls = self.definition(target)
        return sorted(_fields(cls.body)) if isinstance(cls, ast.ClassDef) else []

    def flags(self) -> set[str]:
        """The fields of ServerArgs, which lie in classes of their own."""
        found = set(self.members("sglang.srt.server_args.ServerArgs"))
        for path in sorted((self._folder / "sglang/srt/arg_groups/fields").glob("*.py")):
            for statement in ast.parse(path.read_bytes()).body:
                if isinstance(statement, ast.ClassDef):
                    found |= {name for name in _fields(statement.body, annotated=True) if not name.startswith("_")}
        return found

    def names_asked_of_the_tree(self) -> Iterator[str]:
        """Every `name` of a ``tree_cache.name`` in SGLang, and of a ``getattr(tree_cache, "name")``."""
        for path in sorted((self._folder / "sglang/srt").rglob("*.py")):
            if "hicache" in path.parts or "layouts" in path.parts:  # ours, beside an installed SGLang
                continue
            text = path.read_bytes()
            if b"tree_cache" in text or b"prefix_cache" in text:
                yield from _asked(ast.parse(text))

    def _bases(self, target: str, cls: ast.ClassDef) -> Iterator[str]:
        """Full names of the bases that lie in the same module or are imported from one of SGLang's."""
        module_name = target.rpartition(".")[0]
        module = self.module(module_name)
        imports = [node for node in ast.walk(module) if isinstance(node, ast.ImportFrom)] if module else []
        for base in (base.id for base in cls.bases if isinstance(base, ast.Name)):
            place = next((i.module for i in imports if base in [a.asname or a.name for a in i.names]), module_name)
            yield f"{place}.{base}"


def _methods(target: str, source: Source) -> dict[str, str]:
    """The bases of a class and a hash of each of its methods; whether a method touches nodes is said too."""
    cls = source.definition(target)
    short = target.rpartition(".")[2]
    if not isinstance(cls, ast.ClassDef):
        return {short: ABSENT}
    methods = {f"{short}.{node.name}": _hash(node) for node in _functions(cls)}
    return {short: ", ".join(ast.unparse(base) for base in cls.bases)} | methods


def _hash(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    body = function.body
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:] or [ast.Pass()]
    bare = type(function)(**{**vars(function), "body": body})
    text = ast.unparse(bare)
    names = {node.attr for node in ast.walk(bare) if isinstance(node, ast.Attribute)}
    names |= {node.id for node in ast.walk(bare) if isinstance(node, ast.Name)}
    nodes = NODES if any("node" in name.lower() for name in names) else ""
    return hashlib.sha256(text.encode()).hexdigest()[:12] + nodes


def _parameters(function: ast.stmt | None) -> str:
    if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return ABSENT
    every = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return ", ".join(argument.arg for argument in every)


def _member(body: list[ast.stmt], name: str) -> ast.stmt | None:
    definitions = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return next((node for node in body if isinstance(node, definitions) and node.name == name), None)


def _functions(cls: ast.ClassDef) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for statement in cls.body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield statement


def _fields(body: list[ast.stmt], *, annotated: bool = False) -> Iterator[str]:
    for statement in body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.Assign(targets=[ast.Name(id=name)]) if not annotated:
                yield name


def _asked(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        match node:
            case ast.Attribute(value=ast.Name(id=owner) | ast.Attribute(attr=owner), attr=name):
                if owner in _TREE_NAMES:
                    yield name
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr"),
                args=[ast.Name(id=owner) | ast.Attribute(attr=owner), ast.Constant(value=str(name)), *_],
            ):
                if owner in _TREE_NAMES:
                    yield name
