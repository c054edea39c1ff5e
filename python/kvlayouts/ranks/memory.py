"""What the ranks of a replay or a soak take of this machine's memory, judged before one is started."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvlayouts.common.errors import InputError
from sglang.srt.mem_cache.hicache.host.memory import CPU_RESERVE_BYTES, refuse_too_large
from sglang.srt.mem_cache.hicache.host.sizes import device_pool_bytes, host_pool_bytes
from sglang.srt.mem_cache.layouts.errors import LayoutConfigError

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache.device.geometry import Geometry

LAYERS: Final = 2
"""Layers of each rank's pools."""


def refuse_more_than_there_is(
    asked: str, geometry: Geometry, *, ranks: int, device_pages: int, host_pages: int, page_size: int
) -> None:
    """Raise `InputError` unless the machine has room for the pools of all ranks; device pools lie in it too.

    `asked` are the flags with their values; pages are those of one rank.
    """
    device_bytes = device_pool_bytes(
        pages=device_pages, page_size=page_size, slot_bytes=LAYERS * (geometry.kv_bytes + geometry.index_bytes)
    )
    host_bytes = host_pool_bytes(
        pages=host_pages,
        page_size=page_size,
        kv_slot_bytes=LAYERS * geometry.kv_bytes,
        index_slot_bytes=LAYERS * geometry.index_bytes,
    )
    try:
        refuse_too_large(
            asked,
            rank_bytes=device_bytes + host_bytes,
            ranks=ranks,
            reserve_bytes=CPU_RESERVE_BYTES,
            parts="device and host pools",
        )
    except LayoutConfigError as error:
        raise InputError(str(error)) from error
