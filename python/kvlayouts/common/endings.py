"""Commands that end before their time: by a signal, or because nobody reads any more what they write.

Their exit status is that of a program that the signal itself ended: 128 and its number.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, NoReturn, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

ErrorT = TypeVar("ErrorT", bound=BaseException)

EXIT_READER_GONE: Final = 128 + signal.SIGPIPE


class Terminated(KeyboardInterrupt):
    """The signal `number` is to end the command as Ctrl-C does: ranks are ended and folders removed first."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.number = number


@contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """Within, SIGTERM and a closed terminal end the command as Ctrl-C does, unless they are ignored.

    They raise `Terminated`. Off the main thread they stay as they are.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        for number, handler in handlers.items():
            if handler is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, _raise_terminated)
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _raise_terminated(number: int, _frame: FrameType | None) -> NoReturn:
    raise Terminated(number)


def interrupt_status(interrupt: KeyboardInterrupt | None) -> int:
    """The exit status after an interrupt: 130 after Ctrl-C."""
    return 128 + (interrupt.number if isinstance(interrupt, Terminated) else signal.SIGINT)


def behind(error: BaseException | None, kind: type[ErrorT]) -> ErrorT | None:
    """The error of that kind that led to `error`, itself included; None if there is none."""
    while error is not None and not isinstance(error, kind):
        error = error.__cause__ or error.__context__
    return error


def open_closed_streams() -> None:
    """Standard streams that were closed from the start lead nowhere, else the next files and pipes took their place."""
    while (nowhere := os.open(os.devnull, os.O_RDWR)) <= 2:  # the lowest number that is free
        pass
    os.close(nowhere)
    sys.stdin = sys.stdin or os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8", closefd=False)


def drop_unread_output() -> None:
    """What could not be written is given to nobody, else the interpreter tries again at its end and complains."""
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None where it was closed from the start
        try:
            stream.flush()
        except OSError:
            with suppress(OSError):  # no file of the system
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)
