"""What the cache is told besides its layout: SGLang's HiCache flags and the shard group, as plain values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang.srt.runtime_context import get_device, get_memory, get_parallel, get_serving

from sglang.srt.mem_cache.layouts.config import GroupKind
from sglang.srt.mem_cache.layouts.errors import LayoutConfigError

from .accepted import WRITE_POLICIES
from .host.memory import HostBudget, ranks_on_this_machine
from .host.sizes import check_gb, check_ratio, check_whole
from .seam.server_flags import host_budget

if TYPE_CHECKING:
    from .accepted import WritePolicy

LONGEST_WAIT_SECONDS = 1e9  # gloo counts nanoseconds in 64 bits


MEM_LAYOUTS: dict[str, tuple[str, ...]] = {
    "direct": ("layer_first", "page_first_direct"),
    "kernel": ("layer_first", "page_first"),
}
"""Byte orders of host memory that each ``--hicache-io-backend`` can address in every kind of pool."""


def check_io_backend(io_backend: str) -> None:
    """Raise `LayoutConfigError` for a way of copying that is not served."""
    if io_backend not in MEM_LAYOUTS:
        accepted = ", ".join(sorted(MEM_LAYOUTS, reverse=True))
        raise LayoutConfigError(f"--hicache-io-backend must be one of {accepted}, got {io_backend!r}")


def check_mem_layout(io_backend: str, mem_layout: str, *, is_mla: bool, uneven_heads: bool = False) -> None:
    """Raise `LayoutConfigError` for a byte order that SGLang's copies of this kind of pool cannot address.

    `uneven_heads`: keys and values differ in width, which leaves one order.
    """
    check_io_backend(io_backend)
    orders = MEM_LAYOUTS[io_backend]
    if io_backend == "kernel" and not is_mla:
        orders += ("page_head",)
    if uneven_heads and not is_mla:
        orders = MEM_LAYOUTS[io_backend][1:]
    if mem_layout not in orders:
        raise LayoutConfigError(
            f"--hicache-io-backend {io_backend} needs --hicache-mem-layout {' or '.join(orders)}, got {mem_layout!r}"
        )


def check_write_policy(policy: str) -> None:
    """Raise `LayoutConfigError` for a write policy that there is not."""
    if policy not in WRITE_POLICIES:
        accepted = ", ".join(WRITE_POLICIES)
        raise LayoutConfigError(f"--hicache-write-policy must be one of {accepted}, got {policy!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HiCacheSettings:
    """The values of SGLang's ``--hicache-*`` flags that the cache reads.

    Host memory is `host_gb` x 10^9 bytes a rank if positive, else `host_ratio` x the device pool's rows. `host_budget`
    is given where SGLang reckoned that ratio from the memory that is free.
    `load_back_threshold` is in logical tokens: a shorter host hit is recomputed. `ranks_on_machine` share the memory.
    A rank waits for another one for `peer_seconds` at most; None means the process group's time-out.
    Raises `LayoutConfigError` for an unknown write policy or a size that no machine has.
    """

    write_policy: WritePolicy = "write_through"
    io_backend: str = "direct"
    mem_layout: str = "layer_first"
    host_ratio: float = 2.0
    host_gb: float = 0
    storage_backend: str | None = None
    load_back_threshold: int = 10
    model_name: str | None = None
    peer_seconds: float | None = None
    ranks_on_machine: int = 1
    host_budget: HostBudget | None = None

    def __post_init__(self) -> None:
        check_write_policy(self.write_policy)
        check_ratio("--hicache-ratio", self.host_ratio)
        check_gb("--hicache-size", self.host_gb)
        check_whole("load_back_threshold", self.load_back_threshold, 0)

    @property
    def write_through_threshold(self) -> int:
        """Hits after which a node is backed up."""
        return 1 if self.write_policy == "write_through" else 2

    @classmethod
    def from_server(cls) -> HiCacheSettings:
        """The values that SGLang published for this process."""
        memory, budget = get_memory(), host_budget()
        return cls(
            write_policy=memory.hicache_write_policy,
            io_backend=memory.hicache_io_backend,
            mem_layout=memory.hicache_mem_layout,
            host_ratio=memory.hicache_ratio,
            host_gb=memory.hicache_size,
            storage_backend=memory.hicache_storage_backend,
            model_name=get_serving().served_model_name,
            peer_seconds=peer_seconds(),
            ranks_on_machine=ranks_on_this_machine(get_parallel()),
            host_budget=None if budget is None else HostBudget(fraction=budget[0], machine_bytes=budget[1]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardGroup:
    """The ranks that a KV cache is sharded over, and this rank's place among them."""

    kind: GroupKind = GroupKind.SINGLE
    size: int = 1
    rank: int = 0


def peer_seconds() -> float | None:
    """Seconds that a rank of this server waits for another one: ``--watchdog-timeout``, or None for no bound of ours.

    SGLang ends a server in which one forward pass takes longer, so a peer has no good reason to be later. There is no
    bound for a value with which SGLang's watchdog does not work either: none, zero, negative, infinite, no number.
    """
    seconds = get_device().watchdog_timeout
    if seconds is None or not 0 < seconds < math.inf:
        return None
    return min(seconds, LONGEST_WAIT_SECONDS)
