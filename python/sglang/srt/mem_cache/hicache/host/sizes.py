"""Sizes of the host tier, judged in one place: by the commands, by a server's parent process and by its ranks.

A rank's host pool has ``host_gb`` x 10^9 bytes of KV if that is positive, else ``ratio`` x the rows of its device
pool, in whole pages; SGLang adds a page to it, as it does to a device pool. Nothing here imports SGLang.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, TypeGuard

from sglang.srt.mem_cache.layouts.errors import LayoutConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_RATIO: Final = 1000.0
MAX_GB: Final = 1e9
MAX_WHOLE: Final = 2**53
"""Beyond it, numbers of tokens and bytes are not exact any more."""
BYTES_PER_GB: Final = 10**9


def check_ratio(flag: str, ratio: object) -> float:
    """`ratio`. Raises `LayoutConfigError` unless it is a number above 0 and at most `MAX_RATIO`."""
    if not _is_number(ratio) or not 0 < ratio <= MAX_RATIO:
        raise LayoutConfigError(f"{flag} {_shown(ratio)}: must be above 0 and at most {MAX_RATIO:g}")
    return ratio


def check_gb(flag: str, gigabytes: object) -> float:
    """`gigabytes`. Raises `LayoutConfigError` unless it is a number from 0 to `MAX_GB`; 0 leaves it to the ratio."""
    if not _is_number(gigabytes) or not 0 <= gigabytes <= MAX_GB:
        raise LayoutConfigError(
            f"{flag} {_shown(gigabytes)}: must be a number of gigabytes of at most {MAX_GB:g}, or 0 to use the ratio"
        )
    return gigabytes


def check_fraction(flag: str, fraction: object) -> float:
    """`fraction`. Raises `LayoutConfigError` unless it is a number above 0 and at most 1."""
    if not _is_number(fraction) or not 0 < fraction <= 1:
        raise LayoutConfigError(f"{flag} {_shown(fraction)}: must be above 0 and at most 1")
    return fraction


def check_whole(flag: str, number: object, low: int) -> int:
    """`number`. Raises `LayoutConfigError` unless it is a whole number of at least `low` and at most `MAX_WHOLE`."""
    if not isinstance(number, int) or isinstance(number, bool) or not low <= number <= MAX_WHOLE:
        most = f" and at most {MAX_WHOLE}" if isinstance(number, int) and number > MAX_WHOLE else ""
        raise LayoutConfigError(f"{flag} {_shown(number)}: must be a whole number of at least {low}{most}")
    return number


def size_flag(ratio: float, gigabytes: float) -> str:
    """The server's flag that decides the size, with its value."""
    return f"--hicache-size {gigabytes:g}" if gigabytes > 0 else f"--hicache-ratio {ratio:g}"


def host_pages(
    *,
    ratio: float,
    gigabytes: float,
    device_tokens: int,
    page_size: int,
    kv_slot_bytes: int,
    asked: str | None = None,
) -> int:
    """Whole pages of the host pool beside a device pool of `device_tokens`, as SGLang rounds them.

    Both sizes have been checked; `asked` is the flag that they came from, where it is neither of theirs. Raises
    `LayoutConfigError` where not even one page remains.
    """

    def pages_of(size: float) -> int:
        if gigabytes > 0:
            return int(size * BYTES_PER_GB // kv_slot_bytes) // page_size
        return int(device_tokens * size) // page_size

    pages = pages_of(gigabytes if gigabytes > 0 else ratio)
    if pages < 1:
        least = page_size * kv_slot_bytes / BYTES_PER_GB if gigabytes > 0 else page_size / device_tokens
        told = least_told(least, lambda size: pages_of(size) > 0)
        accepted = f"must be at least {told}" if asked is None else "give --hicache-size instead"
        raise LayoutConfigError(
            f"{asked or size_flag(ratio, gigabytes)}: leaves no host page of {page_size} tokens beside "
            f"{device_tokens} device tokens; {accepted}"
        )
    return pages


def device_pool_bytes(*, pages: int, page_size: int, slot_bytes: int) -> int:
    """Bytes of a device pool of `pages`; `slot_bytes` are all that a slot has there, its index key included."""
    return (pages + 1) * page_size * slot_bytes


def host_pool_bytes(*, pages: int, page_size: int, kv_slot_bytes: int, index_slot_bytes: int) -> int:
    """Bytes of a host pool of `pages`, and of the index beside it, to which SGLang adds one more."""
    return ((pages + 1) * kv_slot_bytes + (pages + 2) * index_slot_bytes) * page_size


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: object) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return f"{text[:37]}..." if len(text) > 40 else text


def least_told(least: float, accepted: Callable[[float], bool]) -> str:
    """`least` in three digits, rounded up until the number that is told is `accepted`."""
    unit = 10.0 ** (math.floor(math.log10(least)) - 2)
    digits = math.ceil(least / unit)
    while not accepted(float(told := f"{digits * unit:.3g}")):
        digits += 1
    return told
