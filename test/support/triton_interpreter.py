"""Triton kernels under Triton's interpreter, on tensors in host memory: the same text, without a GPU."""

from __future__ import annotations

import importlib.util
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING
from unittest.mock import patch

import triton.language as tl  # type: ignore[import-untyped]  # Triton ships no types

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType


@contextmanager
def interpreted(name: str) -> Iterator[ModuleType]:
    """The module `name`, loaded anew under another name: Triton decides when it decorates a function.

    Its functions were decorated when it was loaded: that of sums is replaced by one of the interpreter's reductions.
    """
    found = importlib.util.find_spec(name)
    assert found is not None
    assert found.origin is not None
    spec = importlib.util.spec_from_file_location(f"interpreted_{name.rpartition('.')[2]}", found.origin)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with (
        patch.dict(os.environ, {"TRITON_INTERPRET": "1"}),
        patch.dict("sys.modules", {spec.name: module}),
        patch.object(tl, "sum", _sum),
    ):
        spec.loader.exec_module(module)
        yield module


def _sum(values: tl.tensor) -> tl.tensor:
    return tl.reduce(values, None, tl.standard._sum_combine)  # noqa: SLF001  # by which the interpreter knows a sum


@contextmanager
def interpreted_kernel() -> Iterator[ModuleType]:
    """The module ``cuda.page_kernel``."""
    with interpreted("sglang.srt.mem_cache.hicache.copies.cuda.page_kernel") as module:
        yield module
