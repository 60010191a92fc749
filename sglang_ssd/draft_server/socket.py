"""The I/O thread: it alone touches the ROUTER socket, and no forward can hold it up."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from typing import TypeAlias

import zmq

from sglang_ssd.protocol import (
    MAX_FRAME_BYTES,
    BadFrame,
    Ping,
    Pong,
    Refused,
    ToDraft,
    ToTarget,
    decode_at_draft,
    encode,
    other_version,
    version_of_hello,
)
from sglang_ssd.seldom import Seldom

logger = logging.getLogger(__name__)

Mail: TypeAlias = tuple[bytes, ToDraft]
"""The identity of a target and what it said."""

_STOP = None


class Door:
    """Decodes what comes in and queues it for the engine thread; answers pings itself; sends what it is given.

    ``parent_pipe``: a file descriptor whose end of file means that our parent is gone; then the mail ends.
    """

    def __init__(self, endpoint: str, boot: int, parent_pipe: int | None = None) -> None:
        self._boot = boot
        self._parent_pipe = parent_pipe
        self._mail: queue.SimpleQueue[Mail | None] = queue.SimpleQueue()
        self._context = zmq.Context()
        self._router = self._bound(endpoint)
        self._inner, self._outer = self._pair()
        self._quiet = Seldom(logger)
        self.bad_frames = 0
        self.figures: dict[str, int] = {}
        """What a Pong reports besides ``bad_frames``; the engine thread replaces the whole."""
        self.busy_since: float | None = None
        """When the engine thread began what it does now (time.monotonic), None while it waits."""
        self.heard: dict[bytes, float] = {}
        """When each target was last heard (time.monotonic); the engine thread drops those that fell silent."""
        self._thread = threading.Thread(target=self._run, name="ssd-draft-io", daemon=True)
        self._thread.start()

    # ---- the engine thread ------------------------------------------------------------------------------------

    def receive(self, timeout_s: float) -> tuple[list[Mail], bool]:
        """All mail there is, waiting up to ``timeout_s`` for the first; and whether it is time to stop."""
        mail: list[Mail] = []
        wait = timeout_s > 0
        while True:
            try:
                item = self._mail.get(timeout=timeout_s) if wait and not mail else self._mail.get_nowait()
            except queue.Empty:
                return mail, False
            if item is _STOP:
                return mail, True
            mail.append(item)

    def send(self, identity: bytes, message: ToTarget) -> None:
        """Give a message to the I/O thread."""
        self._outer.send_multipart([identity, encode(message)])

    def stop(self) -> None:
        """End the mail; safe in a signal handler."""
        self._mail.put(_STOP)

    def close(self) -> None:
        """End the thread and close the socket; what was given to :meth:`send` before is still sent."""
        if self._thread.is_alive():
            self._outer.send_multipart([b"", b""])
            self._thread.join()
        self._outer.close()
        self._context.term()

    # ---- the I/O thread ---------------------------------------------------------------------------------------

    def _bound(self, endpoint: str) -> zmq.Socket[bytes]:
        router = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a target that comes back under its identity replaces itself
        router.bind(endpoint)
        return router

    def _pair(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """Two ends of an in-process queue without a bound: the engine thread never waits for this one."""
        inner, outer = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
        for end in (inner, outer):
            end.setsockopt(zmq.LINGER, 0)
            end.setsockopt(zmq.RCVHWM, 0)
            end.setsockopt(zmq.SNDHWM, 0)
        inner.bind("inproc://out")
        outer.connect("inproc://out")
        return inner, outer

    def _run(self) -> None:
        try:
            self._serve()
        finally:  # without this thread there is no server
            self.stop()
            self._router.close()
            self._inner.close()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._inner, zmq.POLLIN)
        if self._parent_pipe is not None:
            poller.register(self._parent_pipe, zmq.POLLIN | zmq.POLLERR)
        going = True
        while going:
            events = dict(poller.poll())
            if self._router in events:
                self._take_in()
            if self._inner in events:
                going = self._send_out()
            if self._parent_pipe in events and not os.read(self._parent_pipe or 0, 1):
                poller.unregister(self._parent_pipe)
                logger.warning("The process that started this draft server is gone; stopping.")
                self.stop()

    def _take_in(self) -> None:
        """One message, so that neither direction can starve the other."""
        parts = self._router.recv_multipart()
        if len(parts) != 2:
            self._reject(f"{len(parts)} parts")
            return
        identity, frame = parts
        try:
            message = decode_at_draft(frame)
        except BadFrame as error:
            version = version_of_hello(frame)
            if version is None:
                self._reject(str(error))
            else:
                self._router.send_multipart([identity, encode(Refused(other_version(version)))])
            return
        self.heard[identity] = time.monotonic()
        if isinstance(message, Ping):
            self._router.send_multipart([identity, encode(self._pong(message))])
        else:
            self._mail.put((identity, message))

    def _pong(self, ping: Ping) -> Pong:
        since = self.busy_since
        busy_us = 0 if since is None else int((time.monotonic() - since) * 1e6)
        return Pong(self._boot, ping.nonce, busy_us, {**self.figures, "bad_frames": self.bad_frames})

    def _send_out(self) -> bool:
        identity, frame = self._inner.recv_multipart()
        if not identity:
            return False
        self._router.send_multipart([identity, frame])  # ROUTER drops what is for a target that has gone
        return True

    def _reject(self, why: str) -> None:
        self.bad_frames += 1
        self._quiet.warn("frame", f"dropped a frame that is no message of this protocol: {why}")
