"""What a real OpenSSH server does on bad days: limits, odd login shells, other host keys."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpu_reclaim.commands import Script
from gpu_reclaim.errors import AccessRefused, HostKeyRefused, Incomplete, Unreachable
from gpu_reclaim.transport.host_keys import HostKey
from lab.waiting import wait_until
from transport.conftest import Connect, OpenSsh
from transport.ssh_server import public

HELLO = Script("hello", {"a": "echo hello", "b": "exit 3"})


class Sshd(OpenSsh):
    """A real sshd of the test's own, whose configuration can be changed while it runs."""

    def __init__(self, folder: Path, keys: Path, *more: str) -> None:
        self._folder = folder
        super().__init__(folder, keys, *more)

    def change(self, old: str, new: str) -> None:
        """Change its configuration and let it read that again; open connections stay."""
        config = self._folder / "sshd_config"
        config.write_text(config.read_text().replace(old, new))
        starts = self.log().count("Server listening")
        self._process.send_signal(signal.SIGHUP)
        wait_until("sshd listens again", lambda: self.log().count("Server listening") > starts)

    def log(self) -> str:
        return self._log.read_text()

    @property
    def logins(self) -> int:
        return self.log().count("Accepted publickey")

    @property
    def where(self) -> str:
        return f"{self.user}@127.0.0.1:{self.port}"


Start = Callable[..., Sshd]


@pytest.fixture
def sshd(keys: Path, tmp_path: Path, openssh: OpenSsh) -> Iterator[Start]:
    """Starts a server: `sshd("MaxSessions 1")`. `openssh` skips where there is none."""
    started: list[Sshd] = []

    def start(*lines: str) -> Sshd:
        folder = tmp_path / f"sshd-{len(started)}"
        folder.mkdir()
        started.append(Sshd(folder, keys, *lines))
        return started[-1]

    yield start
    for server in started:
        server.stop()


# Limits.


def test_one_session_at_a_time_is_enough(sshd: Start, link: Connect) -> None:
    """sshd counts a session out a moment after its end, when we ask for the next one already."""
    server = sshd("MaxSessions 1")
    transport = link(server.port, username=server.user)
    for number in range(30):
        body = f"echo {number}"
        assert transport.run(Script("x", {"a": body})).section("a").text == f"{number}\n"
    assert server.logins == 1


def test_no_session_at_all(sshd: Start, link: Connect) -> None:
    server = sshd("MaxSessions 0")
    with pytest.raises(Unreachable) as caught:
        link(server.port, username=server.user).run(HELLO)
    assert caught.value.message == (
        f"{server.where}: logged in, but it opens no session: Connect failed"
    )
    assert caught.value.remedy == (
        "see sshd's log on the host (MaxSessions, ForceCommand, a full process table)"
    )


def test_too_many_who_have_not_logged_in(sshd: Start, link: Connect) -> None:
    server = sshd()
    server.change("MaxStartups 100", "MaxStartups 1:100:1")
    with socket.create_connection(("127.0.0.1", server.port)) as other:
        assert other.recv(4) == b"SSH-"
        with pytest.raises(Unreachable) as caught:
            link(server.port, username=server.user).run(HELLO)
    assert caught.value.message == (
        f"{server.where}: its sshd takes no more connections for now: it said "
        "'Exceeded MaxStartups'"
    )
    assert caught.value.remedy.startswith("try again; if it stays so, see who logs in there")
    assert "MaxStartups and PerSourcePenalties in sshd_config" in caught.value.remedy
    assert server.logins == 0


# Host keys.


@pytest.mark.parametrize("how", ["pinned", "known_hosts"])
def test_another_host_key_than_before(
    sshd: Start, link: Connect, keys: Path, tmp_path: Path, how: str
) -> None:
    server = sshd()
    stale = tmp_path / "known_hosts"
    stale.write_text(f"[127.0.0.1]:{server.port} {public(keys / 'host_ed25519')}\n")
    file = {"host_key": None, "known_hosts_path": stale} if how == "known_hosts" else {}
    transport = link(server.port, username=server.user, **file)
    assert transport.run(HELLO).exit_code == 0
    transport.close()
    for name in ("host_rsa", "host_ecdsa"):
        server.change(f"HostKey {keys}/{name}\n", "")
    server.change("host_ed25519", "other")
    with pytest.raises(HostKeyRefused) as caught:
        transport.run(HELLO)
    source = str(stale) if how == "known_hosts" else "host_key"
    old, new = (HostKey.parse(public(keys / name)) for name in ("host_ed25519", "other"))
    assert caught.value.message == (
        f"{server.where}: its host key has changed: {source} says {old}, it shows {new}; "
        "nothing was sent to it"
    )
    assert caught.value.remedy == (
        "somebody may sit in between. If the host was set up anew: run `ssh-keygen -lf "
        "/etc/ssh/ssh_host_ed25519_key.pub` on the host's console; if the fingerprint is the "
        f"same, replace the old key in {source} by: {new.line}"
    )
    assert server.logins == 1


# Login shells. ForceCommand gets the command line as a login shell would.

STUB = """#!{python}
import os, shlex, sys
# Like fish, it is no POSIX shell: it knows words and quotes, and stumbles over all the rest.
words = shlex.split(sys.argv[2], posix=True)
if sys.argv[1] != "-c" or set("$;&|<>(){{}}=`") & set(sys.argv[2]):
    sys.exit("odd-shell: what is that?")
os.execvp(words[0], words)
"""


@pytest.fixture
def odd_shell(tmp_path: Path) -> str:
    path = tmp_path / "odd-shell"
    path.write_text(STUB.format(python=shutil.which("python3")))
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("sudo", [False, True])
@pytest.mark.parametrize("shell", ["fish", "tcsh", "odd-shell"])
def test_login_shell_that_is_no_posix_shell(
    sshd: Start, link: Connect, odd_shell: str, shell: str, sudo: bool
) -> None:
    program = odd_shell if shell == "odd-shell" else shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    server = sshd(f'ForceCommand {program} -c "$SSH_ORIGINAL_COMMAND"')
    stub = server.bin / "sudo"
    stub.write_text('#!/bin/sh\n[ "$1 $2" = "-n --" ] || exit 99\nshift 2\nexec "$@"\n')
    stub.chmod(0o755)
    awkward = Script("x", {"a": 'v=\'$(id) `id` "\'; for i in 1 2; do echo "$i $v"; done'})
    result = link(server.port, username=server.user, sudo=sudo).run(awkward)
    assert result.section("a").text == '1 $(id) `id` "\n2 $(id) `id` "\n'
    assert (result.exit_code, result.stderr) == (0, "")


NOISE = "echo WELCOME; echo @gr- end; echo careful >&2"


def test_banner_and_a_start_up_file_that_prints(sshd: Start, link: Connect, tmp_path: Path) -> None:
    banner = tmp_path / "banner"
    banner.write_text("Authorised use only\n" * 50)
    command = f"ForceCommand sh -c '{NOISE}; exec sh -c \"$SSH_ORIGINAL_COMMAND\"'"
    server = sshd(f"Banner {banner}", command)
    result = link(server.port, username=server.user).run(HELLO)
    assert (result.section("a").text, result.section("b").code) == ("hello\n", 3)
    assert (set(result.sections), result.stderr) == ({"a", "b"}, "careful\n")


@pytest.mark.parametrize("program", ["/usr/sbin/nologin", "/bin/false", "/bin/true", "echo no"])
def test_no_shell_at_all(sshd: Start, link: Connect, tmp_path: Path, program: str) -> None:
    server = sshd(f"ForceCommand {program}")
    touched = tmp_path / "touched"
    kind = AccessRefused if "nologin" in program else Incomplete
    with pytest.raises(kind) as caught:
        link(server.port, username=server.user).run(Script("act", {"a": f"echo >{touched}"}))
    where, code = f"ssh {server.where}", 1 if program == "/bin/false" else 0
    user = server.user
    messages = {
        AccessRefused: f"{where}: {user} has no login shell there (nologin); nothing was run",
        Incomplete: f"{where}: act shows no sign of having begun (exit status {code}), so nobody "
        "knows what it did",
    }
    remedies = {
        AccessRefused: f"log in as somebody else and set sudo, or give {user} a shell: "
        f"`chsh -s /bin/sh {user}` on the host",
        Incomplete: "look at what takes the place of a shell there: the login shell of "
        f"{user}, ForceCommand in sshd_config, command= in authorized_keys",
    }
    assert (caught.value.message, caught.value.remedy) == (messages[kind], remedies[kind])
    assert not touched.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
@pytest.mark.skipif(not Path("/usr/bin/sudo").exists(), reason="sudo is not installed")
def test_real_sudo_that_asks_for_a_password(sshd: Start, link: Connect) -> None:
    become = "setpriv --reuid=65534 --regid=65534 --clear-groups"
    server = sshd(f'ForceCommand {become} sh -c "$SSH_ORIGINAL_COMMAND"')
    with pytest.raises(AccessRefused) as caught:
        link(server.port, username=server.user, sudo=True).run(HELLO)
    assert caught.value.message == (
        f"ssh {server.where}: sudo refused to start hello as root; nothing was run"
    )
    user = server.user
    assert caught.value.remedy == (
        "on the host, put this line into /etc/sudoers.d/gpu-reclaim by `visudo -f` (it makes "
        f"{user} root in effect): {user} ALL=(root) NOPASSWD: /usr/bin/timeout -k * * sh -s"
    )
    assert "sudo: a password is required" in str(caught.value)


# Output that is cut on the way.


@pytest.mark.parametrize(
    ("kept", "words"),
    [
        ("0", "shows no sign of having begun (exit status 0)"),
        ("60", "did not finish (exit status 0)"),
        ("-2", "did not finish (exit status 0)"),
    ],
)
def test_output_that_is_cut(sshd: Start, link: Connect, kept: str, words: str) -> None:
    server = sshd(f'ForceCommand sh -c "$SSH_ORIGINAL_COMMAND" | head -c {kept}')
    with pytest.raises(Incomplete) as caught:
        link(server.port, username=server.user).run(HELLO)
    assert caught.value.message == (
        f"ssh {server.where}: hello {words}, so nobody knows what it did"
    )
    assert caught.value.result is not None
    assert caught.value.result.sections == {}
