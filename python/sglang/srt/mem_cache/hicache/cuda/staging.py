"""Pinned host memory for small tables on their way to the device.

A copy from pageable memory may wait for the device; one from pinned memory does not. Each slot is pinned once and
written again when the copy out of it has ended, which is asked without waiting::

    slots   [in flight][free][in flight]      upload takes the first free one, or adds one
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .page_maps import AddressArray

_SLOT_WORDS = 1 << 15


@dataclass(slots=True, kw_only=True)
class _Slot:
    words: torch.Tensor
    copied: torch.cuda.Event


class PinnedRing:
    """Uploads int64 tables to `device`; starts with `slots` slots of 256 KiB and adds more when all are in flight."""

    def __init__(self, device: torch.device, *, slots: int = 4) -> None:
        self._device = device
        self._slots = [_new_slot(_SLOT_WORDS) for _ in range(slots)]

    def upload(self, table: AddressArray) -> torch.Tensor:
        """`table` on the device, by a copy on the current stream; memory of that stream, so keep it for no other."""
        slot = self._free_slot(len(table))
        slot.words[: len(table)].copy_(torch.from_numpy(table))
        uploaded = torch.empty(len(table), dtype=torch.int64, device=self._device)
        uploaded.copy_(slot.words[: len(table)], non_blocking=True)
        slot.copied.record()
        return uploaded

    def _free_slot(self, words: int) -> _Slot:
        for index, slot in enumerate(self._slots):
            if len(slot.words) >= words and slot.copied.query():  # type: ignore[no-untyped-call]  # torch leaves it so
                self._slots.append(self._slots.pop(index))
                return slot
        self._slots.append(_new_slot(max(_SLOT_WORDS, 1 << (words - 1).bit_length())))
        return self._slots[-1]


def _new_slot(words: int) -> _Slot:
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it so
    return _Slot(words=torch.empty(words, dtype=torch.int64, pin_memory=True), copied=copied)
