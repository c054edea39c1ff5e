"""Our flags in ``sglang serve --help``, which SGLang prints without loading plugins.

SGLang asks its platforms, ours among them, while it is imported, in every process and long before it makes the parser
of its server arguments. So a process that is there to print help is told then to hook the parser up as soon as
SGLang's module of server arguments has been imported. Every other process is left alone: there SGLang loads the plugin
itself.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from typing import TYPE_CHECKING, Final

from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_SERVER_ARGS_MODULE: Final = "sglang.srt.server_args"
_HELP: Final = frozenset({"-h", "--help"})


def activate() -> str | None:
    """Entry point of the group ``sglang.srt.platforms``: see `cpu.platform.activate`, after a look at the arguments.

    None where the platform does not fit this release of SGLang; `plugin` says so.
    """
    show_flags_in_help(sys.argv)
    try:
        from ..cpu.platform import activate as applies
    except Exception:  # names that moved may raise anything
        return None
    return applies()


def show_flags_in_help(argv: Sequence[str]) -> None:
    """Have our flags in the help that a process with these arguments, the program's name first, is about to print."""
    if "serve" in argv[1:2] and not _HELP.isdisjoint(argv[2:]) and _SERVER_ARGS_MODULE not in sys.modules:
        sys.meta_path.insert(0, _AfterServerArgs())


class _AfterServerArgs(importlib.abc.MetaPathFinder):
    """Finds one module as the other finders do, has the hook applied once it has run, and is gone."""

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _SERVER_ARGS_MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _HookingLoader(spec.loader)
        return spec


class _HookingLoader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    @override
    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    @override
    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _hook_parser()


def _hook_parser() -> None:
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        from .args import add_options
    except Exception:  # another release: `plugin` refuses what could be shown here
        return

    # The plugin's own hook of the same name, should it be loaded after all, finds this one applied and stays away.
    HookRegistry.register(f"{_SERVER_ARGS_MODULE}.ServerArgs.add_cli_args", add_options, HookType.AFTER)
    HookRegistry.apply_hooks()
