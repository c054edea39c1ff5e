"""The rooms of `hicache/` build on each other in one order: no import leads to a higher room, and none in a circle."""

from __future__ import annotations

import ast
import unittest
from graphlib import TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING

from sglang.test.ci.ci_register import register_cpu_ci

import sglang.srt.mem_cache.hicache

if TYPE_CHECKING:
    from collections.abc import Iterator

register_cpu_ci(est_time=2, suite="base-a-test-cpu")

PACKAGE = "sglang.srt.mem_cache.hicache"
ROOT = Path(next(iter(sglang.srt.mem_cache.hicache.__path__)))
# From low to high. A folder stands for all its modules that no line names; those of one line may import each other.
ORDER = (
    ("seam", "accepted", "releases", "errors", "waits", "agreement", "runtime"),
    ("slots",),
    ("device",),
    ("host",),
    ("settings", "environment", "copies"),
    ("tree",),
    ("requests",),
    ("seam.calls", "seam.calls_since_0_5_23", "seam.calls_until_0_5_20", "seam.own_calls"),
    ("controller", "no_storage"),
    ("radix_cache",),
    ("assemble",),
    ("cpu",),
    ("server",),
    ("check",),
)
LEVEL = {room: level for level, rooms in enumerate(ORDER) for room in rooms}


def imports(module: str, source: str) -> Iterator[str]:
    """Modules of the package that `source` imports, as paths below it, those for type checkers and late ones too."""
    package = [PACKAGE, *module.split(".")[:-1]]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            names = [".".join([*base, *filter(None, [node.module])])]
            names += [f"{names[0]}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            below = name.removeprefix(f"{PACKAGE}.")
            if below != name and (ROOT / f"{below.replace('.', '/')}.py").is_file():
                yield below


def arrows(sources: dict[str, str]) -> dict[str, set[str]]:
    """What each module imports of the package."""
    return {module: set(imports(module, source)) for module, source in sources.items()}


def upward(graph: dict[str, set[str]]) -> list[str]:
    """Every arrow from a room to a higher one, as one line."""
    return [
        f"{module} imports {target}"
        for module, targets in sorted(graph.items())
        for target in sorted(targets)
        if _level(target) > _level(module)
    ]


def sources() -> dict[str, str]:
    """The text of every module of the package, by its path below it."""
    files = (file for file in ROOT.rglob("*.py") if file.name != "__init__.py")
    return {".".join(file.relative_to(ROOT).with_suffix("").parts): file.read_text(encoding="utf-8") for file in files}


def _level(module: str) -> int:
    return LEVEL[module if module in LEVEL else module.split(".")[0]]


class TestRooms(unittest.TestCase):
    def test_no_import_leads_to_a_higher_room(self) -> None:
        self.assertEqual(upward(arrows(sources())), [])

    def test_no_imports_go_in_a_circle(self) -> None:
        graph = arrows(sources())
        self.assertGreater(sum(map(len, graph.values())), 100)
        TopologicalSorter(graph).prepare()  # names the circle

    def test_every_kind_of_import_is_seen(self) -> None:
        text = (
            "from .tree import node\nfrom .slots.allocator import x\nif TYPE_CHECKING:\n    from . import assemble\n"
            f"def late():\n    import {PACKAGE}.server.args\n    from {PACKAGE}.host import ledger\n"
        )
        found = set(imports("accepted", text))
        self.assertEqual(found, {"tree.node", "slots.allocator", "assemble", "server.args", "host.ledger"})
        self.assertEqual(len(upward({"accepted": found})), 5)
        self.assertEqual(set(imports("tree.node", "from ..radix_cache import HiRadixCache")), {"radix_cache"})


if __name__ == "__main__":
    unittest.main()
