"""Running totals of one rank's cache. Tokens and operations are logical, equal on all ranks; bytes are this rank's."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class CacheStats:
    """Counted since construction; a reset of the cache does not clear them.

    A backup or load counts when its ack is settled, an eviction when it happens. `zero_owned_backups` are
    those of which this rank copied nothing. `late_backups` were made while their node left the device, which waits for
    them. `refused_backups` found no host room then, even by giving up every copy that may go: the node is lost.
    """

    backups: int = 0
    backed_up_tokens: int = 0
    backed_up_bytes: int = 0
    zero_owned_backups: int = 0
    late_backups: int = 0
    refused_backups: int = 0
    loads: int = 0
    loaded_tokens: int = 0
    loaded_bytes: int = 0
    refused_loads: int = 0
    evicted_device_tokens: int = 0
    evicted_host_tokens: int = 0
    dropped_tokens: int = 0
