"""What the cache is told besides its layout: SGLang's HiCache flags and the shard group, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang.srt.runtime_context import get_memory, get_serving

from sglang.srt.mem_cache.layouts.config import GroupKind
from sglang.srt.mem_cache.layouts.errors import LayoutConfigError

from .accepted import WRITE_POLICIES

if TYPE_CHECKING:
    from .accepted import WritePolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class HiCacheSettings:
    """The values of SGLang's ``--hicache-*`` flags that the cache reads.

    Host memory is `host_gb` x 10^9 bytes a rank if positive, else `host_ratio` x the device pool's rows.
    `load_back_threshold` is in logical tokens: a shorter host hit is recomputed. Raises `LayoutConfigError` for an
    unknown write policy.
    """

    write_policy: WritePolicy = "write_through"
    io_backend: str = "direct"
    mem_layout: str = "layer_first"
    host_ratio: float = 2.0
    host_gb: float = 0
    storage_backend: str | None = None
    load_back_threshold: int = 10
    model_name: str | None = None

    def __post_init__(self) -> None:
        if self.write_policy not in WRITE_POLICIES:
            accepted = ", ".join(WRITE_POLICIES)
            raise LayoutConfigError(f"--hicache-write-policy must be one of {accepted}, got {self.write_policy!r}")

    @property
    def write_through_threshold(self) -> int:
        """Hits after which a node is backed up."""
        return 1 if self.write_policy == "write_through" else 2

    @classmethod
    def from_server(cls) -> HiCacheSettings:
        """The values that SGLang published for this process."""
        memory = get_memory()
        return cls(
            write_policy=memory.hicache_write_policy,
            io_backend=memory.hicache_io_backend,
            mem_layout=memory.hicache_mem_layout,
            host_ratio=memory.hicache_ratio,
            host_gb=memory.hicache_size,
            storage_backend=memory.hicache_storage_backend,
            model_name=get_serving().served_model_name,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardGroup:
    """The ranks that a KV cache is sharded over, and this rank's place among them."""

    kind: GroupKind = GroupKind.SINGLE
    size: int = 1
    rank: int = 0
