"""What options of several commands accept, and the checks of what they were given.

Imports neither PyTorch nor SGLang, so that a mistake is told at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from kvlayouts.common.alone import load_alone
from kvlayouts.common.errors import InputError

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache.accepted import DSA_PAGE_SIZE as DSA_PAGE_SIZE
    from sglang.srt.mem_cache.hicache.accepted import WritePolicy as WritePolicy
    from sglang.srt.mem_cache.layouts.rounding import ceil_div as ceil_div
else:
    _accepted = load_alone("hicache.accepted")
    DSA_PAGE_SIZE, WritePolicy = _accepted.DSA_PAGE_SIZE, _accepted.WritePolicy
    ceil_div = load_alone("layouts.rounding").ceil_div

PoolName: TypeAlias = Literal["dsa", "mla", "mha"]
EvictionPolicy: TypeAlias = Literal["lru", "lfu", "fifo", "mru", "filo", "priority", "slru"]
HostLayout: TypeAlias = Literal["layer_first", "page_first_direct"]
VerifyMode: TypeAlias = Literal["all", "sample", "off"]

TRACE_BLOCK_TOKENS: Final = 512
"""Tokens behind one `hash_ids` entry of a Mooncake trace."""

MAX_CP_SIZE: Final = 64
MAX_PAGE_SIZE_TOKENS: Final = 1024
MAX_DEVICE_TOKENS: Final = 2**28
"""More than any GPU holds; each token takes kilobytes on every rank."""
MAX_SEED: Final = 2**32 - 1


def check_range(flag: str, value: int, low: int, high: int) -> None:
    """Raise `InputError` unless `low <= value <= high`."""
    if not low <= value <= high:
        raise InputError(f"{flag} {value}: must be between {low} and {high}")


def check_layout_names(layouts: tuple[str, ...]) -> None:
    """Raise `InputError` for no layout at all or for one that is named twice. Does not ask the registry."""
    if not layouts:
        raise InputError("--layout: must be given at least one layout name")
    for position, name in enumerate(layouts):
        if name in layouts[:position]:
            raise InputError(f"--layout {name}: given twice; each layout runs once")


def check_pool_page_size(pool: PoolName, page_size: int) -> None:
    """Raise `InputError` where the pool cannot have pages of `page_size` tokens."""
    if pool == "dsa":
        check_dsa_page_size(page_size, "--pool dsa")


def check_dsa_page_size(page_size: int, why: str) -> None:
    """Raise `InputError` for pages of `page_size` tokens, which a DSA pool, as `why` asks for, does not have."""
    if page_size != DSA_PAGE_SIZE:
        raise InputError(
            f"--page-size {page_size}: must be {DSA_PAGE_SIZE} with {why} (SGLang's DSA pool has no other page size)"
        )


def check_host_ratio(host_ratio: float) -> None:
    """Raise `InputError` for a ratio that a server would refuse."""
    for name in ("layouts.errors", "hicache.host.sizes"):
        load_alone(name)
    from sglang.srt.mem_cache.hicache.host.sizes import check_ratio
    from sglang.srt.mem_cache.layouts.errors import LayoutConfigError

    try:
        check_ratio("--host-ratio", host_ratio)
    except LayoutConfigError as error:
        raise InputError(str(error)) from error


def pages_of_host_ratio(host_ratio: float, device_tokens: int, page_size: int) -> int:
    """Whole host pages of one rank. Raises `InputError` where not even one remains, or for `check_host_ratio`."""
    check_host_ratio(host_ratio)
    from sglang.srt.mem_cache.hicache.host.sizes import host_pages
    from sglang.srt.mem_cache.layouts.errors import LayoutConfigError

    try:
        return host_pages(
            ratio=host_ratio, gigabytes=0, device_tokens=device_tokens, page_size=page_size, kv_slot_bytes=1
        )
    except LayoutConfigError as error:
        raise InputError(str(error).replace("--hicache-ratio", "--host-ratio")) from error
