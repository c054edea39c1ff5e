"""Our own modules below SGLang's package, without SGLang.

`import sglang.srt.mem_cache.layouts` runs `sglang/__init__.py` first, which loads PyTorch and transformers: seconds, in
which a mistyped layout could have been refused. What a command needs of ours before, or instead, is loaded from its
file here, under its own name: whoever imports it later, SGLang and our plugin included, gets the same module.
"""

from __future__ import annotations

import importlib
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from types import ModuleType

PARENT: Final = "sglang.srt.mem_cache"
_loaded: Final[list[str]] = []
_FOLDER: Final = Path(__file__).parents[2].joinpath(*PARENT.split("."))  # one wheel and one checkout hold both


def load_alone(name: str) -> ModuleType:
    """The module or package `name` below `PARENT`. It must not import anything of SGLang's.

    Modules in such a package can be imported as usual then; a package in it is loaded alone too, else Python begins at
    the top. Where SGLang is loaded already, this is an import like any other.
    """
    full = f"{PARENT}.{name}"
    if full in sys.modules or "sglang" in sys.modules:
        return importlib.import_module(full)
    place = _FOLDER.joinpath(*name.split("."))
    init = place / "__init__.py"
    spec = (
        spec_from_file_location(full, init, submodule_search_locations=[str(place)])
        if init.is_file()
        else spec_from_file_location(full, place.with_suffix(".py"))
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"{place}: cannot be loaded", name=full)
    module = sys.modules[full] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[full]
        raise
    _loaded.append(full)
    return module


def rejoin() -> None:
    """Load SGLang, and give packages what was loaded alone as their attributes, as a usual import would have.

    For code of others, which may name ours in any way: `import sglang.srt.mem_cache.layouts`, and then the whole path.
    """
    importlib.import_module(PARENT)
    for full in _loaded:
        package, _, name = full.rpartition(".")
        setattr(importlib.import_module(package), name, sys.modules[full])
