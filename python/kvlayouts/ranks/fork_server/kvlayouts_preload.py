"""What the fork server runs before it forks the ranks: it imports SGLang, once for all of them.

The import takes longer than many a job, and it begins with SGLang's own package. This module is found by its
folder on `PYTHONPATH`, not inside that package, so that it can do three things first: have the kernel end the server
with the process that started it, keep it and its ranks on the CPU, and drop warnings that are expected there.
"""

from __future__ import annotations

import ctypes
import importlib
import signal
import sys

_PR_SET_PDEATHSIG = 1

if sys.platform == "linux":  # elsewhere the server notices once the import is over
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

importlib.import_module("kvlayouts.common.cpu_only").hide_accelerators()
importlib.import_module("kvlayouts.ranks.launch").silence_expected_warnings()
importlib.import_module("kvlayouts.ranks.setup")
