"""One command on an SSH channel: its input and both outputs moved together, under one deadline.

Why not paramiko's own calls (5.1.0): `exec_command` and `recv_exit_status` wait without limit, its
timeouts count from the last byte, and reading one output after the other deadlocks once the other
one has filled its window of 2 MiB.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from enum import Enum

import paramiko

from gpu_reclaim.transport.ssh_wire import STEP_S

CHUNK = 1 << 20
"""Bytes taken from a channel at once; half of paramiko's window, so the far side need not stop."""

PACKET = 1 << 15
"""Bytes offered to a channel at once: paramiko's largest packet."""

MAX_OUTPUT = 32 << 20
"""Bytes of output kept, both streams together: far above any survey, below a worker's memory."""

LINGER_S = 2
"""Seconds of silence, once the exit status is there, after which we no longer wait for the end of
output: something the script has started may hold it open for ever."""

PAUSES_S = (0.001, 0.05)
"""Shortest and longest pause while the far side takes no input: paramiko announces no more room."""

LINK_ERRORS = (EOFError, paramiko.SSHException)
"""How paramiko says that the connection broke while we were sending."""


class Ending(Enum):
    """How an exchange ended."""

    DONE = "the far side closed"
    BROKEN = "the connection broke"
    LATE = "the deadline passed"
    FLOOD = "too much output"


@dataclass
class Exchange:
    """What came back so far.

    Attributes:
        stdout: Standard output.
        stderr: Standard error.
        exit_code: None while there is none, or where the far side gave none.
        ending: How it ended.
    """

    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    exit_code: int | None = None
    ending: Ending = Ending.DONE


class _PatientEvent(threading.Event):
    """Waits in short steps up to a deadline; `exec_command` itself would wait for ever."""

    def __init__(self, deadline: float) -> None:
        super().__init__()
        self._deadline = deadline

    def wait(self, timeout: float | None = None) -> bool:
        while not super().wait(max(0.0, min(STEP_S, self._deadline - time.monotonic()))):
            if time.monotonic() >= self._deadline:
                raise TimeoutError("no answer to the request to start a command")
        return True


def start(channel: paramiko.Channel, command: str, deadline: float) -> None:
    """Start a command.

    Raises:
        SSHException: The far side refused, or the connection broke.
        TimeoutError: No answer by the deadline (monotonic seconds).
    """
    channel.event = _PatientEvent(deadline)  # the one `exec_command` waits on
    channel.exec_command(command)


def converse(channel: paramiko.Channel, text: bytes, deadline: float) -> Exchange:
    """Write the input of a started command, close it, and read until the command is over.

    Args:
        channel: With a command just started on it.
        text: All of its standard input.
        deadline: Monotonic seconds, for all of it.
    """
    return _Conversation(channel, text, deadline).run()


class _Conversation:
    def __init__(self, channel: paramiko.Channel, text: bytes, deadline: float) -> None:
        self._channel = channel
        self._left = memoryview(text)
        self._feeding = True
        self._deadline = deadline
        self._pause = PAUSES_S[0]
        self._quiet_since = time.monotonic()
        self._wake = threading.Event()
        self._got = Exchange()

    def run(self) -> Exchange:
        self._channel.in_buffer.set_event(self._wake)
        self._channel.in_stderr_buffer.set_event(self._wake)
        try:
            self._got.ending = self._loop()
        except LINK_ERRORS:  # a write that was still blocked at the deadline ends so, too
            late = time.monotonic() >= self._deadline
            self._got.ending = Ending.LATE if late else Ending.BROKEN
        if self._channel.exit_status_ready() and self._channel.exit_status >= 0:
            self._got.exit_code = self._channel.exit_status
        return self._got

    def _loop(self) -> Ending:
        while True:
            over = self._over()  # asked first: what came before the end is then already here
            moved = self._feed() | self._drain()
            if len(self._got.stdout) + len(self._got.stderr) > MAX_OUTPUT:
                return Ending.FLOOD
            if over and not moved:
                return Ending.DONE
            if time.monotonic() >= self._deadline:
                return Ending.LATE
            if moved:
                self._quiet_since, self._pause = time.monotonic(), PAUSES_S[0]
            else:
                self._wait()

    def _over(self) -> bool:
        channel = self._channel
        if channel.closed:
            return True
        if not channel.status_event.is_set():
            return False
        return bool(channel.eof_received) or time.monotonic() > self._quiet_since + LINGER_S

    def _feed(self) -> bool:
        """Write a packet, if the far side has room for it; at the end, close its input."""
        moved = False
        try:
            if self._left and self._channel.send_ready():
                sent = self._channel.send(self._left[:PACKET].tobytes())
                self._left = self._left[sent:] if sent else memoryview(b"")
                moved = True
            if self._feeding and not self._left:
                self._feeding = False
                self._channel.shutdown_write()
        except OSError:  # closed: the command ended without reading all of its input
            self._left, self._feeding = memoryview(b""), False
        return moved

    def _drain(self) -> bool:
        """Take some of the output that has arrived, from both streams."""
        moved = False
        if self._channel.recv_ready():
            self._got.stdout += self._channel.recv(CHUNK)
            moved = True
        if self._channel.recv_stderr_ready():
            self._got.stderr += self._channel.recv_stderr(CHUNK)
            moved = True
        return moved

    def _wait(self) -> None:
        """Wait for output, for the end, or a little for room in the far side's window."""
        ended = self._channel.eof_received  # from then on the output's event stays set
        event = self._channel.status_event if ended else self._wake
        event.wait(min(self._pause if self._feeding else STEP_S, self._remaining()))
        self._pause = min(self._pause * 2, PAUSES_S[1])

    def _remaining(self) -> float:
        return max(0.0, self._deadline - time.monotonic())
