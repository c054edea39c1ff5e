"""Copies that run late. On a CPU SGLang's copies are done when they are submitted, which hides every mistake of order.

`LateTransfer` stands before a `Transfer` and holds each copy back for a number of polls. Until then the
rows keep their old bytes and the ack is not ready; if somebody reuses a row too early, the bytes come out wrong.
Copies of one direction run in the order of their submission, as on a CUDA stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.mem_cache.l2_transfer import TransferCompletion

from sglang.srt.mem_cache.layouts.exchange import NO_EXCHANGE

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.managers.cache_controller import LayerLoadingEvent

    from sglang.srt.mem_cache.hicache.copies.transfer import Transfer
    from sglang.srt.mem_cache.layouts.exchange import PageExchange
    from sglang.srt.mem_cache.layouts.plans import CopyPlan


class _LateCopy:
    """The events of a copy that has not run yet. A poll counts down; `synchronize` runs it at once."""

    def __init__(self, queue: list[_LateCopy], run: Callable[[], TransferCompletion], polls: int) -> None:
        self._queue = queue
        self._run = run
        self._polls = polls
        self._done = False
        queue.append(self)

    def query(self) -> bool:
        if not self._done:
            self._polls -= 1
            if self._polls <= 0 and self._queue[0] is self:
                self.finish()
        return self._done

    def synchronize(self) -> None:
        while not self._done:
            self._queue[0].finish()

    def finish(self) -> None:
        self._queue.pop(0)
        self._run()
        self._done = True


class LateTransfer:
    """A `Transfer` whose copies run some polls after their submission; 0 runs them at once.

    `load_polls` must be equal on all ranks where they exchange pages: here, unlike on a device, an exchange waits for
    all ranks with the thread that has to poll.
    """

    def __init__(self, transfer: Transfer, backup_polls: Callable[[], int], load_polls: Callable[[], int]) -> None:
        self._transfer = transfer
        self._backup_polls = backup_polls
        self._load_polls = load_polls
        self._backups: list[_LateCopy] = []
        self._loads: list[_LateCopy] = []
        self.engine = transfer.engine
        self.bytes_per_page = transfer.bytes_per_page

    @property
    def received_bytes(self) -> int:
        """See `Transfer.received_bytes`."""
        return self._transfer.received_bytes

    def back_up(self, copies: CopyPlan) -> TransferCompletion:
        """See `Transfer.back_up`."""
        return self._submit(self._backups, self._backup_polls(), lambda: self._transfer.back_up(copies))

    def load(
        self, copies: CopyPlan, producer: LayerLoadingEvent, exchange: PageExchange = NO_EXCHANGE
    ) -> TransferCompletion:
        """See `Transfer.load`. Call `finish_loads` where a forward pass would wait for its layers."""
        return self._submit(self._loads, self._load_polls(), lambda: self._transfer.load(copies, producer, exchange))

    def finish_loads(self) -> None:
        """Run every load that was submitted, as waiting for the last layer does."""
        for copy in list(self._loads):
            copy.synchronize()

    def _submit(self, queue: list[_LateCopy], polls: int, run: Callable[[], TransferCompletion]) -> TransferCompletion:
        if polls == 0 and not queue:
            return run()
        late = _LateCopy(queue, run, polls)
        return TransferCompletion(start_event=late, finish_event=late, timing_enabled=False)
