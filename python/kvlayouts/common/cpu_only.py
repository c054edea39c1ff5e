"""Keeps a process on the CPU, whatever else the machine has."""

from __future__ import annotations

import os


def hide_accelerators() -> None:
    """Neither PyTorch nor SGLang, imported from now on, sees a GPU; nor does a process that this one starts.

    To import SGLang's pools where it sees one is to initialise CUDA: its quantised layers ask the device what it can.
    A process that is forked after that cannot use CUDA at all, and SGLang would pin memory and make streams.
    """
    os.environ |= {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}
