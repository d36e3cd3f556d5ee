"""An SSH server on loopback that runs what it is told, for one key and for this demo only."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import paramiko
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from paramiko.common import (
    AUTH_FAILED,
    AUTH_SUCCESSFUL,
    OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED,
    OPEN_SUCCEEDED,
)

USER = "demo"


def make_key(path: Path) -> paramiko.PKey:
    """A new Ed25519 key, kept in a file that only its owner may read."""
    pem = Ed25519PrivateKey.generate().private_bytes(
        Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()
    )
    path.touch(mode=0o600)
    path.write_bytes(pem)
    return paramiko.Ed25519Key.from_private_key_file(str(path))


@dataclass
class SshServer:
    """Listens on a free loopback port while its `with` block lasts.

    Attributes:
        host_key: Its own key.
        client_key: The one key that may log in.
        path: PATH of the commands it runs.
    """

    host_key: paramiko.PKey
    client_key: paramiko.PKey
    path: str
    _connections: list[paramiko.Transport] = field(default_factory=list)
    _running: set[subprocess.Popen[bytes]] = field(default_factory=set)

    @property
    def host_key_line(self) -> str:
        """What a block pins as `host_key`."""
        return f"{self.host_key.get_name()} {self.host_key.get_base64()}"

    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._connections:
            connection.close()
        for process in [*self._running]:
            # The leader is not waited for yet, so the number of its group is still its own.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            connection = paramiko.Transport(client)
            connection.add_server_key(self.host_key)
            self._connections.append(connection)
            with contextlib.suppress(paramiko.SSHException, EOFError):
                connection.start_server(event=threading.Event(), server=_Session(self))

    def run(self, channel: paramiko.Channel, command: str) -> None:
        """Run a command for real, as sshd would: a shell, its streams, its exit status."""
        # The client may leave at any time; its script's own `timeout` ends what it began.
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            script = b"".join(iter(lambda: channel.recv(1 << 16), b""))
            out, err, code = self._run(command, script)
            channel.sendall(out)
            channel.sendall_stderr(err)
            channel.send_exit_status(code)
            channel.close()

    def _run(self, command: str, script: bytes) -> tuple[bytes, bytes, int]:
        process = subprocess.Popen(
            ["/bin/sh", "-c", command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PATH": self.path},
            start_new_session=True,
        )
        self._running.add(process)
        try:
            out, err = process.communicate(script)
        finally:
            self._running.discard(process)
        return out, err, process.returncode


class _Session(paramiko.ServerInterface):
    """Lets one key in, and lets it run commands; nothing else."""

    def __init__(self, server: SshServer) -> None:
        self._server = server

    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        right = username == USER and key == self._server.client_key
        return AUTH_SUCCESSFUL if right else AUTH_FAILED

    def check_channel_request(self, kind: str, chanid: int) -> int:
        session = kind == "session"
        return OPEN_SUCCEEDED if session else OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        arguments = (channel, command.decode())
        threading.Thread(target=self._server.run, args=arguments, daemon=True).start()
        return True
