"""The link's socket: a ZeroMQ DEALER to one peer that may come and go."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

from sglang_ssd.protocol import MAX_FRAME_BYTES

_SEND_QUEUE = 64
"""Messages that wait for a peer that does not read."""


class News(NamedTuple):
    """What has happened: frames came, a connection now stands, it stands no longer."""

    frames: bool = False
    connected: bool = False
    disconnected: bool = False


class Connection:
    """All methods are for one thread. ``wake_fd`` ends a wait too."""

    def __init__(self, endpoint: str, wake_fd: int) -> None:
        self._endpoint, self._wake_fd = endpoint, wake_fd
        self._context = zmq.Context()
        self._open()

    def wait(self, timeout_s: float) -> News:
        """Until something happens."""
        ready = dict(self._poller.poll(timeout=int(1e3 * timeout_s)))
        event = recv_monitor_message(self._monitor)["event"] if self._monitor in ready else None
        return News(
            frames=self._socket in ready,
            connected=event == zmq.EVENT_HANDSHAKE_SUCCEEDED,
            disconnected=event == zmq.EVENT_DISCONNECTED,
        )

    def send(self, frame: bytes) -> bool:
        """False when nobody is there, or the peer does not read."""
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def frames(self) -> Iterator[bytes]:
        """Those that are there."""
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield frame

    def renew(self) -> None:
        """Drop what is queued in both directions and connect again."""
        self._shut()
        self._open()

    def close(self) -> None:
        """For good."""
        self._shut()
        self._context.term()

    def _open(self) -> None:
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, _SEND_QUEUE)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # queue for a peer that is there, not for one that may come
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._poller = zmq.Poller()
        for source in (self._socket, self._monitor, self._wake_fd):
            self._poller.register(source, zmq.POLLIN)
        self._socket.connect(self._endpoint)

    def _shut(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()
