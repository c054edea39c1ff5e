"""Which release of SGLang is installed, by its distribution. Nothing of SGLang is loaded."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from ..releases import supported_releases


def installed_release() -> str | None:
    """The release; None if SGLang was not installed as a distribution."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return None


def unsupported() -> str | None:
    """What is wrong with the installed release, after the name of a flag; None if it is supported."""
    found, accepted = installed_release(), supported_releases()
    if found in accepted:
        return None
    return (
        f"needs SGLang {' or '.join(accepted)}, got {found or 'unknown'}; "
        f"install sglang=={accepted[-1]} or drop the flag"
    )
