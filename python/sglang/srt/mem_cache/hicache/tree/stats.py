"""Running totals of one rank's cache. Tokens and operations are logical, equal on all ranks; bytes are this rank's."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class CacheStats:
    """Counted since construction; a reset of the cache does not clear them.

    A backup or load counts when its ack is settled, an eviction when it happens. `zero_owned_backups` are
    those of which this rank copied nothing. `refused_backups` were not admitted after host eviction.
    """

    backups: int = 0
    backed_up_tokens: int = 0
    backed_up_bytes: int = 0
    zero_owned_backups: int = 0
    refused_backups: int = 0
    loads: int = 0
    loaded_tokens: int = 0
    loaded_bytes: int = 0
    refused_loads: int = 0
    evicted_device_tokens: int = 0
    evicted_host_tokens: int = 0
    dropped_tokens: int = 0
