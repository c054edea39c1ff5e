"""`correctness.py`, which says what it does, where there is a GPU to do it on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_every_case_brings_every_byte_back() -> None:
    """In a process of its own, as its ranks import it by its name."""
    script = Path(__file__).parent / "correctness.py"
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-4000:]
