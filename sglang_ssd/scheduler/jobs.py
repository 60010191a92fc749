"""Work that one thread leaves to another, which sleeps in a poll on a file descriptor."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable
from contextlib import suppress


class Jobs:
    """In order. :meth:`post` and :meth:`end` may be called from any thread, the rest from the one that works."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        """Readable when there is something to do."""

    def post(self, job: Callable[[], None]) -> None:
        """To be done soon."""
        self._queue.put(job)
        os.eventfd_write(self.wake_fd, 1)

    def end(self) -> None:
        """There will be no more."""
        self._queue.put(None)
        os.eventfd_write(self.wake_fd, 1)

    def do(self) -> bool:
        """Do everything posted so far; False after the end."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.wake_fd)
        while True:
            try:
                job = self._queue.get_nowait()
            except queue.Empty:
                return True
            if job is None:
                return False
            job()

    def close(self) -> None:
        """After the end."""
        os.close(self.wake_fd)
