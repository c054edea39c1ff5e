"""Public docstrings say what a caller must know: that they exist, which errors are raised, which shapes arrays have.

Reads the source only, as the site's API reference does. That the words are right is for a reviewer.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

PYTHON = Path(__file__).parents[4] / "python"
MEM_CACHE = PYTHON / "sglang/srt/mem_cache"
PACKAGES = {"kvlayouts": PYTHON, "layouts": MEM_CACHE, "hicache": MEM_CACHE}  # and the folder that each lies in
ARRAYS = ("Tensor", "PageArray", "LaneArray", "IndexT")
CONTRACT = "Shapes, units and errors are those of"  # a class that says so leaves them to the protocol that it names
BUILDERS = {"__init__", "__post_init__"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Public(NamedTuple):
    """A public function or method with what documents it, the docstring of its class included where that counts."""

    place: str
    node: Function
    own_text: str
    text: str


def _modules() -> Iterator[tuple[str, ast.Module]]:
    for package, base in PACKAGES.items():
        for path in sorted((base / package).rglob("*.py")):
            source = path.read_text(encoding="utf-8")
            if source and not (path.name.startswith("_") and path.name != "__init__.py"):
                yield path.relative_to(base).as_posix(), ast.parse(source)


def _classes(tree: ast.Module | ast.ClassDef) -> Iterator[ast.ClassDef]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node
            yield from _classes(node)


def _is_accessory(node: Function) -> bool:
    """Overloads and setters are documented where the name is first defined; tests by their names."""
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    return node.name.startswith("test_") or any(name.endswith(("overload", ".setter")) for name in decorators)


def _functions(where: str, tree: ast.Module) -> Iterator[Public]:
    owners: list[ast.Module | ast.ClassDef] = [tree, *_classes(tree)]
    for owner in owners:
        of_class = (ast.get_docstring(owner) or "") if isinstance(owner, ast.ClassDef) else ""
        for node in owner.body:
            if not isinstance(node, Function) or _is_accessory(node):
                continue
            if node.name.startswith("_") and node.name not in BUILDERS:
                continue
            own = ast.get_docstring(node) or ""
            shared = of_class if node.name in BUILDERS or CONTRACT in of_class else ""
            place = f"{where}:{node.lineno} {getattr(owner, 'name', '')}.{node.name}"
            yield Public(place=place, node=node, own_text=own, text=f"{own}\n{shared}")


MODULES = dict(_modules())
FUNCTIONS = [function for where, tree in MODULES.items() for function in _functions(where, tree)]


def _raised(node: Function) -> set[str]:
    """Exceptions that the body itself makes and raises."""
    calls = (inner.exc for inner in ast.walk(node) if isinstance(inner, ast.Raise))
    return {ast.unparse(call.func).rpartition(".")[2] for call in calls if isinstance(call, ast.Call)}


def _annotations(node: Function) -> str:
    arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    notes = [argument.annotation for argument in arguments] + [node.returns]
    return " ".join(ast.unparse(note) for note in notes if note is not None)


def test_the_packages_are_found() -> None:
    assert len(MODULES) > 50
    assert len(FUNCTIONS) > 300


@pytest.mark.parametrize("where", MODULES)
def test_every_public_module_class_and_function_has_a_docstring(where: str) -> None:
    tree = MODULES[where]
    assert ast.get_docstring(tree), where
    assert [node.name for node in _classes(tree) if not ast.get_docstring(node)] == []
    bare = [f.place for f in _functions(where, tree) if not f.own_text and f.node.name not in BUILDERS]
    assert bare == []


def test_docstrings_name_the_errors_that_a_function_raises_itself() -> None:
    unnamed = [
        f"{function.place}: {error}"
        for function in FUNCTIONS
        if not function.place.startswith("kvlayouts/")  # commands end with one line for their user instead
        for error in sorted(_raised(function.node))
        if error not in function.text and CONTRACT not in function.text
    ]
    assert unnamed == []


def _gives_shapes(function: Public) -> bool:
    """Says so, or shows a shape, or is one of SGLang's methods (or of a contract's) that are documented there."""
    said = any(word in function.text for word in ("``[", "SGLang's", "See `", "see `"))
    return said or "shape" in function.text.lower()


@pytest.mark.parametrize(("package", "arrays"), [("layouts/", ARRAYS), ("hicache/", ("Tensor",))])
def test_docstrings_give_the_shapes_of_arrays(package: str, arrays: tuple[str, ...]) -> None:
    """Above the layout layer an array of pages is what its type says: one number a page."""
    shapeless = [
        function.place
        for function in FUNCTIONS
        if function.place.startswith(package)
        if function.node.name not in BUILDERS and not _gives_shapes(function)
        if any(name in _annotations(function.node) for name in arrays)
    ]
    assert shapeless == []
