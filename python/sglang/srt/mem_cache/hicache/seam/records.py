"""What the seam takes and gives: the same on each release."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPoolSize:
    """`gigabytes` of 10^9 bytes if positive, else `ratio` x the device pool's slots; and how pages lie in it."""

    ratio: float
    gigabytes: float
    page_size: int
    mem_layout: str
    allocator_type: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a process of a server stands among the others. `dp_rank` is None without data parallelism."""

    tp_rank: int
    pp_rank: int
    dp_rank: int | None
    attn_tp_rank: int
    attn_cp_rank: int
