"""Scripts over SSH against a real OpenSSH server: directly, through it, and under sudo."""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path

import pytest

from gpu_reclaim.commands import Script
from gpu_reclaim.errors import (
    AccessRefused,
    HostKeyRefused,
    Incomplete,
    LinkLost,
    TimedOut,
    Unreachable,
)
from transport.conftest import Connect, OpenSsh, options
from transport.ssh_server import HANG_S, Relay, public
from transport.test_ssh import STUB_SUDO

HELLO = Script("hello", {"a": "echo hello", "b": "exit 3"})
MIB = 1 << 20


def test_a_script(openssh: OpenSsh, link: Connect) -> None:
    transport = link(openssh.port, username=openssh.user)
    for _ in range(12):
        result = transport.run(HELLO)
    assert (result.section("a").text, result.section("b").code) == ("hello\n", 3)
    assert (result.exit_code, result.stderr) == (0, "")


@pytest.mark.parametrize("kind", ["ed25519", "rsa", "ecdsa"])
def test_each_type_of_host_key(
    openssh: OpenSsh, link: Connect, keys: Path, kind: str, tmp_path: Path
) -> None:
    pin = public(keys / f"host_{kind}")
    assert link(openssh.port, username=openssh.user, host_key=pin).run(HELLO).exit_code == 0
    known = tmp_path / "known_hosts"
    known.write_text(f"@cert-authority * {pin}\n[127.0.0.1]:{openssh.port} {pin}\n")
    transport = link(openssh.port, username=openssh.user, host_key=None, known_hosts_path=known)
    assert transport.run(HELLO).exit_code == 0


def test_a_wrong_host_key(openssh: OpenSsh, link: Connect, keys: Path) -> None:
    with pytest.raises(HostKeyRefused, match="has changed"):
        link(openssh.port, host_key=public(keys / "other")).run(HELLO)


def test_a_wrong_login(openssh: OpenSsh, link: Connect, keys: Path) -> None:
    with pytest.raises(AccessRefused, match=r"it allows publickey"):
        link(openssh.port, private_key_path=keys / "stranger").run(HELLO)


def test_both_streams_and_the_input_beyond_their_windows(openssh: OpenSsh, link: Connect) -> None:
    write = f"head -c {3 * MIB} /dev/zero | tr '\\0'"
    body = f"{write} e >&2; {write} o\n# " + "x" * 3 * MIB
    result = link(openssh.port, username=openssh.user).run(Script("big", {"a": body}))
    assert result.section("a").text == "o" * 3 * MIB
    assert result.stderr == "e" * 3 * MIB


def test_the_far_sides_own_time_limit(openssh: OpenSsh, link: Connect) -> None:
    transport = link(openssh.port, username=openssh.user)
    with pytest.raises(TimedOut, match=r"did not end within 0\.2 s"):
        transport.run(Script("slow", {"a": "sleep 60"}, timeout_s=0.2))
    assert transport.run(HELLO).exit_code == 0


def test_a_shell_ended_by_a_signal(openssh: OpenSsh, link: Connect) -> None:
    with pytest.raises(Incomplete, match="exit status"):
        link(openssh.port, username=openssh.user).run(Script("suicide", {"a": "kill -KILL $$"}))


def test_a_server_that_is_killed_meanwhile(openssh: OpenSsh, link: Connect) -> None:
    # $PPID of the script's shell is `timeout`, its parent the connection's sshd.
    body = "kill -KILL $(ps -o ppid= -p $PPID)\nsleep 60"
    transport = link(openssh.port, username=openssh.user)
    with pytest.raises(LinkLost):
        transport.run(Script("kill sshd", {"a": body}, timeout_s=20))
    assert transport.run(HELLO).exit_code == 0


@pytest.mark.usefixtures("script_slack")
def test_a_server_that_is_stopped_meanwhile(
    openssh: OpenSsh, link: Connect, tmp_path: Path
) -> None:
    note = tmp_path / "pid"
    body = f"p=$(ps -o ppid= -p $PPID); echo $p >{note}; kill -STOP $p; exec sleep 60"
    transport = link(openssh.port, username=openssh.user)
    try:
        with pytest.raises(TimedOut, match="gave no end within"):
            transport.run(Script("stop sshd", {"a": body}, timeout_s=1))
    finally:
        os.kill(int(note.read_text()), signal.SIGKILL)
    assert transport.run(HELLO).exit_code == 0


def test_something_left_behind(openssh: OpenSsh, link: Connect) -> None:
    """It holds the output open; the script itself has ended."""
    result = link(openssh.port, username=openssh.user).run(Script("x", {"a": "sleep 20 & echo $!"}))
    os.kill(int(result.section("a").text), signal.SIGKILL)


def test_sudo(openssh: OpenSsh, link: Connect) -> None:
    sudo = openssh.bin / "sudo"
    sudo.write_text(STUB_SUDO.format(refusal=""))
    sudo.chmod(0o755)
    assert link(openssh.port, username=openssh.user, sudo=True).run(HELLO).exit_code == 0
    sudo.write_text(STUB_SUDO.format(refusal="echo 'sudo: a password is required' >&2; exit 1"))
    with pytest.raises(AccessRefused, match="sudo refused"):
        link(openssh.port, username=openssh.user, sudo=True).run(HELLO)


def test_through_jump_hosts(openssh: OpenSsh, link: Connect, keys: Path) -> None:
    first = options(keys, openssh.port, username=openssh.user)
    second = options(keys, openssh.port, username=openssh.user, jump=first)
    transport = link(
        openssh.port, username=openssh.user, jump=second, host_key=public(keys / "host_rsa")
    )
    assert transport.name.endswith("through 127.0.0.1")
    assert transport.run(HELLO).section("a").text == "hello\n"
    assert transport.run(HELLO).section("b").code == 3


def test_the_connection_to_the_jump_host_is_closed_too(
    openssh: OpenSsh, link: Connect, keys: Path
) -> None:
    with Relay(openssh.port) as relay:
        jump = options(keys, relay.port, username=openssh.user)
        transport = link(openssh.port, username=openssh.user, jump=jump)
        transport.run(HELLO)
        assert not relay.hung_up.is_set()
        transport.close()
        assert relay.hung_up.wait(HANG_S)


def test_a_wrong_host_key_of_the_jump_host(openssh: OpenSsh, link: Connect, keys: Path) -> None:
    jump = options(keys, openssh.port, username=openssh.user, host_key=public(keys / "other"))
    with pytest.raises(HostKeyRefused) as caught:
        link(openssh.port, username=openssh.user, jump=jump).run(HELLO)
    where = f"{openssh.user}@127.0.0.1:{openssh.port}"
    assert caught.value.message.startswith(f"{where} (jump host for {where}): ")


def test_a_wrong_host_key_behind_the_jump_host(openssh: OpenSsh, link: Connect, keys: Path) -> None:
    jump = options(keys, openssh.port, username=openssh.user)
    with pytest.raises(HostKeyRefused) as caught:
        link(openssh.port, username=openssh.user, jump=jump, host_key=public(keys / "other")).run(
            HELLO
        )
    where = f"{openssh.user}@127.0.0.1:{openssh.port}"
    assert caught.value.message.startswith(f"{where} (through {where}): ")


def test_a_wrong_login_at_the_jump_host(openssh: OpenSsh, link: Connect, keys: Path) -> None:
    jump = options(keys, openssh.port, username=openssh.user, private_key_path=keys / "stranger")
    with pytest.raises(AccessRefused, match="jump host for"):
        link(openssh.port, username=openssh.user, jump=jump).run(HELLO)


def test_a_target_that_the_jump_host_does_not_reach(
    openssh: OpenSsh, link: Connect, keys: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    jump = options(keys, openssh.port, username=openssh.user)
    with pytest.raises(Unreachable, match="the jump host gets no connection to it") as caught:
        link(port, username=openssh.user, jump=jump).run(HELLO)
    assert caught.value.message.startswith(f"{openssh.user}@127.0.0.1:{port} (through ")


def test_a_jump_host_that_forbids_forwarding(
    keys: Path, link: Connect, tmp_path: Path, openssh: OpenSsh
) -> None:
    strict = OpenSsh(tmp_path, keys, "AllowTcpForwarding no")
    try:
        jump = options(keys, strict.port, username=openssh.user)
        with pytest.raises(Unreachable, match="AllowTcpForwarding"):
            link(openssh.port, username=openssh.user, jump=jump).run(HELLO)
    finally:
        strict.stop()


def test_a_jump_host_that_goes_away(
    keys: Path, link: Connect, openssh: OpenSsh, tmp_path: Path
) -> None:
    begun = tmp_path / "begun"
    os.mkfifo(begun)
    with Relay(openssh.port) as relay:
        transport = link(
            openssh.port,
            username=openssh.user,
            jump=options(keys, relay.port, username=openssh.user),
        )
        transport.run(HELLO)
        relay.cut()
        assert transport.run(HELLO).exit_code == 0

        def cut() -> None:
            begun.read_text()  # returns once the script has written
            relay.cut()

        threading.Thread(target=cut, daemon=True).start()
        with pytest.raises(LinkLost):
            transport.run(Script("cut", {"a": f"echo >{begun}; sleep 20"}))
