"""What changed in a release of SGLang of all that is relied on here: `python scripts/drift.py [RELEASE] [--record]`.

Fetches the release, or the newest one, from the package index, without its dependencies, and compares it with the
nearest one that scripts/relied/ knows. Prints what differs and ends with status 1 if anything does, with 2 if there
was nothing to compare. With `--record` the facts are written to scripts/relied/ instead, for a release to be supported.
docs/maintaining.md says what to do with the result.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from relied_on import (
    ABSENT,
    FLAGS,
    HOOKS,
    METHODS,
    NODES,
    RECORDS,
    TAGS,
    TREE,
    Facts,
    Source,
    facts_of,
    read_record,
    write_record,
)

from sglang.srt.mem_cache.hicache.controller import HiCacheController
from sglang.srt.mem_cache.hicache.cpu.platform import HostCpuPlatform
from sglang.srt.mem_cache.hicache.cpu.pools import CpuPagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.hicache.device.shared_pools import LayoutDSATokenToKVPool, LayoutIndexKeyCache
from sglang.srt.mem_cache.hicache.radix_cache import HiRadixCache
from sglang.srt.mem_cache.hicache.releases import supported_releases
from sglang.srt.mem_cache.hicache.server.allocator import ServingSlotAllocator
from sglang.srt.mem_cache.hicache.server.hook_table import HOOKS as OUR_HOOKS
from sglang.srt.mem_cache.hicache.tree.node import LayoutTreeNode

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

ROOT: Final = Path(__file__).resolve().parent.parent
OURS: Final[tuple[type, ...]] = (
    HiRadixCache,
    LayoutTreeNode,
    HiCacheController,
    ServingSlotAllocator,
    LayoutDSATokenToKVPool,
    LayoutIndexKeyCache,
    CpuPagedTokenToKVPoolAllocator,
    HostCpuPlatform,
)
"""The classes of ours that extend one of SGLang's, each the last of its line."""
SIGNATURES: Final = "signatures"
# A process of its own, in which the fetched release comes before the installed one.
COMPARE: Final = """
import json, sys
from pathlib import Path
from sglang.srt.mem_cache.hicache.check.signatures import check_signatures
report = check_signatures(Path(sys.argv[1]), release=sys.argv[2])
print(json.dumps([str(mismatch) for mismatch in report.mismatches]))
"""


class Difference(NamedTuple):
    """What one section has that the record has not, lacks, and has otherwise."""

    new: list[str]
    gone: list[str]
    changed: list[str]


class NothingToCompare(Exception):
    """No release could be fetched; the text is one line."""


def say(text: str) -> None:
    """Progress, apart from the result."""
    print(f"drift: {text}", file=sys.stderr, flush=True)


def bases_of_ours() -> dict[str, set[str]]:
    """By full name, the classes of SGLang's that ours extend, with the names that ours define themselves."""
    bases: dict[str, set[str]] = {}
    for last in OURS:
        line = [cls for cls in last.__mro__ if _is_ours(cls)]
        own = {name for cls in line for name in vars(cls)}
        for base in {base for cls in line for base in cls.__bases__ if not _is_ours(base)}:
            if base.__module__.startswith("sglang."):
                bases[f"{base.__module__}.{base.__qualname__}"] = own
    return bases


def collect(folder: Path) -> Facts:
    """The facts of the SGLang below `folder`."""
    return facts_of(Source(folder), classes=bases_of_ours(), hooks=[hook.target for hook in OUR_HOOKS])


def overridden(source: Source) -> set[str]:
    """The methods of SGLang's, such as ``RadixCache.insert``, that ours replace wherever they would be inherited."""
    replaced: dict[str, set[str]] = {}
    for base, own in bases_of_ours().items():
        for each in source.with_bases(base):
            short = each.rpartition(".")[2]
            replaced[short] = replaced.get(short, own) & own
    return {f"{short}.{name}" for short, names in replaced.items() for name in names}


def differences(record: Facts, facts: Facts, replaced: AbstractSet[str]) -> dict[str, Difference]:
    """By section, what differs; of a method that ours replace the contents do not count."""
    found = {}
    for section in (TREE, METHODS, FLAGS, TAGS, HOOKS):
        old, new = record[section], facts[section]
        relevant = (old.keys() | new.keys()) - (replaced if section == METHODS else set())
        found[section] = Difference(
            new=sorted(relevant & new.keys() - old.keys()),
            gone=sorted(relevant & old.keys() - new.keys()),
            changed=sorted(name for name in relevant & old.keys() & new.keys() if old[name] != new[name]),
        )
    return found


def fetch(release: str | None, folder: Path) -> str:
    """Download a wheel and unpack it below `folder`; returns its release."""
    wanted = f"sglang=={release}" if release else "sglang"
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--progress-bar", "off"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--no-input", *options, "--dest", str(folder), wanted],
        capture_output=True,
        text=True,
    )
    wheels = list(folder.glob("sglang-*.whl"))
    if done.returncode or not wheels:
        errors = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        reason = (errors or ["pip gave no reason"])[-1]
        raise NothingToCompare(f"{wanted} could not be fetched from the package index: {reason}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extractall(folder)
    return wheels[0].name.split("-")[1]


def signature_differences(folder: Path, release: str) -> list[str]:
    """What the stubs, as `release` has them, say that is not true of the SGLang below `folder`."""
    done = subprocess.run(
        [sys.executable, "-c", COMPARE, str(ROOT / "typings"), release],
        env={**os.environ, "PYTHONPATH": str(folder), "SGLANG_PLUGINS": "none"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        return [f"it cannot be loaded here: {(done.stderr.splitlines() or ['no reason given'])[-1]}"]
    lines: list[str] = json.loads(done.stdout.splitlines()[-1])
    return lines


def nearest(facts: Facts, replaced: AbstractSet[str]) -> str:
    """The recorded release that differs in the fewest names."""

    def distance(release: str) -> int:
        found = differences(read_record(release), facts, replaced).values()
        return sum(len(names) for difference in found for names in difference)

    return min((path.stem for path in RECORDS.glob("*.json")), key=distance)


def report(found: dict[str, Difference], facts: Facts, signatures: list[str]) -> int:
    """Print a table and the names; returns the exit status."""
    width = max(map(len, found))
    print(f"{'':{width}}  {'new':>5} {'gone':>5} {'changed':>8}")
    for section, (new, gone, changed) in found.items():
        print(f"{section:{width}}  {len(new) or '-':>5} {len(gone) or '-':>5} {len(changed) or '-':>8}")
    print(f"{SIGNATURES:{width}}  {'':>5} {'':>5} {len(signatures) or '-':>8}")
    for section, difference in found.items():
        for kind, names in difference._asdict().items():
            if names:
                listed = ", ".join(_marked(name, facts[section].get(name, "")) for name in names)
                print(textwrap.fill(f"{section}, {kind}: {listed}", 118, initial_indent="\n", subsequent_indent="    "))
    for line in signatures:  # without the list of all parameters
        print(f"\n{line.partition(': (')[0]}" if line == signatures[0] else line.partition(": (")[0])
    drifted = bool(signatures) or any(any(difference) for difference in found.values())
    print("\nDrift: see docs/maintaining.md" if drifted else "\nNothing drifted")
    return int(drifted)


def main() -> int:
    """Fetch, compare, print."""
    parser = argparse.ArgumentParser(prog="drift", description="What changed in SGLang of all that is relied on here.")
    parser.add_argument("release", nargs="?", help="the newest one of the package index unless named")
    parser.add_argument("--record", action="store_true", help="write scripts/relied/RELEASE.json and compare nothing")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        say("[1/3] fetching SGLang from the package index")
        try:
            release = fetch(options.release, folder)
        except NothingToCompare as error:
            print(f"drift: error: {error}", file=sys.stderr)
            return 2
        say(f"[2/3] reading the source of {release}")
        facts = collect(folder)
        if options.record:
            say(f"wrote {write_record(release, facts).relative_to(ROOT)}")
            return 0
        replaced = overridden(Source(folder))
        base = nearest(facts, replaced)
        say("[3/3] loading it to compare signatures: some 20 s")
        signatures = signature_differences(folder, base)
        print(f"SGLang {release} compared with {base} (supported: {', '.join(supported_releases())})\n")
        return report(differences(read_record(base), facts, replaced), facts, signatures)


def _marked(name: str, fact: str) -> str:
    return f"{name} ({fact})" if fact == ABSENT else f"{name}*" if fact.endswith(NODES) else name


def _is_ours(cls: type) -> bool:
    return cls.__module__.startswith("sglang.srt.mem_cache.hicache.")


if __name__ == "__main__":
    sys.exit(main())
