"""The releases of SGLang that this distribution accepts, and what the stubs say of each.

``releases.txt`` is the only list of them. The stubs in ``typings/`` describe all releases at once: what one release
changed stands under ``if SINCE_0_5_23:``, as the stubs of Python's own library write ``if sys.version_info >= ...``.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Iterable

_CONDITION: Final = re.compile(r"SINCE_(\d+(?:_\d+)+)")


def supported_releases() -> tuple[str, ...]:
    """The accepted releases, oldest first."""
    lines = Path(__file__).with_name("releases.txt").read_text(encoding="utf-8").splitlines()
    return tuple(line for line in lines if line and not line.startswith("#"))


def holds(condition: str, release: str) -> bool:
    """Whether ``SINCE_0_5_23`` is true of a release; a suffix such as ``.post1`` changes nothing."""
    found = _CONDITION.fullmatch(condition)
    if found is None:
        raise ValueError(f"condition must look like SINCE_0_5_23, got {condition!r}")
    return _numbers(release) >= tuple(int(number) for number in found[1].split("_"))


def conditions_of(stub: str) -> set[str]:
    """The conditions that a text of a stub names."""
    return {found[0] for found in _CONDITION.finditer(stub)}


def stub_for(stub: ast.Module, release: str) -> ast.Module:
    """The stub as `release` has it: of each ``if SINCE_...:`` only the branch that is taken."""
    taken = _TakenBranches(release).visit(stub)
    assert isinstance(taken, ast.Module)
    return taken


def declares_something(statements: Iterable[ast.stmt]) -> bool:
    """Whether there is more than imports for the stub's own use: otherwise the release has no such module."""
    return any(
        not isinstance(statement, (ast.Import, ast.ImportFrom, ast.Pass))
        or any(alias.asname == alias.name for alias in getattr(statement, "names", ()))
        for statement in statements
    )


class _TakenBranches(ast.NodeTransformer):
    def __init__(self, release: str) -> None:
        self._release = release

    @override
    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        """Replace a condition on the release by its branch; leave any other one to be reported."""
        self.generic_visit(node)
        match node.test:
            case ast.Name(id=name) if _CONDITION.fullmatch(name):
                return node.body if holds(name, self._release) else node.orelse
            case ast.UnaryOp(op=ast.Not(), operand=ast.Name(id=name)) if _CONDITION.fullmatch(name):
                return node.orelse if holds(name, self._release) else node.body
        return node


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", release)[:3])
