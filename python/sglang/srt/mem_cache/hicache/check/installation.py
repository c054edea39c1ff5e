"""Whether this distribution and the SGLang beside it fit together: what `kvlayouts check` prints.

Each check is one line. A failed one says what to do. Nothing is started and no model is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from sglang.srt.mem_cache.layouts.errors import LayoutConfigError
from sglang.srt.mem_cache.layouts.registry import known_layouts

from ..releases import supported_releases
from ..seam.installed import installed_release

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# In a wheel, beside this module (setup.py puts them there); in a checkout, at its top.
_STUB_FOLDERS = (Path(__file__).parent / "typings", Path(__file__).parents[6] / "typings")
_SHOWN_MISMATCHES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckLine:
    """The outcome of one check. `mend` is what to do about a failure, empty otherwise."""

    name: str
    passed: bool
    found: str
    mend: str = ""

    @override
    def __str__(self) -> str:
        mend = f"; {self.mend}" if self.mend else ""
        return f"{'ok    ' if self.passed else 'FAILED'}  {self.name}: {self.found}{mend}"


def check_installation() -> Iterator[CheckLine]:
    """Run every check, in an order in which a later one can rely on the earlier ones."""
    for name, check in _CHECKS:
        try:
            yield check()
        except Exception as error:  # a wrong release may fail in any way; the others are checked all the same
            reason = (str(error).splitlines() or [""])[0]
            yield _failed(name, f"{type(error).__name__}: {reason}", f"{_install()} beside this distribution")


def _release() -> CheckLine:
    found = installed_release()
    if found is None:
        return _failed("SGLang release", "not installed", _install())
    if found not in supported_releases():
        return _failed("SGLang release", f"{found}, needed: {' or '.join(supported_releases())}", _install())
    return _ok("SGLang release", found)


def _signatures() -> CheckLine:
    folder = next((folder for folder in _STUB_FOLDERS if folder.is_dir()), None)
    if folder is None:
        return _failed("signatures", "the table of signatures is missing", "reinstall sglang-kv-layouts")
    from .signatures import check_signatures

    found = installed_release()
    # An unknown release is compared with the one that it is most like, so that only what drifted is named.
    likely = [found] if found is not None and found in supported_releases() else list(reversed(supported_releases()))
    reports = {release: check_signatures(folder, release=release) for release in likely}
    release = min(reports, key=lambda name: len(reports[name].mismatches))
    report = reports[release]
    compared = f"{report.symbols} names in {report.modules} modules"
    if report.mismatches:
        shown = "; ".join(str(mismatch) for mismatch in report.mismatches[:_SHOWN_MISMATCHES])
        return _failed(
            "signatures", f"{len(report.mismatches)} of {compared} differ from {release}: {shown}", _install()
        )
    return _ok("signatures", f"{compared} as in {release}")


def _hooks() -> CheckLine:
    from sglang.srt.plugins import load_plugins

    from ..server.hook_table import HOOKS
    from ..server.hooks import refuse_missing_hooks
    from .hooked import misfits

    load_plugins()
    try:
        refuse_missing_hooks("kv_layouts plugin", HOOKS)
    except LayoutConfigError as error:
        found, _, mend = str(error).partition("; ")
        return _failed("hooks", found, mend)
    unfit = list(misfits(HOOKS))
    if unfit:
        found = f"do not take what SGLang passes: {'; '.join(unfit)}"
        return _failed("hooks", found, "install a supported release of SGLang")
    return _ok("hooks", f"{len(HOOKS)} applied, which take what SGLang passes")


def _platform() -> CheckLine:
    from sglang.srt.platforms import current_platform

    from ..cpu.platform import HostCpuPlatform, activate

    ours = isinstance(current_platform, HostCpuPlatform)
    name = f"{type(current_platform).__module__}.{type(current_platform).__qualname__}"
    if ours != (activate() is not None):
        mend = "unset SGLANG_PLATFORM, or add kv_layouts_cpu to SGLANG_PLUGINS if it is set"
        return _failed("platform", f"SGLang uses {name}", mend)
    return _ok("platform", f"{name}{', without an accelerator' if ours else '; ours is inert'}")


def _pools() -> CheckLine:
    from ..cpu.pools import CpuDSATokenToKVPool, CpuMLATokenToKVPool
    from ..device.kinds import kind_of_pool_class
    from ..device.shared_pools import LayoutDSATokenToKVPool, LayoutMLATokenToKVPool

    classes = (LayoutMLATokenToKVPool, LayoutDSATokenToKVPool, CpuMLATokenToKVPool, CpuDSATokenToKVPool)
    return _ok("pool classes", ", ".join(f"{cls.__name__} ({kind_of_pool_class(cls).value})" for cls in classes))


def _layouts() -> CheckLine:
    from ..server.choice import LayoutChoice

    for name in known_layouts():
        try:
            LayoutChoice(strategy=name).create_group(page_size=64, shard_size=2)
        except Exception as error:  # another distribution's code
            found = f"{name}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            return _failed(
                "layout strategies", found, "without settings it must build for two ranks and pages of 64 tokens"
            )
    return _ok("layout strategies", ", ".join(known_layouts()))


def _install() -> str:
    return f"install sglang=={supported_releases()[-1]}"


def _ok(name: str, found: str) -> CheckLine:
    return CheckLine(name=name, passed=True, found=found)


def _failed(name: str, found: str, mend: str) -> CheckLine:
    return CheckLine(name=name, passed=False, found=found, mend=mend)


_CHECKS: tuple[tuple[str, Callable[[], CheckLine]], ...] = (
    ("SGLang release", _release),
    ("hooks", _hooks),
    ("platform", _platform),
    ("pool classes", _pools),
    ("layout strategies", _layouts),
    ("signatures", _signatures),
)
