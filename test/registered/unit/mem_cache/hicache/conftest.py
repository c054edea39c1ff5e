"""Lets the tests of this folder, and processes that they spawn, import its helpers `_caches` and `_groups`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
