"""What the fork server of a replay imports before it forks the ranks: SGLang, once for all of them.

Importing takes longer than many a replay. If the user interrupts it, the fork server is not to go on alone.
"""

from __future__ import annotations

import ctypes
import importlib
import signal
import sys

from sglang.srt.mem_cache.hicache.cli.replay.launch import silence_expected_warnings

_PR_SET_PDEATHSIG = 1

if sys.platform == "linux":
    # The kernel ends this process with its parent; elsewhere it ends once the import is over.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
silence_expected_warnings()
importlib.import_module("sglang.srt.mem_cache.hicache.cli.replay.worker")  # only now: it warns while it loads
