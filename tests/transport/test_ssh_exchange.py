"""What no real server does on command: output at exactly the wrong moment."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import cast

import paramiko
import pytest
from paramiko.buffered_pipe import BufferedPipe

from gpu_reclaim.transport.ssh_exchange import Ending, Exchange, converse
from transport.ssh_server import promptly


class FakeChannel:
    """A channel whose buffers are filled by hand.

    Attributes:
        between: Called once both streams were found empty: the wrong moment.
        endless: There is always one more byte of output.
    """

    def __init__(self) -> None:
        self.in_buffer: BufferedPipe[bytes] = BufferedPipe()
        self.in_stderr_buffer: BufferedPipe[bytes] = BufferedPipe()
        self.status_event = threading.Event()
        self.closed = self.eof_received = False
        self.exit_status = -1
        self.endless = False
        self.between: Callable[[], None] = lambda: None

    def recv_ready(self) -> bool:
        return self.endless or self.in_buffer.read_ready()

    def recv(self, size: int) -> bytes:
        return b"x" if self.endless else self.in_buffer.read(size)

    def recv_stderr_ready(self) -> bool:
        ready = self.in_stderr_buffer.read_ready()
        if not ready:
            self.between()
        return ready

    def recv_stderr(self, size: int) -> bytes:
        return self.in_stderr_buffer.read(size)

    def exit_status_ready(self) -> bool:
        return self.closed or self.status_event.is_set()

    def shutdown_write(self) -> None:
        """Nothing to tell anybody."""


def talk(channel: FakeChannel, seconds: float) -> Exchange:
    got: list[Exchange] = []
    deadline = time.monotonic() + seconds
    promptly(
        lambda: got.append(converse(cast("paramiko.Channel", channel), b"", deadline)),
    )
    return got[0]


@pytest.mark.parametrize("how", ["closed", "ended"])
def test_the_last_words_come_just_before_the_end(how: str) -> None:
    channel = FakeChannel()

    def finish() -> None:
        channel.between = lambda: None
        channel.in_buffer.feed(b"last words")
        channel.in_stderr_buffer.feed(b"and more")
        channel.exit_status = 0
        channel.status_event.set()
        if how == "closed":
            channel.closed = True
        else:
            channel.eof_received = True
        channel.in_buffer.close()
        channel.in_stderr_buffer.close()

    channel.between = finish
    got = talk(channel, 60)
    assert (got.ending, got.exit_code) == (Ending.DONE, 0)
    assert (bytes(got.stdout), bytes(got.stderr)) == (b"last words", b"and more")


def test_output_that_never_pauses_does_not_hide_the_deadline() -> None:
    channel = FakeChannel()
    channel.endless = True
    assert talk(channel, 0.2).ending is Ending.LATE
