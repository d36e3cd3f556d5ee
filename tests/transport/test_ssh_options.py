"""SSH options: what is refused before anything is opened, and that no secret shows."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pytest

from gpu_reclaim.errors import BadInput
from gpu_reclaim.transport.ssh import SshOptions, SshTransport
from gpu_reclaim.transport.ssh_options import prepare
from transport.ssh_server import public


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here opens a connection."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.parametrize(
    "given",
    [
        {"address": "root:secret-word@node"},
        {"address": "ssh://root:secret-word@node"},
        {"private_key_path": "-----BEGIN OPENSSH PRIVATE KEY-----\nsecret-word\n"},
        {"known_hosts_path": "-----BEGIN OPENSSH PRIVATE KEY----- secret-word"},
        {"username": "-----BEGIN OPENSSH PRIVATE KEY-----\nsecret-word"},
    ],
)
def test_secret_in_the_wrong_field_is_refused_and_never_repeated(given: dict[str, str]) -> None:
    with pytest.raises(BadInput) as caught:
        SshOptions(**{"address": "node", "agent": True, **given})  # type: ignore[arg-type]
    assert "secret-word" not in str(caught.value)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"address": ""}, "address"),
        ({"address": "no de"}, "address"),
        ({"address": "node\n"}, "address"),
        ({"username": ""}, "username"),
        ({"port": 0}, "port 0"),
        ({"port": 65536}, "port 65536"),
        ({"connect_timeout_s": 0}, "connect_timeout_s"),
        ({"connect_timeout_s": float("nan")}, "connect_timeout_s"),
        ({"connect_timeout_s": float("inf")}, "connect_timeout_s"),
        ({"password": None}, "nothing to log in with"),
        ({"password": "", "private_key": ""}, "nothing to log in with"),
        ({"host_key": "ssh-ed25519 AAAA"}, "host_key"),
        ({"host_key": "node.lab ssh-ed25519"}, "ssh_host_ed25519_key.pub"),
    ],
)
def test_values_that_make_no_sense(given: dict[str, object], words: str) -> None:
    right: dict[str, object] = {"address": "node.lab", "password": "secret-word"}
    with pytest.raises(BadInput, match=words) as caught:
        SshOptions(**{**right, **given})  # type: ignore[arg-type]
    assert str(given.get("address", "node.lab")).strip() in str(caught.value)
    assert caught.value.remedy
    assert "secret-word" not in str(caught.value)


def recast(source: Path, path: Path, passphrase: str, form: str) -> Path:
    """A copy of a key in another format and under another passphrase."""
    path.write_text(source.read_text())
    path.chmod(0o600)
    change = ["ssh-keygen", "-q", "-p", "-P", "", "-N", passphrase, "-m", form, "-f", str(path)]
    subprocess.run(change, check=True, capture_output=True)
    return path


@pytest.mark.parametrize("kind", ["ed25519", "rsa", "ecdsa"])
@pytest.mark.parametrize("form", ["RFC4716", "PEM", "PKCS8"])
@pytest.mark.parametrize("passphrase", ["", "open sesame"])
def test_private_keys_in_all_usual_formats(
    tmp_path: Path, keys: Path, kind: str, form: str, passphrase: str
) -> None:
    path = recast(keys / f"host_{kind}", tmp_path / "key", passphrase, form)
    options = SshOptions("node.lab", private_key_path=path, passphrase="open sesame")
    (opened,) = prepare(options).keys
    assert f"{opened.get_name()} {opened.get_base64()}" in public(keys / f"host_{kind}")


def test_a_key_given_as_text_with_foreign_line_ends(keys: Path) -> None:
    text = "\n\n" + (keys / "user").read_text().replace("\n", "\r\n").rstrip()
    (opened,) = prepare(SshOptions("node.lab", private_key=text)).keys
    assert opened.get_base64() in public(keys / "user")


def test_a_key_as_pkcs8_from_openssl(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    made = subprocess.run(
        ["openssl", "genpkey", "-algorithm", "ed25519", "-out", path],
        check=False,
        capture_output=True,
    )
    if made.returncode:
        pytest.skip("openssl cannot make Ed25519 keys")
    (opened,) = prepare(SshOptions("node.lab", private_key_path=path)).keys
    assert opened.get_name() == "ssh-ed25519"


@pytest.mark.parametrize("kind", ["ed25519", "rsa"])
@pytest.mark.parametrize(
    ("passphrase", "words"), [(None, "is encrypted"), ("wrong-word", "passphrase is wrong")]
)
def test_an_encrypted_key_and_no_right_passphrase(
    tmp_path: Path, keys: Path, kind: str, passphrase: str | None, words: str
) -> None:
    path = recast(keys / f"host_{kind}", tmp_path / "key", "open sesame", "RFC4716")
    options = SshOptions("node.lab", private_key_path=path, passphrase=passphrase)
    with pytest.raises(BadInput, match=words) as caught:
        SshTransport(options)
    assert "root@node.lab:22" in str(caught.value)
    assert str(path) in str(caught.value)
    assert "wrong-word" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "nonsense",
        "ssh-ed25519 AAAA this is the public half",
        "-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n-----END OPENSSH PRIVATE KEY-----",
        "-----BEGIN OPENSSH PRIVATE KEY-----\n@@@@\n-----END OPENSSH PRIVATE KEY-----",
        "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----",
        "-----BEGIN RSA PRIVATE KEY-----",
        "PuTTY-User-Key-File-3: ssh-ed25519",
    ],
)
def test_what_is_no_private_key(tmp_path: Path, text: str) -> None:
    path = tmp_path / "key"
    path.write_text(text)
    for options in (
        SshOptions("node.lab", private_key=text),
        SshOptions("node.lab", private_key_path=path),
    ):
        with pytest.raises(BadInput, match="no private key that can be used") as caught:
            SshTransport(options)
        assert "root@node.lab:22" in str(caught.value)
        assert text not in str(caught.value)


def test_a_key_file_that_is_not_there(tmp_path: Path) -> None:
    options = SshOptions("node.lab", private_key_path=tmp_path / "missing")
    with pytest.raises(BadInput, match=r"missing cannot be read: No such file"):
        SshTransport(options)


def test_the_jump_host_is_checked_too(tmp_path: Path) -> None:
    jump = SshOptions("jump.lab", private_key_path=tmp_path / "missing")
    with pytest.raises(BadInput, match=r"root@jump\.lab:22"):
        SshTransport(SshOptions("node.lab", password="secret-word", jump=jump))


def test_a_known_hosts_file_that_cannot_be_read(tmp_path: Path) -> None:
    options = SshOptions("node.lab", password="secret-word", known_hosts_path=tmp_path)
    with pytest.raises(BadInput, match="known_hosts"):
        SshTransport(options)


def test_an_agent_that_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    with pytest.raises(BadInput, match="SSH_AUTH_SOCK"):
        SshTransport(SshOptions("node.lab", agent=True))


def test_default_known_hosts_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, keys: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "known_hosts").write_text(f"node.lab {public(keys / 'other')}\n")
    trusted = prepare(SshOptions("node.lab", password="secret-word")).trusted
    assert trusted.keys[0].line in public(keys / "other")
    assert "/etc/ssh/ssh_known_hosts" in trusted.source


def test_a_pinned_key_counts_alone(tmp_path: Path, keys: Path) -> None:
    known = tmp_path / "known_hosts"
    known.write_text(f"node.lab {public(keys / 'other')}\n")
    options = SshOptions(
        "node.lab",
        password="secret-word",
        known_hosts_path=known,
        host_key=public(keys / "host_ed25519"),
    )
    trusted = prepare(options).trusted
    assert trusted.pinned
    assert [key.line for key in trusted.keys] == [
        public(keys / "host_ed25519").removesuffix(" a comment")
    ]


def test_no_secret_in_any_repr(keys: Path) -> None:
    text = (keys / "user").read_text()
    jump = SshOptions("jump.lab", private_key=text, password="word-one", passphrase="word-two")
    options = SshOptions("node.lab", password="word-three", passphrase="word-four", jump=jump)
    shown = repr(options) + repr(prepare(options)) + repr(SshTransport(options)) + str(options)
    assert "jump.lab" in shown
    for secret in (text.splitlines()[1], "word-one", "word-two", "word-three", "word-four"):
        assert secret not in shown


@pytest.mark.parametrize(
    ("options", "name", "where"),
    [
        (SshOptions("10.0.0.9", password="x"), "ssh root@10.0.0.9", "root@10.0.0.9:22"),
        (
            SshOptions("fe80::1", port=2222, username="deploy", password="x"),
            "ssh deploy@fe80::1:2222",
            "deploy@[fe80::1]:2222",
        ),
        (
            SshOptions("10.0.0.9", password="x", jump=SshOptions("jump.lab", password="x")),
            "ssh root@10.0.0.9 through jump.lab",
            "root@10.0.0.9:22",
        ),
    ],
)
def test_names(options: SshOptions, name: str, where: str) -> None:
    assert (SshTransport(options).name, options.where) == (name, where)
