"""SSH: scripts on a machine reached by its sshd, directly or through jump hosts."""

from __future__ import annotations

import contextlib
import shlex
import threading
import time

import paramiko

from gpu_reclaim.commands import (
    ANY_MACHINE,
    REMOTE_SLACK_S,
    Framed,
    Guard,
    Result,
    Script,
    argv,
    decode,
    frame,
    printable,
    unframe,
)
from gpu_reclaim.errors import BadAnswer, BadInput, LinkLost, TimedOut, Unreachable
from gpu_reclaim.transport.host_keys import SSH_PORT
from gpu_reclaim.transport.ssh_exchange import MAX_OUTPUT, Ending, Exchange, converse, start
from gpu_reclaim.transport.ssh_link import CONNECT_FAILED, Link, connect
from gpu_reclaim.transport.ssh_options import SshOptions, prepare
from gpu_reclaim.transport.ssh_refusals import raise_if_not_started

__all__ = ["SshOptions", "SshTransport"]

LAST_WORD_S = 0.2
"""Seconds granted to paramiko's thread, which closes channels just before it notes the loss."""

NEXT_SESSION_S = 2
"""Seconds granted to sshd to count the last session out, where it allows one (MaxSessions 1)."""


class SshTransport:
    """Runs scripts over one SSH connection, opened on first use and reused.

    Used by one thread: the one that opened the connection.

    Example:
        ```python
        from gpu_reclaim.transport.ssh import SshOptions, SshTransport

        link = SshTransport(SshOptions("10.0.0.9", private_key_path="~/.ssh/id_ed25519"))
        ```

    Args:
        options: How to get there.
        guard: Who the machine must be.

    Raises:
        BadInput: A key or known_hosts file cannot be used; nothing was opened.
    """

    def __init__(self, options: SshOptions, guard: Guard = ANY_MACHINE) -> None:
        self._hop = prepare(options)
        self._guard = guard
        self._link: Link | None = None
        self._owner: threading.Thread | None = None

    @property
    def name(self) -> str:
        """How and where."""
        options = self._hop.options
        port = "" if options.port == SSH_PORT else f":{options.port}"
        way = f" through {options.jump.address}" if options.jump else ""
        return f"ssh {options.username}@{options.address}{port}{way}"

    def run(self, script: Script) -> Result:
        """Run a script and find its sections; see `Transport.run`.

        Raises:
            Unreachable: No session could be opened; nothing was run.
            HostKeyRefused: A host on the way shows another key than the known one.
            AccessRefused: The login, or sudo, was refused; nothing was run.
            LinkLost: The connection broke; it may have run.
            TimedOut: No end in time; it may still run.
            Incomplete: The answer is cut.
            IdentityMismatch: Another machine answered; no section was run.
            BadAnswer: It wrote too much to keep; it may have run.
            CommandFailed: The machine has no `timeout` or `sh`; nothing was run.
            BadInput: Another thread uses this connection.
        """
        self._claim()
        framed = frame(script, self._guard)
        try:
            raw = self._exchange(framed)
        except BaseException:
            # Also when cancelled: whatever is under way on the connection, it is not reused.
            self.close()
            raise
        raise_if_not_started(framed, raw, self._hop.options)
        return unframe(framed, raw)

    def close(self) -> None:
        """End the connection, if one is open. Never raises."""
        link, self._link, self._owner = self._link, None, None
        if link is not None:
            link.close()

    def _claim(self) -> None:
        here = threading.current_thread()
        if self._owner is not None and self._owner is not here:
            raise BadInput(
                f"{self.name}: this connection belongs to thread {self._owner.name!r} and was "
                f"used by {here.name!r}; nothing was run",
                remedy="give each thread a transport of its own",
            )
        self._owner = here

    def _exchange(self, framed: Framed) -> Result:
        link, channel = self._started(framed.script)
        started = time.monotonic()
        deadline = started + framed.script.timeout_s + REMOTE_SLACK_S
        link.limit(deadline)
        got = converse(channel, framed.text.encode(), deadline)
        link.limit(None)
        raw = Result(
            framed.script,
            self.name,
            decode(bytes(got.stdout)),
            decode(bytes(got.stderr)),
            got.exit_code,
            seconds=time.monotonic() - started,
        )
        _raise_if_cut(link, got, raw)
        with contextlib.suppress(EOFError, OSError, paramiko.SSHException):
            channel.close()
        return raw

    def _started(self, script: Script) -> tuple[Link, paramiko.Channel]:
        """A channel with a shell on it that waits for the script's text."""
        link, channel = self._channel()
        options = self._hop.options
        command = shlex.join(argv(script, sudo=options.sudo))
        deadline = time.monotonic() + options.connect_timeout_s
        link.limit(deadline)
        try:
            start(channel, command, deadline)
        except (paramiko.SSHException, EOFError, OSError) as error:
            raise _no_session(self._hop.where, "it starts no command", error) from error
        return link, channel

    def _channel(self) -> tuple[Link, paramiko.Channel]:
        """A new channel; where an old connection proves dead, on a new one."""
        if self._link is not None and self._link.alive:
            try:
                return self._link, _open_next(self._link)
            except paramiko.ChannelException as error:
                raise _no_session(self._hop.where, "it opens no session", error) from error
            except (paramiko.SSHException, EOFError, OSError):
                pass
        if self._link is not None:
            self._link.close()
        self._link = connect(self._hop)
        try:
            return self._link, _open(self._link)
        except (paramiko.SSHException, EOFError, OSError) as error:
            raise _no_session(self._hop.where, "it opens no session", error) from error


def _open(link: Link) -> paramiko.Channel:
    limit = link.hop.options.connect_timeout_s
    link.limit(time.monotonic() + limit)
    return link.transport.open_session(timeout=limit)


def _open_next(link: Link) -> paramiko.Channel:
    """Another channel; one that is refused was never opened, so asking again is safe."""
    until = time.monotonic() + NEXT_SESSION_S
    while True:
        try:
            return _open(link)
        except paramiko.ChannelException as error:
            if error.code != CONNECT_FAILED or time.monotonic() >= until:
                raise
        time.sleep(0.02)


def _no_session(where: str, what: str, error: Exception) -> Unreachable:
    said = error.text if isinstance(error, paramiko.ChannelException) else str(error)
    words = printable(said or type(error).__name__, limit=200)
    return Unreachable(
        f"{where}: logged in, but {what}: {words}",
        remedy="see sshd's log on the host (MaxSessions, ForceCommand, a full process table)",
    )


def _raise_if_cut(link: Link, got: Exchange, raw: Result) -> None:
    """Raise when the exchange did not come to its own end."""
    name = raw.script.name
    if got.ending is Ending.LATE:
        raise TimedOut(
            f"{raw.where}: {name} gave no end within {raw.script.timeout_s:g} s and "
            f"{REMOTE_SLACK_S:g} s more; it may still run",
            remedy="see on the host's console whether it hangs: `ps -eo pid,stat,wchan,args`",
            result=raw,
        )
    if got.ending is Ending.FLOOD:
        raise BadAnswer(
            f"{raw.where}: {name} wrote more than {MAX_OUTPUT >> 20} MiB; the rest was not read",
            remedy="look at the host; something there writes without end",
            result=raw,
        )
    if got.ending is Ending.BROKEN or (raw.exit_code is None and _lost(link)):
        raise LinkLost(
            f"{raw.where}: the connection ended before {name} did, so nobody knows what it did",
            remedy="look at the host; the next attempt looks before it acts",
            result=raw,
        )


def _lost(link: Link) -> bool:
    """Whether the connection is gone, and not just the channel closed."""
    if link.wire.ended:
        return True
    link.transport.join(LAST_WORD_S)
    return not link.alive
