"""The options of one plan, checked once, and the sizes that follow from them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvlayouts.common.errors import InputError
from kvlayouts.common.values import MAX_DEVICE_TOKENS, EvictionPolicy, WritePolicy, check_layout_names, check_range
from sglang.srt.mem_cache.hicache.host.sizes import least_told
from sglang.srt.mem_cache.layouts.config import GroupKind, PoolKind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvlayouts.plan.model import ModelGeometry

GB: Final = 10**9
RESERVED_HOST_BYTES: Final = 10 * 2**30
"""Memory of a machine that SGLang's host pools leave free: `HICACHE_HOST_MEMORY_RESERVE_BYTES`."""

MAX_GB: Final = 1e6
MAX_RESTORED_PAGES: Final = 2**24
POOL_CLASSES: Final[Mapping[PoolKind, str]] = {
    PoolKind.MLA: "MLATokenToKVPool",
    PoolKind.DSA: "DSATokenToKVPool",
    PoolKind.MHA: "MHATokenToKVPool",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """One plan. `device_tokens` are the rows of one GPU, `host_pages` the host pages of one rank, SGLang's extra page
    included; `machine_bytes` is the memory of one machine, or None if it is not known.

    Construction raises `InputError` for sizes that cannot be.
    """

    layouts: tuple[str, ...]
    options: Mapping[str, object] = field(default_factory=dict)
    model: ModelGeometry
    gpus: int
    cp_size: int
    group_kind: GroupKind
    page_size: int
    device_tokens: int
    host_pages: int
    ranks_per_machine: int
    machine_bytes: int | None = None
    policy: WritePolicy = "write_through"
    eviction_policy: EvictionPolicy = "lru"
    restore_tokens: int
    link_bytes_per_second: float

    def __post_init__(self) -> None:
        check_layout_names(self.layouts)
        check_divides("--cp-size", self.cp_size, "--gpus", self.gpus)
        check_range("--ranks-per-machine", self.ranks_per_machine, 1, self.gpus)
        if self.device_tokens < self.page_size or self.device_tokens % self.page_size:
            raise InputError(
                f"--device-tokens {self.device_tokens}: must be a positive multiple of --page-size {self.page_size}"
            )
        check_range("--device-tokens", self.device_tokens, 1, MAX_DEVICE_TOKENS)
        check_range("--restore-tokens", self.restore_tokens, self.page_size, self.page_size * MAX_RESTORED_PAGES)

    @property
    def device_pages(self) -> int:
        """Device pages of one rank."""
        return self.device_tokens // self.page_size

    @property
    def device_bytes(self) -> int:
        """Device memory of one rank, SGLang's padding page included."""
        return (self.device_pages + 1) * self.page_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of a page on one rank, all layers and the index included."""
        return self.page_size * self.model.bytes_per_token

    @property
    def host_bytes(self) -> int:
        """Host memory of one rank."""
        return self.host_pages * self.page_bytes

    @property
    def machine_host_bytes(self) -> int:
        """Host memory of all ranks of one machine."""
        return self.host_bytes * self.ranks_per_machine

    @property
    def machine_budget_bytes(self) -> int | None:
        """Memory that the ranks of one machine may take together; None if the machine's is not known."""
        return None if self.machine_bytes is None else max(0, self.machine_bytes - RESERVED_HOST_BYTES)

    @property
    def fits_machine(self) -> bool | None:
        """Whether the machine has the host memory that its ranks take; None if its memory is not known."""
        budget = self.machine_budget_bytes
        return None if budget is None else self.machine_host_bytes <= budget

    @property
    def most_host_pages(self) -> int | None:
        """Host pages of one rank with which the machine is full."""
        budget = self.machine_budget_bytes
        return None if budget is None else budget // self.ranks_per_machine // self.page_bytes


def check_gb(flag: str, value: float | None, *, most: float = MAX_GB) -> None:
    """Raise `InputError` unless `0 < value <= most`; None was not given."""
    if value is not None and (math.isnan(value) or not 0 < value <= most):
        raise InputError(f"{flag} {value:g}: must be above 0 and at most {most:g}")


def check_divides(flag: str, value: int, whole_flag: str, whole: int) -> None:
    """Raise `InputError` unless `value` divides `whole`."""
    if value < 1 or whole % value:
        accepted = ", ".join(str(number) for number in range(1, whole + 1) if whole % number == 0)
        raise InputError(f"{flag} {value}: must divide {whole_flag} {whole}; accepted: {accepted}")


def pages_of_gb(flag: str, gb: float, bytes_per_token: int, page_size: int) -> int:
    """Whole pages in `gb` x 10^9 bytes. Raises `InputError` if there is none."""
    pages = int(gb * GB // bytes_per_token) // page_size
    if pages < 1:
        least = least_told(
            page_size * bytes_per_token / GB, lambda size: int(size * GB // bytes_per_token) >= page_size
        )
        raise InputError(f"{flag} {gb:g}: holds no page of {page_size} tokens; must be at least {least}")
    return pages


def group_kind(gpus: int, cp_size: int | None) -> GroupKind:
    """Which ranks share pages out: a context-parallel group if one is asked for, else all tensor-parallel ranks."""
    if (cp_size or gpus) == 1:
        return GroupKind.SINGLE
    return GroupKind.ATTENTION_TP if cp_size is None else GroupKind.ATTENTION_CP
