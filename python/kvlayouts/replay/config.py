"""The options of one replay, checked once, and the two ways a replay can end badly.

`ReplayConfig` is all that travels to the worker processes. Sizes that follow from others are properties.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

PoolKind: TypeAlias = Literal["dsa", "mla", "mha"]
WritePolicy: TypeAlias = Literal["write_through", "write_through_selective", "write_back"]
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
NEEDED_PACKAGES: Final = {"--plot": "matplotlib", "--report": "jinja2"}
"""What the extra ``cli`` brings; an installation without it has the rest of the commands."""
DSA_PAGE_SIZE_TOKENS: Final = 64
"""The only page size that SGLang's DSA pool accepts."""


class ReplayInputError(ValueError):
    """Bad input. The message is one line that names the flag or the trace line, the value and what is accepted."""


class ReplayError(RuntimeError):
    """A run that failed, or whose numbers contradict each other. The message is one line."""


def check_range(flag: str, value: int, low: int, high: int) -> None:
    """Raise `ReplayInputError` unless `low <= value <= high`."""
    if not low <= value <= high:
        raise ReplayInputError(f"{flag} {value}: must be between {low} and {high}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayConfig:
    """The options of one replay; picklable. Construction raises `ReplayInputError` for values that cannot run.

    `device_tokens` (a multiple of `page_size`) and `host_ratio` are per rank, so that layouts are compared at equal
    memory per rank. `layout_options` are the strategy's own settings. `host_layout` is the byte order in host memory,
    no strategy.
    """

    layouts: tuple[str, ...]
    layout_options: Mapping[str, object] = field(default_factory=dict)
    device_tokens: int
    cp_size: int = 4
    pool: PoolKind = "mla"
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
            raise ReplayInputError(
                f"--device-tokens {self.device_tokens}: must be a positive multiple of --page-size {self.page_size}"
            )
        check_range("--device-tokens", self.device_tokens, 1, MAX_DEVICE_TOKENS)
        check_host_ratio(self.host_ratio)
        if self.host_pages < 1:
            needed = self.page_size / self.device_tokens
            raise ReplayInputError(
                f"--host-ratio {self.host_ratio:g}: leaves no host page beside {self.device_tokens} device tokens; "
                f"must be at least {needed:.3g}"
            )

    @property
    def device_pages(self) -> int:
        """Device pages of one rank."""
        return self.device_tokens // self.page_size

    @property
    def host_pages(self) -> int:
        """Host pages of one rank, rounded down."""
        return int(self.device_tokens * self.host_ratio) // self.page_size


def check_layout_names(layouts: tuple[str, ...]) -> None:
    """Raise `ReplayInputError` for no layout at all or for one that is named twice. Does not ask the registry."""
    if not layouts:
        raise ReplayInputError("--layout: must be given at least one layout name")
    for position, name in enumerate(layouts):
        if name in layouts[:position]:
            raise ReplayInputError(f"--layout {name}: given twice; each layout runs once")


def check_pool_page_size(pool: PoolKind, page_size: int) -> None:
    """Raise `ReplayInputError` where the pool cannot have pages of `page_size` tokens."""
    if pool == "dsa":
        check_dsa_page_size(page_size, "--pool dsa")


def check_dsa_page_size(page_size: int, why: str) -> None:
    """Raise `ReplayInputError` for pages of `page_size` tokens, which a DSA pool, as `why` asks for, does not have."""
    if page_size != DSA_PAGE_SIZE_TOKENS:
        raise ReplayInputError(
            f"--page-size {page_size}: must be {DSA_PAGE_SIZE_TOKENS} with {why} "
            "(SGLang's DSA pool has no other page size)"
        )


def check_host_ratio(host_ratio: float) -> None:
    """Raise `ReplayInputError` for a ratio that a server would refuse."""
    # The rule is the server's, and SGLang's package loads PyTorch: help and other mistakes are told without it.
    from sglang.srt.mem_cache.hicache.host.sizes import check_ratio
    from sglang.srt.mem_cache.layouts.errors import LayoutConfigError

    try:
        check_ratio("--host-ratio", host_ratio)
    except LayoutConfigError as error:
        raise ReplayInputError(str(error)) from error


def check_output_file(flag: str, path: Path | None) -> None:
    """Raise `ReplayInputError` for an output file that could not be written; None is no file."""
    if path is None:
        return
    try:
        is_directory = path.is_dir()
    except OSError as error:  # no name for a file
        raise ReplayInputError(f"{flag} {path}: {error.strerror or error}") from error
    if is_directory:
        raise ReplayInputError(f"{flag} {path}: is a directory; must be a file")
    if not path.parent.is_dir():
        raise ReplayInputError(f"{flag} {path}: directory {path.parent} does not exist")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ReplayInputError(f"{flag} {path}: cannot be written: permission denied")
    needed = NEEDED_PACKAGES.get(flag)
    if needed is not None and find_spec(needed) is None:
        raise ReplayInputError(
            f"{flag} {path}: needs the package {needed}, which is not installed: pip install {needed}"
        )
