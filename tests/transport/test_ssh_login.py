"""Ways in, and ways not in: TCP, greeting, host key, login."""

from __future__ import annotations

import logging
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import paramiko
import pytest

from gpu_reclaim.commands import Script
from gpu_reclaim.errors import AccessRefused, HostKeyRefused, Unreachable
from transport.conftest import Connect, Serve
from transport.ssh_server import PASSWORD, listener, promptly, public

HELLO = Script("hello", {"a": "echo hello"})


def load(path: Path) -> paramiko.PKey:
    kind = paramiko.RSAKey if "rsa" in path.name else paramiko.Ed25519Key
    return kind.from_private_key_file(str(path))


def test_login_by_key_file(serve: Serve, link: Connect) -> None:
    server = serve()
    assert link(server.port).run(HELLO).section("a").text == "hello\n"
    assert set(server.logins) == {"publickey"}


def test_login_by_key_text(serve: Serve, link: Connect, keys: Path) -> None:
    text = (keys / "user").read_text()
    assert link(serve().port, private_key=text, private_key_path=None).run(HELLO).exit_code == 0


def test_login_by_password_tries_nothing_else(serve: Serve, link: Connect) -> None:
    server = serve()
    link(server.port, private_key_path=None, password=PASSWORD).run(HELLO)
    assert server.logins == ["password"]


def test_login_by_rsa_key(serve: Serve, link: Connect, keys: Path) -> None:
    server = serve(authorized=[load(keys / "host_rsa")])
    assert link(server.port, private_key_path=keys / "host_rsa").run(HELLO).exit_code == 0


def test_a_refused_key_is_followed_by_the_password(serve: Serve, link: Connect, keys: Path) -> None:
    server = serve()
    link(server.port, private_key_path=keys / "stranger", password=PASSWORD).run(HELLO)
    assert server.logins[-1] == "password"


def test_a_host_that_wants_key_and_password(serve: Serve, link: Connect) -> None:
    server = serve(needs_all=True)
    assert link(server.port, password=PASSWORD).run(HELLO).exit_code == 0
    assert server.logins[-1] == "password"


def test_a_host_that_wants_more_than_is_given(serve: Serve, link: Connect) -> None:
    with pytest.raises(AccessRefused, match="it allows password"):
        link(serve(needs_all=True).port).run(HELLO)


def test_a_refused_login_names_what_was_tried_and_what_is_allowed(
    serve: Serve, link: Connect, keys: Path
) -> None:
    server = serve()
    with pytest.raises(AccessRefused) as caught:
        link(server.port, private_key_path=keys / "stranger", password="wrong-word").run(HELLO)
    said = str(caught.value)
    fingerprint = load(keys / "stranger").fingerprint
    for part in (
        f"root@127.0.0.1:{server.port}",
        fingerprint,
        "password",
        "it allows publickey, password",
        "authorized_keys",
    ):
        assert part in said
    assert "wrong-word" not in said
    assert server.calls == []


def test_no_password_is_sent_where_none_is_allowed(serve: Serve, link: Connect, keys: Path) -> None:
    server = serve(password=None)
    with pytest.raises(AccessRefused, match="it allows publickey"):
        link(server.port, private_key_path=keys / "stranger", password="wrong-word").run(HELLO)


def test_a_login_that_is_never_answered(serve: Serve, link: Connect) -> None:
    with pytest.raises(Unreachable, match="no answer to the login") as caught:
        promptly(lambda: link(serve(silent_auth=True).port, connect_timeout_s=0.3).run(HELLO))
    assert not isinstance(caught.value, AccessRefused)


def test_a_connection_that_ends_during_the_login(serve: Serve, link: Connect) -> None:
    with pytest.raises(Unreachable, match="ended the connection during the login") as caught:
        link(serve(drops_auth=True).port).run(HELLO)
    assert not isinstance(caught.value, AccessRefused)


@pytest.fixture
def agent(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, keys: Path
) -> Iterator[None]:
    """A real ssh-agent that holds `stranger` and `user`."""
    path = tmp_path_factory.mktemp("agent") / "sock"
    started = subprocess.run(
        ["ssh-agent", "-s", "-a", path], check=True, capture_output=True, text=True
    ).stdout
    pid = started.split("SSH_AGENT_PID=")[1].split(";")[0]
    monkeypatch.setenv("SSH_AUTH_SOCK", str(path))
    monkeypatch.setenv("SSH_AGENT_PID", pid)
    subprocess.run(
        ["ssh-add", "-q", keys / "stranger", keys / "user"], check=True, capture_output=True
    )
    yield
    subprocess.run(["ssh-agent", "-k"], check=True, capture_output=True)


@pytest.mark.usefixtures("agent")
def test_login_by_agent(serve: Serve, link: Connect) -> None:
    assert link(serve().port, private_key_path=None, agent=True).run(HELLO).exit_code == 0


@pytest.mark.usefixtures("agent")
def test_the_agent_is_not_used_unless_asked_for(serve: Serve, link: Connect, keys: Path) -> None:
    with pytest.raises(AccessRefused) as caught:
        link(serve().port, private_key_path=keys / "stranger").run(HELLO)
    assert "agent" not in caught.value.message


@pytest.mark.usefixtures("agent")
def test_an_empty_agent(serve: Serve, link: Connect) -> None:
    subprocess.run(["ssh-add", "-q", "-D"], check=True, capture_output=True)
    with pytest.raises(AccessRefused, match="holds no keys"):
        link(serve().port, private_key_path=None, agent=True).run(HELLO)


def test_a_known_host(serve: Serve, link: Connect, keys: Path, tmp_path: Path) -> None:
    server = serve()
    known = tmp_path / "known_hosts"
    known.write_text(f"[127.0.0.1]:{server.port} {public(keys / 'host_ed25519')}\n")
    assert link(server.port, host_key=None, known_hosts_path=known).run(HELLO).exit_code == 0


def test_the_known_key_is_asked_for_where_there_are_several(
    serve: Serve, link: Connect, keys: Path, tmp_path: Path
) -> None:
    both = [load(keys / "host_ed25519"), load(keys / "host_rsa")]
    server = serve(host_keys=both)
    known = tmp_path / "known_hosts"
    known.write_text(f"[127.0.0.1]:{server.port} {public(keys / 'host_rsa')}\n")
    assert link(server.port, host_key=None, known_hosts_path=known).run(HELLO).exit_code == 0
    assert link(server.port, host_key=public(keys / "host_rsa")).run(HELLO).exit_code == 0


@pytest.mark.parametrize("pin", ["other", None])
def test_another_host_key_ends_it_before_any_login(
    serve: Serve, link: Connect, keys: Path, tmp_path: Path, pin: str | None
) -> None:
    server = serve()
    key = public(keys / pin) if pin else None
    with pytest.raises(HostKeyRefused, match=f"root@127.0.0.1:{server.port}") as caught:
        link(server.port, host_key=key, known_hosts_path=tmp_path / "none").run(HELLO)
    assert public(keys / "host_ed25519").removesuffix(" a comment") in str(caught.value)
    assert server.logins == []


def test_a_pinned_key_of_a_type_the_host_does_not_have(
    serve: Serve, link: Connect, keys: Path
) -> None:
    server = serve()
    with pytest.raises(HostKeyRefused, match="no host key of the type"):
        link(server.port, host_key=public(keys / "host_rsa")).run(HELLO)
    assert server.logins == []


def test_a_refused_port(link: Connect) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(Unreachable, match=f"root@127.0.0.1:{port}: it refuses the connection"):
        link(port).run(HELLO)


def test_a_name_that_does_not_resolve(link: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(Unreachable, match="cannot be resolved"):
        link(22).run(HELLO)


def test_no_route(link: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    # The broadcast address: the kernel refuses a TCP connection to it at once.
    there = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("255.255.255.255", 22))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: there)
    with pytest.raises(Unreachable, match="no connection: "):
        link(22).run(HELLO)


def test_a_host_that_does_not_answer(link: Connect) -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        port = full.getsockname()[1]
        with (
            socket.create_connection(("127.0.0.1", port)),  # its queue of one is now full
            pytest.raises(Unreachable, match=r"no answer within 0\.2 s"),
        ):
            promptly(lambda: link(port, connect_timeout_s=0.2).run(HELLO))


def test_the_second_address_is_tried(
    serve: Serve, link: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    addresses = ["255.255.255.255", "127.0.0.1"]
    infos = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, server.port)) for a in addresses]
    transport = link(server.port)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: infos)
    assert transport.run(HELLO).exit_code == 0


def test_a_port_that_never_greets(link: Connect) -> None:
    def listen(client: socket.socket) -> None:
        while client.recv(4096):
            pass

    with listener(listen) as port, pytest.raises(Unreachable, match=r"no SSH greeting within 0\.3"):
        promptly(lambda: link(port, connect_timeout_s=0.3).run(HELLO))


def test_a_port_that_speaks_something_else(link: Connect) -> None:
    def http(client: socket.socket) -> None:
        client.recv(4096)
        client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with listener(http) as port, pytest.raises(Unreachable, match="not an SSH server"):
        link(port).run(HELLO)


def test_a_port_that_closes_at_once(link: Connect) -> None:
    with (
        listener(lambda client: None) as port,
        pytest.raises(Unreachable, match="before a word was said"),
    ):
        link(port).run(HELLO)


def test_a_greeting_without_key_exchange(link: Connect) -> None:
    def greet(client: socket.socket) -> None:
        client.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
        while client.recv(4096):
            pass

    with listener(greet) as port, pytest.raises(Unreachable, match=r"failed: no end within 0\.3 s"):
        promptly(lambda: link(port, connect_timeout_s=0.3).run(HELLO))


def test_a_connection_that_ends_during_the_key_exchange(link: Connect) -> None:
    def greet(client: socket.socket) -> None:
        client.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
        client.recv(4096)

    with listener(greet) as port, pytest.raises(Unreachable, match="key exchange failed: "):
        link(port).run(HELLO)


def test_no_secret_is_logged(
    serve: Serve, link: Connect, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.DEBUG, "gpu_reclaim.transport.ssh_link.paramiko")
    text = (keys / "stranger").read_text()
    link(
        serve().port, private_key=text, private_key_path=None, password=PASSWORD, passphrase="word"
    ).run(HELLO)
    assert "userauth is OK" in caplog.text  # the log is on
    assert PASSWORD not in caplog.text
    assert text.splitlines()[1] not in caplog.text


def test_paramikos_own_loggers_are_left_alone(serve: Serve, link: Connect) -> None:
    before = {
        name: (logging.getLogger(name).level, list(logging.getLogger(name).handlers))
        for name in ("", "paramiko", "paramiko.transport")
    }
    link(serve().port).run(HELLO)
    for name, state in before.items():
        logger = logging.getLogger(name)
        assert (logger.level, logger.handlers) == state


def test_paramikos_words_about_a_failure_are_left_to_the_error(
    link: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    with listener(lambda client: None) as port, pytest.raises(Unreachable):
        link(port).run(HELLO)
    assert caplog.records == []
