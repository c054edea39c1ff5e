"""The page kernel under Triton's interpreter, on tensors in host memory: the same text, without a GPU."""

from __future__ import annotations

import importlib.util
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING
from unittest.mock import patch

import sglang.srt.mem_cache.hicache as package

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType


@contextmanager
def interpreted_kernel() -> Iterator[ModuleType]:
    """The module ``cuda.page_kernel``, loaded anew: Triton decides when it decorates a function."""
    path = f"{next(iter(package.__path__))}/cuda/page_kernel.py"
    spec = importlib.util.spec_from_file_location("interpreted_page_kernel", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with patch.dict(os.environ, {"TRITON_INTERPRET": "1"}), patch.dict("sys.modules", {spec.name: module}):
        spec.loader.exec_module(module)
        yield module
