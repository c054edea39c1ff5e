"""mypy as mypy.ini says, against the stubs of one release of SGLang: `python scripts/typecheck.py 0.5.23`.

The stubs in typings/ hold every release, under conditions such as `SINCE_0_5_23`. mypy is told which of them are true,
in our own code too, so that a module that begins with `assert SINCE_0_5_23` is read for those releases only. Each
release has a cache of its own, for otherwise each run would throw the other's away.
"""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# By its path: as a module it would load SGLang, which takes seconds and is not needed here.
RELEASES = runpy.run_path(str(ROOT / "python/sglang/srt/mem_cache/hicache/releases.py"))


def options(release: str) -> list[str]:
    """What mypy is told about a release, besides its configuration."""
    conditions = {
        name for stub in (ROOT / "typings").rglob("*.pyi") for name in RELEASES["conditions_of"](stub.read_text())
    }
    found = ["--cache-dir", f".mypy_cache/sglang-{release}"]
    for condition in sorted(conditions):
        found += ["--always-true" if RELEASES["holds"](condition, release) else "--always-false", condition]
    return found


def main(arguments: list[str]) -> int:
    """Run mypy for the release that comes first, or for the newest that is supported."""
    release = arguments[0] if arguments else RELEASES["supported_releases"]()[-1]
    print(f"typecheck: against the stubs of SGLang {release}", flush=True)
    return subprocess.run([sys.executable, "-m", "mypy", *options(release), *arguments[1:]], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
