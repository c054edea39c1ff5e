"""A machine with one CUDA device, in every Python that finds this file on PYTHONPATH: whoever initialises CUDA fails.

As on such a machine, the device is not there where CUDA_VISIBLE_DEVICES hides it.
"""

from __future__ import annotations

import os
from typing import NoReturn

import torch


class CudaInitialisedError(BaseException):
    """Not to be swallowed by code that does without."""


def _visible() -> bool:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0") == "0"


def _initialise() -> NoReturn:
    raise CudaInitialisedError


vars(torch.version).update(cuda="12.8")
vars(torch.accelerator).update(is_available=_visible)
# Every call into CUDA begins with `_lazy_init`.
vars(torch.cuda).update(
    is_available=_visible, device_count=lambda: int(_visible()), init=_initialise, _lazy_init=_initialise
)
