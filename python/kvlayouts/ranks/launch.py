"""The life of a rank's process, importable without SGLang so that the starting process stays light."""

from __future__ import annotations

import logging
import os
import sys
import threading
import traceback
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING

from typing_extensions import override

from kvlayouts.ranks.messages import Alive, Done, Failed, Logged
from kvlayouts.ranks.outbox import Outbox

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from kvlayouts.ranks.job import RankOrder

BEAT_SECONDS = 2.0
_OURS = ("sglang.", "kvlayouts.")
_WAITING = ("sglang.srt.mem_cache.hicache.agreement", "sglang.srt.mem_cache.hicache.waits")


def start_rank(order: RankOrder, pipe: Connection, lifeline: Connection) -> None:
    """Target of a rank's process: do the job, and say through `pipe` how it went.

    The process ends, whatever it is doing, when the other end of `lifeline` is closed, which happens at the latest
    when the process that holds it ends.
    """
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    outbox = Outbox(pipe)
    threading.Thread(target=_beat, args=(outbox, order.peer_seconds), daemon=True).start()
    forward_log(outbox)
    try:
        silence_expected_warnings()
        order.job.run(order, outbox)
        outbox.send(Done())
    except Exception as error:
        outbox.send(describe(error))
        sys.exit(1)


def _end_with(lifeline: Connection) -> None:
    with suppress(EOFError, OSError):
        lifeline.recv_bytes()
    os._exit(1)


def _beat(outbox: Outbox, peer_seconds: float) -> None:
    """Say again and again that this process runs. One that is stopped says nothing."""
    pause = threading.Event()
    while not pause.wait(min(BEAT_SECONDS, peer_seconds / 3)):
        outbox.send(Alive())


def forward_log(outbox: Outbox) -> None:
    """Send log records and Python warnings of this process to its starter instead of writing to a shared stderr."""
    logging.captureWarnings(True)
    root = logging.getLogger()
    root.handlers[:] = [_Forwarder(outbox)]


class _Forwarder(logging.Handler):
    def __init__(self, outbox: Outbox) -> None:
        super().__init__(logging.WARNING)
        self._outbox = outbox

    @override
    def emit(self, record: logging.LogRecord) -> None:
        text = " ".join(record.getMessage().split())
        # All Python warnings are logged from one line of the standard library; their texts begin with their own.
        origin = text if record.name == "py.warnings" else f"{record.pathname}:{record.lineno}"
        self._outbox.send(Logged(origin=origin, text=text))


def silence_expected_warnings() -> None:
    """Drop what SGLang says wherever it runs without a GPU: kernels it does without, transfers it cannot time."""
    warnings.filterwarnings("ignore", message="Only CUDA, .* support", category=UserWarning)
    logging.getLogger("sglang.srt.mem_cache.l2_transfer").addFilter(_is_no_timing_note)


def _is_no_timing_note(record: logging.LogRecord) -> bool:
    return "does not support timing" not in str(record.msg)


def describe(error: Exception) -> Failed:
    """The failure of a rank as one line. Errors raised by a collective itself are the fault of a peer."""
    from sglang.srt.mem_cache.hicache.errors import LostPeerError  # the rank has loaded SGLang, its starter has not

    stack = traceback.walk_tb(error.__traceback__)
    frames = [(str(frame.f_globals.get("__name__")), frame.f_code.co_name) for frame, _ in stack]
    waiting_in = None
    if isinstance(error, LostPeerError) or (frames and frames[-1][0].startswith("torch.distributed")):
        waiting_in = next(
            name for module, name in reversed(frames) if module.startswith(_OURS) and module not in _WAITING
        )
    notes = "".join(f"{note}: " for note in getattr(error, "__notes__", ()))
    return Failed(
        error=" ".join(f"{notes}{type(error).__name__}: {error}".split()),
        details=traceback.format_exc(),
        waiting_in=waiting_in,
    )
