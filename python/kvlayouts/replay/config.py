"""The options of one replay, checked once.

`ReplayConfig` is all that travels to the worker processes. Sizes that follow from others are properties.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvlayouts.common.errors import InputError
from kvlayouts.common.values import (
    MAX_CP_SIZE,
    MAX_DEVICE_TOKENS,
    MAX_PAGE_SIZE_TOKENS,
    MAX_SEED,
    TRACE_BLOCK_TOKENS,
    check_layout_names,
    check_pool_page_size,
    check_range,
    pages_of_host_ratio,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvlayouts.common.values import EvictionPolicy, HostLayout, PoolName, VerifyMode, WritePolicy


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayConfig:
    """The options of one replay; picklable. Construction raises `InputError` for values that cannot run.

    `device_tokens` (a multiple of `page_size`) and `host_ratio` are per rank, so that layouts are compared at equal
    memory per rank. `layout_options` are the strategy's own settings. `host_layout` is the byte order in host memory,
    no strategy.
    """

    layouts: tuple[str, ...]
    layout_options: Mapping[str, object] = field(default_factory=dict)
    device_tokens: int
    cp_size: int = 4
    pool: PoolName = "mla"
    page_size: int = 64
    host_ratio: float = 2.0
    policy: WritePolicy = "write_through"
    eviction_policy: EvictionPolicy = "lru"
    host_layout: HostLayout = "layer_first"
    block_tokens: int = TRACE_BLOCK_TOKENS
    verify: VerifyMode = "all"
    seed: int = 0

    def __post_init__(self) -> None:
        check_layout_names(self.layouts)
        check_range("--cp-size", self.cp_size, 1, MAX_CP_SIZE)
        check_range("--page-size", self.page_size, 1, MAX_PAGE_SIZE_TOKENS)
        check_range("--block-tokens", self.block_tokens, 1, TRACE_BLOCK_TOKENS)
        check_range("--seed", self.seed, 0, MAX_SEED)
        check_pool_page_size(self.pool, self.page_size)
        self._check_sizes()

    def _check_sizes(self) -> None:
        if self.device_tokens < self.page_size or self.device_tokens % self.page_size:
            raise InputError(
                f"--device-tokens {self.device_tokens}: must be a positive multiple of --page-size {self.page_size}"
            )
        check_range("--device-tokens", self.device_tokens, 1, MAX_DEVICE_TOKENS)
        pages_of_host_ratio(self.host_ratio, self.device_tokens, self.page_size)

    @property
    def device_pages(self) -> int:
        """Device pages of one rank."""
        return self.device_tokens // self.page_size

    @property
    def host_pages(self) -> int:
        """Host pages of one rank, rounded down."""
        return pages_of_host_ratio(self.host_ratio, self.device_tokens, self.page_size)
