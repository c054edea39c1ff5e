"""Keeps a process on the CPU, whatever else the machine has."""

from __future__ import annotations

import os
from typing import Final

_NO_DEVICE: Final = "999"
"""An index that no machine has hides them all, as -1 does; SGLang's utilities for tests want a digit first."""


def hide_accelerators() -> None:
    """Neither PyTorch nor SGLang, imported from now on, sees a GPU; nor does a process that this one starts.

    To import SGLang's pools where it sees one is to initialise CUDA: its quantised layers ask the device what it can.
    A process that is forked after that cannot use CUDA at all, and SGLang would pin memory and make streams.
    """
    os.environ |= {"CUDA_VISIBLE_DEVICES": _NO_DEVICE, "HIP_VISIBLE_DEVICES": _NO_DEVICE}
