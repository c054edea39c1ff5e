"""Small tables on their way to the device, through pinned host memory.

A copy from pageable memory may wait for the device; one from pinned memory does not. A *slot* is a pinned table and its
place on the device, made once. It is used again when everything that reads it has ended, which is asked without
waiting::

    slots   [in use][free][in use]      `free_slot` takes the first free one, or adds one

Adding one allocates pinned memory, for which CUDA may wait for the device; it is never given back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from . import driver

if TYPE_CHECKING:
    from .page_maps import AddressArray

_SLOT_WORDS = 1 << 15


class Slot:
    """Room for `words` int64 on both sides: `table`, an array to write to, and `on_device`, flat."""

    taken = False
    """From `PinnedRing.free_slot` to `release`; for ever if an error comes between, since something may read it."""

    def __init__(self, words: int, device: torch.device) -> None:
        self.table: AddressArray = torch.empty(words, dtype=torch.int64, pin_memory=True).numpy()
        self.on_device = torch.empty(words, dtype=torch.int64, device=device)
        self._released = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it so

    def upload(self, words: int, stream: torch.cuda.Stream) -> None:
        """Copy the first `words` of `table` to the device, on `stream`."""
        driver.upload(self.on_device.data_ptr(), self.table.ctypes.data, words * self.table.itemsize, stream=stream)

    def release(self, stream: torch.cuda.Stream) -> None:
        """Free once `stream` has come this far."""
        self._released.record(stream)
        self.taken = False

    @property
    def free(self) -> bool:
        """Whether nobody has it and nothing reads it any more."""
        return not self.taken and bool(self._released.query())  # type: ignore[no-untyped-call]  # torch leaves it so


class PinnedRing:
    """Slots for tables that `stream` reads: `slots` of 256 KiB at first, more when all are in use or too small."""

    def __init__(self, stream: torch.cuda.Stream, *, slots: int = 4) -> None:
        self._stream = stream
        self._slots = [self._new_slot(_SLOT_WORDS) for _ in range(slots)]

    def free_slot(self, words: int) -> Slot:
        """A slot with room for `words`, which the caller has to release."""
        for index, slot in enumerate(self._slots):
            if len(slot.table) >= words and slot.free:
                self._slots.append(self._slots.pop(index))
                break
        else:
            self._slots.append(self._new_slot(max(_SLOT_WORDS, 1 << (words - 1).bit_length())))
        self._slots[-1].taken = True
        return self._slots[-1]

    def _new_slot(self, words: int) -> Slot:
        with torch.cuda.stream(self._stream):  # torch gives it memory that no other stream still uses
            return Slot(words, self._stream.device)
