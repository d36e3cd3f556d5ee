"""Host keys: which are trusted, and what a refusal says."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gpu_reclaim.errors import BadInput, HostKeyRefused
from gpu_reclaim.transport.host_keys import (
    ALGORITHMS,
    HostKey,
    TrustedKeys,
    pinned,
    read_known_hosts,
)
from transport.ssh_server import public


@pytest.fixture
def key(keys: Path) -> str:
    """Type and base64 of a host key."""
    return " ".join(public(keys / "host_ed25519").split()[:2])


@pytest.fixture
def other(keys: Path) -> str:
    """The same of another one."""
    return " ".join(public(keys / "other").split()[:2])


def look_up(folder: Path, text: str, name: str = "node.lab", port: int = 22) -> TrustedKeys:
    file = folder / "known_hosts"
    file.write_text(text)
    return read_known_hosts([file], name, port)


@pytest.mark.parametrize(
    ("line", "name", "port"),
    [
        ("node.lab KEY", "node.lab", 22),
        ("node.lab\tKEY", "node.lab", 22),
        ("  node.lab   KEY comment with words", "node.lab", 22),
        ("Node.LAB KEY", "nODE.lab", 22),
        ("a,node.lab,b KEY", "node.lab", 22),
        ("10.0.0.9 KEY", "10.0.0.9", 22),
        ("*.lab KEY", "node.lab", 22),
        ("*.lab,!x.lab KEY", "node.lab", 22),
        ("10.0.0.? KEY", "10.0.0.9", 22),
        ("* KEY", "node.lab", 22),
        ("[node.lab]:2222 KEY", "node.lab", 2222),
        ("[*.lab]:2222 KEY", "node.lab", 2222),
        ("[fe80::1]:2222 KEY", "fe80::1", 2222),
        ("fe80::1 KEY", "fe80::1", 22),
        ("node.lab KEY", "node.lab", 2222),
    ],
)
def test_a_line_that_means_the_host(
    tmp_path: Path, key: str, line: str, name: str, port: int
) -> None:
    found = look_up(tmp_path, line.replace("KEY", key), name, port)
    assert found.keys == (HostKey.parse(key),)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "# node.lab KEY",
        "#node.lab KEY",
        "other.lab KEY",
        "*.lab,!node.lab KEY",
        "!node.lab,*.lab KEY",
        "!other.lab KEY",
        "node?lab.x KEY",
        "nodexlab KEY",
        "node.la KEY",
        "[node.lab]:2222 KEY",
        "[n]ode.lab KEY",
        "node.lab",
        "node.lab ssh-ed25519",
        "node.lab ssh-ed25519 AAAA",
        "node.lab ssh-ed25519 @@@@",
        "node.lab ssh-dss AAAAB3NzaC1kc3MAAACBAP",
        "node.lab ssh-rsa " + "A" * 40,
        "@cert-authority node.lab KEY",
        "@unheard-of node.lab KEY",
        "@cert-authority",
        "|1|bad",
        "|1|c2FsdA==|aGFzaA== KEY",
        "|2|c2FsdA==|aGFzaA== KEY",
    ],
)
def test_a_line_that_does_not_count_does_not_harm_the_next(
    tmp_path: Path, key: str, other: str, line: str
) -> None:
    without = look_up(tmp_path, line.replace("KEY", other))
    assert (without.keys, without.revoked) == ((), ())
    beside = look_up(tmp_path, f"{line.replace('KEY', other)}\nnode.lab {key}\n")
    assert beside.keys == (HostKey.parse(key),)


@pytest.mark.parametrize(("name", "port"), [("node.lab", 22), ("10.0.0.9", 2222)])
def test_names_hashed_by_ssh_keygen(tmp_path: Path, key: str, name: str, port: int) -> None:
    entry = name if port == 22 else f"[{name}]:{port}"
    file = tmp_path / "known_hosts"
    file.write_text(f"{entry} {key}\n")
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", file], check=True, capture_output=True)
    assert name not in file.read_text()
    assert read_known_hosts([file], name.upper(), port).keys == (HostKey.parse(key),)
    assert read_known_hosts([file], "other.lab", port).keys == ()


def test_an_entry_with_the_port_counts_before_one_without(
    tmp_path: Path, key: str, other: str
) -> None:
    text = f"node.lab {other}\n[node.lab]:2222 {key}\n"
    assert look_up(tmp_path, text, port=2222).keys == (HostKey.parse(key),)


def test_several_files_and_missing_ones(tmp_path: Path, key: str, other: str) -> None:
    (tmp_path / "one").write_text(f"node.lab {key}\n")
    (tmp_path / "two").write_bytes(f"\xff\xfe junk\nnode.lab {other}\n".encode("latin-1"))
    files = [tmp_path / name for name in ("one", "missing", "two")]
    found = read_known_hosts(files, "node.lab", 22)
    assert found.keys == (HostKey.parse(key), HostKey.parse(other))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=str(tmp_path)):
        read_known_hosts([tmp_path], "node.lab", 22)


def test_a_revoked_key_is_refused_even_when_it_is_also_known(tmp_path: Path, key: str) -> None:
    found = look_up(tmp_path, f"@revoked * {key}\nnode.lab {key}\n")
    with pytest.raises(HostKeyRefused, match="@revoked"):
        found.check(HostKey.parse(key), "root@node.lab:22")


def test_a_revoked_key_does_not_touch_another_one(tmp_path: Path, key: str, other: str) -> None:
    found = look_up(tmp_path, f"@revoked * {other}\nnode.lab {key}\n")
    found.check(HostKey.parse(key), "root@node.lab:22")


def test_an_unknown_key_is_refused_with_the_way_to_pin_it(
    tmp_path: Path, keys: Path, key: str
) -> None:
    shown = HostKey.parse(key)
    listed = subprocess.run(
        ["ssh-keygen", "-lf", keys / "host_ed25519.pub"], check=True, capture_output=True, text=True
    ).stdout.split()
    with pytest.raises(HostKeyRefused) as caught:
        look_up(tmp_path, "").check(shown, "root@node.lab:22")
    said = str(caught.value)
    assert listed[1].startswith("SHA256:")
    for part in ("root@node.lab:22", "ssh-ed25519", listed[1], "nothing was sent", key):
        assert part in said
    assert "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub" in said


def test_a_changed_key_is_refused_with_both_fingerprints(
    tmp_path: Path, key: str, other: str
) -> None:
    known = look_up(tmp_path, f"node.lab {key}\n")
    with pytest.raises(HostKeyRefused) as caught:
        known.check(HostKey.parse(other), "root@node.lab:22")
    said = str(caught.value)
    for part in (HostKey.parse(key).fingerprint, HostKey.parse(other).fingerprint, "changed"):
        assert part in said
    assert "nothing was sent" in said


def test_a_key_of_another_type_than_the_known_one_is_refused(
    tmp_path: Path, keys: Path, key: str
) -> None:
    known = look_up(tmp_path, f"node.lab {key}\n")
    with pytest.raises(HostKeyRefused, match="changed"):
        known.check(HostKey.parse(public(keys / "host_rsa")), "root@node.lab:22")


def test_known_types_are_negotiated_first(tmp_path: Path, keys: Path) -> None:
    rsa = " ".join(public(keys / "host_rsa").split()[:2])
    order = look_up(tmp_path, f"node.lab {rsa}\n").algorithms()
    assert order[:2] == ALGORITHMS["ssh-rsa"]
    assert sorted(order) == sorted(name for names in ALGORITHMS.values() for name in names)


@pytest.mark.parametrize("kind", ["ed25519", "rsa", "ecdsa"])
def test_only_the_pinned_type_is_negotiated(keys: Path, kind: str) -> None:
    trusted = pinned(public(keys / f"host_{kind}"))
    assert trusted.algorithms() == ALGORITHMS[trusted.keys[0].kind]


def test_a_comment_after_the_pinned_key_does_not_matter(key: str) -> None:
    assert pinned(f"{key} root@node with words").keys == pinned(key).keys
    assert pinned(key).keys[0].line == key


@pytest.mark.parametrize(
    "text", ["", "ssh-ed25519", "AAAA", "ssh-dss AAAA", "ssh-ed25519 AAAA", "node KEY", "KEYCUT"]
)
def test_what_is_no_public_key_cannot_be_pinned(key: str, text: str) -> None:
    with pytest.raises(ValueError, match="its"):
        pinned(text.replace("KEYCUT", key[:-4]).replace("KEY", key))


def test_a_key_whose_type_and_content_differ_cannot_be_pinned(keys: Path, key: str) -> None:
    rsa = public(keys / "host_rsa").split()[1]
    with pytest.raises(ValueError, match="its"):
        pinned(f"ssh-ed25519 {rsa}")
