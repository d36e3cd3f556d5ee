"""The bytes below an SSH connection: a socket that never blocks for long.

paramiko takes any object with a socket's `send`, `recv`, `settimeout` and `close`. Its own loop
retries a blocked write for ever (`Packetizer.write_all`, 5.1.0), so the limit is kept down here.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from errno import EINPROGRESS
from typing import Protocol

STEP_S = 0.5
"""Longest single wait: a cancellation reaches Python code between two of them."""

KEEPALIVE_S = 15
"""Seconds of silence before something is sent: below the idle limits of usual firewalls."""

DEAD_PEER_S = 45
"""Seconds after which TCP gives up on a peer that acknowledges nothing: three keepalives."""

AddressInfo = tuple[
    socket.AddressFamily,
    socket.SocketKind,
    int,
    str,
    tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes],
]


class Stream(Protocol):
    """What a socket and a paramiko channel have in common."""

    def send(self, data: bytes, /) -> int:
        """Send some of the data."""

    def recv(self, size: int, /) -> bytes:
        """Receive; empty at the end."""

    def settimeout(self, seconds: float | None, /) -> None:
        """Limit each `send` and `recv`."""

    def close(self) -> None:
        """Close."""


class Wire:
    """A stream with a deadline for writes, which remembers whether anything came, and its end.

    Attributes:
        deadline: Monotonic time after which a blocked write fails; None: never.
        heard: The first bytes that were received.
        ended: The far side closed it, or it broke.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._closed = False  # read by `paramiko.Transport.stop_thread`
        self.deadline: float | None = None
        self.heard = b""
        self.ended = False

    def send(self, data: bytes) -> int:
        """Send some of the data.

        Raises:
            TimeoutError: Blocked; to be tried again.
            ConnectionAbortedError: Blocked, and past the deadline.
        """
        try:
            return self._stream.send(data)
        except TimeoutError:
            if self.deadline is not None and time.monotonic() > self.deadline:
                raise ConnectionAbortedError("the far side takes no data") from None
            raise

    def recv(self, size: int) -> bytes:
        """Receive; empty at the end."""
        try:
            data = self._stream.recv(size)
        except TimeoutError:
            raise
        except OSError:
            self.ended = True
            raise
        self.heard = self.heard or data
        self.ended = self.ended or not data
        return data

    def settimeout(self, seconds: float | None) -> None:
        """Limit each `send` and `recv`, in seconds."""
        self._stream.settimeout(seconds)

    def close(self) -> None:
        """Close the stream."""
        self._closed = True
        self._stream.close()


def dial(address: str, port: int, limit_s: float) -> socket.socket:
    """Open a TCP connection; every address of the name gets its share of the time.

    Raises:
        socket.gaierror: The name cannot be resolved.
        OSError: No address answered; the last one's error.
    """
    infos = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    until = time.monotonic() + limit_s
    failure = OSError(f"{address} has no address")
    for left, info in zip(range(len(infos), 0, -1), infos, strict=True):
        share = (until - time.monotonic()) / left
        try:
            return _connect(info, time.monotonic() + share)
        except OSError as error:
            failure = error
    raise failure


def _connect(info: AddressInfo, until: float) -> socket.socket:
    connection = socket.socket(info[0], info[1], info[2])
    try:
        connection.setblocking(False)
        code = connection.connect_ex(info[4])
        if code == EINPROGRESS:
            code = _outcome(connection, until)
        if code:
            raise OSError(code, os.strerror(code))
        _tune(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _outcome(connection: socket.socket, until: float) -> int:
    """Wait for a connection under way; its error number, or 0."""
    poll = select.poll()
    poll.register(connection, select.POLLOUT)
    while not poll.poll(min(STEP_S, max(until - time.monotonic(), 0)) * 1000):
        if time.monotonic() >= until:
            raise TimeoutError("no answer")
    return connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)


def _tune(connection: socket.socket) -> None:
    """Send small packets at once, and let TCP notice a peer that is gone (names are Linux's)."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_S),
        ("TCP_USER_TIMEOUT", DEAD_PEER_S * 1000),
    ):
        with contextlib.suppress(AttributeError, OSError):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
