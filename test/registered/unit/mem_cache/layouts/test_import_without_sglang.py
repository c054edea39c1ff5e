"""`layouts` stands alone: it neither imports SGLang nor needs it installed."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from sglang.test.ci.ci_register import register_cpu_ci

from sglang.srt.mem_cache import layouts

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

SOURCES = sorted(Path(layouts.__file__).parent.rglob("*.py"))

# A process in which the only part of `sglang` is this package: its parents are empty namespaces.
ALONE = """
import importlib, importlib.abc, importlib.machinery, pathlib, pkgutil, sys

layouts = pathlib.Path(sys.argv[1])
parents = {"sglang": layouts.parents[2], "sglang.srt": layouts.parents[1], "sglang.srt.mem_cache": layouts.parent}


class OnlyLayouts(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in parents:
            spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = [str(parents[name])]
            return spec
        if name.split(".")[0] == "sglang" and not (name + ".").startswith("sglang.srt.mem_cache.layouts."):
            raise ImportError("layouts must not import " + name)
        return None


sys.meta_path.insert(0, OnlyLayouts())
package = importlib.import_module("sglang.srt.mem_cache.layouts")
names = [module.name for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
for name in names:
    importlib.import_module(name)
config = package.LayoutConfig(name="cp_shared", page_size=16, shard_size=2)
assert package.create_layout(config).lane_count == 2
foreign = [n for n in sys.modules if n.startswith("sglang.") and n not in parents and "mem_cache.layouts" not in n]
print(len(names), foreign)
"""


def test_every_module_imports_and_builds_a_strategy_where_sglang_is_not_installed() -> None:
    result = subprocess.run(
        [sys.executable, "-c", ALONE, str(SOURCES[0].parent)], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == f"{len(SOURCES) - 1} []"


@pytest.mark.parametrize("source", SOURCES, ids=[source.name for source in SOURCES])
def test_no_source_names_a_module_outside_the_package_and_its_three_libraries(source: Path) -> None:
    tree = ast.parse(source.read_text())
    absolute = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    absolute |= {
        node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level and node.module
    }
    tools = {"pytest", "hypothesis"} if source.name.startswith("testing") else set()
    allowed = set(sys.stdlib_module_names) | {"numpy", "torch", "typing_extensions"} | tools
    assert {name.split(".")[0] for name in absolute} <= allowed
    assert all(node.level <= 1 for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)), "no import from above"
