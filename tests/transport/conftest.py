"""Keys, an in-process SSH server, and a real OpenSSH server."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import paramiko
import pytest

from gpu_reclaim.transport.ssh import SshOptions, SshTransport
from transport.ssh_server import USER, Call, SshServer, keygen, public, real_shell

SSHD = Path("/usr/sbin/sshd")
START_S = 30
"""A limit on the start of sshd; generous, so that no verdict hangs on it."""


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of key pairs: host_ed25519, host_rsa, host_ecdsa, other, user, stranger."""
    folder = tmp_path_factory.mktemp("keys")
    for kind in ("ed25519", "rsa", "ecdsa"):
        keygen(folder / f"host_{kind}", kind)
    for name in ("other", "user", "stranger"):
        keygen(folder / name)
    return folder


Serve = Callable[..., SshServer]


@pytest.fixture
def serve(keys: Path) -> Iterator[Serve]:
    """Starts in-process servers: `serve(handler, **attributes)`."""
    with contextlib.ExitStack() as stack:

        def start(handler: Callable[[Call], None] = real_shell, **more: object) -> SshServer:
            server = SshServer(
                [paramiko.Ed25519Key.from_private_key_file(str(keys / "host_ed25519"))], handler
            )
            server.authorized = [paramiko.Ed25519Key.from_private_key_file(str(keys / "user"))]
            for name, value in more.items():
                assert hasattr(server, name)
                setattr(server, name, value)
            return stack.enter_context(server)

        yield start


Connect = Callable[..., SshTransport]


@pytest.fixture
def link(keys: Path) -> Iterator[Connect]:
    """Makes transports to a loopback port, closed afterwards: `link(port, **options)`."""
    with contextlib.ExitStack() as stack:

        def make(port: int, **more: object) -> SshTransport:
            transport = SshTransport(options(keys, port, **more))
            stack.callback(transport.close)
            return transport

        yield make


def options(keys: Path, port: int, **more: object) -> SshOptions:
    """Right options for the servers here, unless told otherwise."""
    given: dict[str, object] = {
        "private_key_path": keys / "user",
        "host_key": public(keys / "host_ed25519"),
        "username": USER,
        **more,
    }
    return SshOptions("127.0.0.1", port, **given)  # type: ignore[arg-type]


class OpenSsh:
    """A real sshd on a free loopback port.

    Attributes:
        port: Where it listens.
        bin: First folder of its PATH.
        user: Who runs it: the only one an unprivileged sshd lets in.
    """

    def __init__(self, folder: Path, keys: Path, *more: str) -> None:
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.user = folder.owner()
        self._log = folder / "log"
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        lines = [
            f"ListenAddress 127.0.0.1:{self.port}",
            *(f"HostKey {keys}/host_{kind}" for kind in ("ed25519", "rsa", "ecdsa")),
            f"AuthorizedKeysFile {keys}/user.pub",
            "StrictModes no",
            "UsePAM no",
            "PidFile none",
            "PermitRootLogin yes",
            "MaxStartups 100",
            f"SetEnv HOME={folder} PATH={self.bin}:{os.environ['PATH']}",
            *more,
        ]
        config = folder / "sshd_config"
        config.write_text("\n".join(lines))
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        self._process = subprocess.Popen([SSHD, "-D", "-E", self._log, "-f", config])
        self._await()

    def _await(self) -> None:
        until = time.monotonic() + START_S
        while time.monotonic() < until and self._process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            time.sleep(0.02)
        raise AssertionError(self._log.read_text())

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()


@pytest.fixture(scope="session")
def openssh(keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenSsh]:
    """A real OpenSSH server, whose PATH begins with an empty folder."""
    if not SSHD.exists():
        pytest.skip("openssh-server is not installed")
    server = OpenSsh(tmp_path_factory.mktemp("sshd"), keys)
    yield server
    server.stop()


@pytest.fixture
def script_slack(monkeypatch: pytest.MonkeyPatch) -> None:
    """The near side's deadline is the script's own, so that hangs are told at once."""
    monkeypatch.setattr("gpu_reclaim.transport.ssh.REMOTE_SLACK_S", 0)
