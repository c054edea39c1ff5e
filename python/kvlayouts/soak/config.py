"""The options of one soak, checked once, and what it found."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvlayouts.common.errors import InputError
from kvlayouts.common.values import (
    MAX_CP_SIZE,
    MAX_PAGE_SIZE_TOKENS,
    MAX_SEED,
    EvictionPolicy,
    HostLayout,
    PoolName,
    WritePolicy,
    check_host_ratio,
    check_pool_page_size,
    check_range,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

FAULTS: Final = ("delay", "alloc", "abort", "slow-rank", "split-in-flight", "evict-in-flight", "reset")
"""Kinds of fault, in the order of the table:

delay            a rank's copies run, and are acknowledged, up to 20 polls late
alloc            one lane is filled up on the host or on the device, so that admissions are refused
abort            a request ends between any two of its steps
slow-rank        a rank sleeps while the others go on
split-in-flight  a node is split while its backup or load is under way
evict-in-flight  everything that can leave the device does, while copies are under way
reset            the cache is reset with copies under way
"""

MAX_EVENTS: Final = 10**10
MIN_CHECK_EVENTS: Final = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SoakConfig:
    """The options of one soak; picklable. Construction raises `InputError` for values that cannot run.

    Ends after `events` events (primitive calls on the cache, the same on every rank) if given, else after
    `minutes`. `check_every` events all invariants are recounted and the ranks compared.
    """

    ranks: int = 4
    minutes: float = 5.0
    events: int | None = None
    layout: str = "cp_shared"
    layout_options: Mapping[str, object] = field(default_factory=dict)
    pool: PoolName = "mla"
    page_size: int = 4
    logical_pages: int = 96
    host_ratio: float = 2.0
    policy: WritePolicy = "write_through"
    eviction_policy: EvictionPolicy = "lru"
    host_layout: HostLayout = "layer_first"
    faults: tuple[str, ...] = FAULTS
    check_every: int = 2000
    seed: int = 0

    def __post_init__(self) -> None:
        check_range("--ranks", self.ranks, 1, MAX_CP_SIZE)
        if self.events is not None:
            check_range("--events", self.events, 1, MAX_EVENTS)
        elif not 0 < self.minutes <= 7 * 24 * 60:
            raise InputError(f"--minutes {self.minutes:g}: must be above 0 and at most {7 * 24 * 60}")
        check_range("--seed", self.seed, 0, MAX_SEED)
        check_range("--check-every", self.check_every, MIN_CHECK_EVENTS, MAX_EVENTS)
        check_range("--page-size", self.page_size, 1, MAX_PAGE_SIZE_TOKENS)
        check_pool_page_size(self.pool, self.page_size)
        check_host_ratio(self.host_ratio)
        for fault in self.faults:
            if fault not in FAULTS:
                raise InputError(f"--faults {fault}: must be none, or among {','.join(FAULTS)}")
            if self.faults.count(fault) > 1:
                raise InputError(f"--faults {fault}: given twice; each kind is named once")

    def device_pages(self, lane_count: int) -> int:
        """Device pages of one rank, of a layout that shares pages out over `lane_count` lanes."""
        return max(1, self.logical_pages // lane_count)

    def host_pages(self, lane_count: int) -> int:
        """Host pages of one rank, rounded down."""
        return int(self.device_pages(lane_count) * self.page_size * self.host_ratio) // self.page_size


@dataclass(frozen=True, kw_only=True, slots=True)
class SoakReport:
    """What one rank found. Lives here so that reading it loads no SGLang."""

    events: int
    faults: dict[str, int]
    checks: int
    verified_tokens: int
    violations: tuple[str, ...]
    last_events: tuple[str, ...]
    rss_start_bytes: int
    rss_end_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SoakResult:
    """What a soak found. `violations` are lines; the first is what to look at."""

    events: int
    faults: Mapping[str, int]
    checks: int
    verified_tokens: int
    violations: tuple[str, ...]
    last_events: tuple[str, ...]
    rss_start_bytes: int
    rss_end_bytes: int
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether nothing was violated."""
        return not self.violations

    @property
    def rss_growth(self) -> float:
        """Growth of the ranks' resident memory from the first check to the last, as a share."""
        return self.rss_end_bytes / self.rss_start_bytes - 1.0 if self.rss_start_bytes else 0.0


def repeat_command(config: SoakConfig, events: int) -> str:
    """The command that leads to the same events on every rank. Naps aside, nothing in a soak depends on time."""
    layout_config = ["--layout-config", json.dumps(dict(config.layout_options))] if config.layout_options else []
    words = (
        *("kvlayouts", "soak", "--ranks", config.ranks, "--layout", config.layout, *layout_config),
        *("--pool", config.pool, "--page-size", config.page_size, "--policy", config.policy),
        *("--eviction-policy", config.eviction_policy, "--host-mem-layout", config.host_layout),
        *("--faults", ",".join(config.faults) or "none", "--check-every", config.check_every),
        *("--seed", config.seed, "--events", max(1, events)),
    )
    return shlex.join(map(str, words))
