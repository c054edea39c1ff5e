"""What a rank's process says goes through here."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from kvlayouts.ranks.messages import Message


class Outbox:
    """Sends messages, one at a time, from any thread of the rank."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        """Send `message`; if nobody listens any more, it is lost: the lifeline ends this process."""
        with self._lock, suppress(BrokenPipeError):
            self._pipe.send(message)
