"""An SSH server in this process, with good days and bad ones, and a TCP relay that can freeze."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import select
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import paramiko
from paramiko.common import (
    AUTH_FAILED,
    AUTH_PARTIALLY_SUCCESSFUL,
    AUTH_SUCCESSFUL,
    OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED,
    OPEN_SUCCEEDED,
    cMSG_CHANNEL_REQUEST,
)
from paramiko.message import Message

PATIENCE_S = 60
"""How long a bad day may last before the server gives up; no verdict hangs on it."""

HANG_S = 20
"""What takes longer hangs: far above the limits of the tests, below those of TCP and paramiko."""

USER, PASSWORD = "root", "correct-horse"


class Call:
    """One command asked for by the client."""

    def __init__(self, server: SshServer, channel: paramiko.Channel, command: str) -> None:
        self.server = server
        self.channel = channel
        self.command = command

    def script(self) -> str:
        """All of its input, up to the end."""
        parts = iter(lambda: self.channel.recv(1 << 20), b"")
        return b"".join(parts).decode()

    def mark(self) -> str:
        """Read the input, and find the marker in it."""
        found = re.search(r"@gr-[0-9a-f]+", self.script())
        assert found is not None
        return found[0]

    def say(self, data: bytes | str) -> None:
        self.channel.sendall(data if isinstance(data, bytes) else data.encode())

    def begin(self) -> str:
        """Answer with the begin marker."""
        mark = self.mark()
        self.say(f"{mark} begin\n{mark} section a\n")
        return mark

    def answer(self, text: bytes | str = "", mark: str | None = None) -> None:
        """A whole answer with one section `a`, but no exit status."""
        mark = mark or self.begin()
        self.say(text)
        self.say(f"\n{mark} code 0\n{mark} end\n")

    def exit(self, code: int) -> None:
        self.channel.send_exit_status(code)
        self.channel.close()

    def signal(self, name: str) -> None:
        """End by a signal, as RFC 4254 section 6.10 has it; paramiko cannot send that."""
        message = Message()
        message.add_byte(cMSG_CHANNEL_REQUEST)
        message.add_int(self.channel.remote_chanid)
        message.add_string("exit-signal")
        message.add_boolean(False)
        message.add_string(name)
        message.add_boolean(False)
        message.add_string("")
        message.add_string("")
        self.channel.get_transport()._send_user_message(message)  # type: ignore[attr-defined]
        self.channel.close()

    def drop(self) -> None:
        """Break the connection, after all that was said has gone out."""
        self.channel.get_transport().close()

    def hang(self) -> None:
        """Do nothing, until the test is over."""
        self.server.over.wait(PATIENCE_S)


def real_shell(call: Call) -> None:
    """Run the command for real."""
    done = subprocess.run(
        ["/bin/sh", "-c", call.command],
        input=call.script().encode(),
        capture_output=True,
        check=False,
        env={**os.environ, "PATH": call.server.path},
    )
    call.say(done.stdout)
    call.channel.sendall_stderr(done.stderr)
    call.exit(done.returncode)


@dataclass
class SshServer:
    """Listens on a free loopback port.

    Attributes:
        handler: What happens for a command, in a thread of its own.
        host_keys: Private host keys.
        authorized: Public keys that may log in.
        password: The right password; None: none is allowed.
        needs_all: A key and the password are needed, in this order.
        silent_auth: No login is ever answered.
        drops_auth: The connection ends at the first login.
        channels: Sessions are allowed.
        commands: Commands are: True, False, or None: never answered.
        path: PATH of the real shell.
        window: Bytes of input the server takes without reading.
        connections: How many there were.
        logins: Methods that were tried.
        calls: Commands that were asked for.
        over: Set when the test is over.
    """

    host_keys: list[paramiko.PKey]
    handler: Callable[[Call], None] = real_shell
    authorized: list[paramiko.PKey] = field(default_factory=list)
    password: str | None = PASSWORD
    needs_all: bool = False
    silent_auth: bool = False
    drops_auth: bool = False
    channels: bool = True
    commands: bool | None = True
    path: str = os.environ["PATH"]
    window: int = 1 << 21
    on_command: Callable[[], None] = lambda: None
    connections: list[paramiko.Transport] = field(default_factory=list)
    logins: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.over.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self.connections:
            connection.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            connection = paramiko.Transport(client, default_window_size=self.window)
            connection.set_log_channel("ssh_server_under_test")
            for key in self.host_keys:
                connection.add_server_key(key)
            self.connections.append(connection)
            with contextlib.suppress(paramiko.SSHException, EOFError):
                connection.start_server(
                    event=threading.Event(), server=_Behaviour(self, connection)
                )


class _Behaviour(paramiko.ServerInterface):
    def __init__(self, server: SshServer, connection: paramiko.Transport) -> None:
        self.server = server
        self.connection = connection
        self.key_seen = False

    def get_allowed_auths(self, username: str) -> str:
        if self.server.needs_all:
            return "password" if self.key_seen else "publickey"
        return "publickey,password" if self.server.password else "publickey"

    def check_auth_password(self, username: str, password: str) -> int:
        self._note("password")
        right = password == self.server.password and username == USER
        ready = self.key_seen or not self.server.needs_all
        return AUTH_SUCCESSFUL if right and ready else AUTH_FAILED

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        self._note("publickey")
        if key not in self.server.authorized or username != USER:
            return AUTH_FAILED
        self.key_seen = True
        partly = self.server.needs_all
        return AUTH_PARTIALLY_SUCCESSFUL if partly else AUTH_SUCCESSFUL

    def _note(self, method: str) -> None:
        self.server.logins.append(method)
        if self.server.drops_auth:
            self.connection.close()
        if self.server.silent_auth:
            self.server.over.wait(PATIENCE_S)

    def check_channel_request(self, kind: str, chanid: int) -> int:
        if kind == "session" and self.server.channels:
            return OPEN_SUCCEEDED
        return OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        self.server.on_command()
        if self.server.commands is None:
            self.server.over.wait(PATIENCE_S)
        if not self.server.commands:
            return False
        self.server.calls.append(command.decode())
        call = Call(self.server, channel, command.decode())
        threading.Thread(target=self._handle, args=(call,), daemon=True).start()
        return True

    def _handle(self, call: Call) -> None:
        # The client may go away in the middle of any bad day.
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self.server.handler(call)


@contextlib.contextmanager
def listener(behave: Callable[[socket.socket], None]) -> Iterator[int]:
    """A TCP port that is no SSH server; every connection is given to `behave`, then closed."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = server.accept()
                    with client:
                        behave(client)

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


class Relay:
    """Passes TCP on to a port, until it is frozen: then it reads nothing more from its clients.

    Attributes:
        hung_up: Set once a client or the server has closed a connection.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._frozen: set[socket.socket] = set()
        self.hung_up = threading.Event()
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> Self:
        self._listener = socket.socket()
        # Little room, so that a sender feels soon that nobody reads.
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen()
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for each in (self._listener, *self._sockets):
            each.close()

    def freeze(self) -> None:
        """Freeze the connections there are now; later ones are passed on."""
        self._frozen |= set(self._sockets)

    def cut(self) -> None:
        """Break the connections there are now."""
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += [near, far]
                threading.Thread(target=self._pump, args=(near, far), daemon=True).start()

    def _pump(self, near: socket.socket, far: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):  # reset by a client, closed by the test
            while self._pass_on(near, far):
                pass
        self.hung_up.set()
        near.close()
        far.close()

    def _pass_on(self, near: socket.socket, far: socket.socket) -> bool:
        wanted = [far] if near in self._frozen else [near, far]
        for ready in select.select(wanted, [], [], 0.05)[0]:
            if ready is near and near in self._frozen:
                continue
            data = ready.recv(65536)
            (far if ready is near else near).sendall(data)
            if not data:
                return False
        return True


def promptly(work: Callable[[], object]) -> None:
    """Do it, in another thread, and raise what it raises; fail if it hangs."""
    raised: queue.Queue[Exception | None] = queue.Queue()

    def body() -> None:
        try:
            work()
        except Exception as error:  # handed to the test, which judges it
            raised.put(error)
        else:
            raised.put(None)

    threading.Thread(target=body, daemon=True).start()
    error = raised.get(timeout=HANG_S)
    if error is not None:
        raise error


def keygen(path: Path, kind: str = "ed25519") -> None:
    """A key pair by the real ssh-keygen; `path` is the private key's."""
    bits = ["-b", "2048"] if kind == "rsa" else []  # quicker to find than the default of 3072
    command = ["ssh-keygen", "-q", "-t", kind, *bits, "-N", "", "-C", "a comment"]
    subprocess.run(
        [*command, "-f", path],
        check=True,
        stdin=subprocess.DEVNULL,
    )


def public(path: Path) -> str:
    """The `.pub` line beside a private key."""
    return path.with_name(f"{path.name}.pub").read_text().strip()
