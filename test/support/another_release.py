"""A program: SGLang 9.9.9, which is the installed one without one name. See test_another_release.py.

python another_release.py MODULE:NAME serve ARGUMENTS...    what SGLang's launcher does first
python another_release.py MODULE:NAME look                  the same in pieces, as JSON
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.metadata
import importlib.util
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class Without(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads one module as it is, and takes a name away."""

    def __init__(self, gone: str) -> None:
        self.module, self.name = gone.split(":")
        self.loader: Any = None

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None
        self.loader, spec.loader = spec.loader, self
        return spec

    @override
    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self.loader.create_module(spec)
        return module

    @override
    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        *above, name = self.name.split(".")
        delattr(getattr(module, above[0]) if above else module, name)


def look() -> dict[str, Any]:
    """What a config file, an engine and a server without our flags find."""
    from importlib import import_module

    from sglang.srt.mem_cache.registry import get_radix_cache_factory
    from sglang.srt.plugins.hook_registry import HookRegistry

    server_args: Any = import_module("sglang.srt.server_args")
    make: Any = import_module("sglang.srt.entrypoints.engine").Engine.server_args_class
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "server.yaml"
        config.write_text("model-path: m\nkv-layout-strategy: cp_shared\n")
        with contextlib.redirect_stderr(io.StringIO()) as said:
            try:
                server_args.prepare_server_args(["--config", str(config)])
                status: Any = "served"
            except SystemExit as end:
                status = end.code
    try:
        make(model_path="m", kv_layout_strategy="cp_shared")
        refused = "served"
    except ValueError as error:
        refused = str(error)
    return {
        "file": [status, said.getvalue().strip().partition(": error: ")[2]],
        "engine": refused,
        "hooked": sorted(HookRegistry._patched),  # type: ignore[attr-defined]  # noqa: SLF001  # nothing else tells
        "plain": make(model_path="m").model_path,
        "backend": get_radix_cache_factory("kv_layout"),
    }


def main() -> None:
    """See above."""
    installed = importlib.metadata.version

    def version(distribution_name: str) -> str:
        return "9.9.9" if distribution_name == "sglang" else installed(distribution_name)

    importlib.metadata.version = version
    sys.meta_path.insert(0, Without(sys.argv.pop(1)))
    from sglang.srt.plugins import load_plugins

    load_plugins()
    print(json.dumps(look() if sys.argv[1:] == ["look"] else "served"))


if __name__ == "__main__":
    main()
