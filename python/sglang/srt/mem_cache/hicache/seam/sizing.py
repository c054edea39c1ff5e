"""What a host pool is told of its size, on each release."""

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
