"""Which host keys are trusted, and what to say when another one is shown.

paramiko's own known_hosts loader is not used: one `@revoked` or `@cert-authority` line makes it
raise, and it never matches a wildcard (read in 5.1.0). The rules here are those of sshd(8),
"SSH_KNOWN_HOSTS FILE FORMAT". Certificates are not understood, so `@cert-authority` lines are
passed over; lines that make no sense are passed over too, as ssh does.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import paramiko

from gpu_reclaim.errors import BadInput, HostKeyRefused

ALGORITHMS = {
    "ssh-ed25519": ("ssh-ed25519",),
    "ecdsa-sha2-nistp256": ("ecdsa-sha2-nistp256",),
    "ecdsa-sha2-nistp384": ("ecdsa-sha2-nistp384",),
    "ecdsa-sha2-nistp521": ("ecdsa-sha2-nistp521",),
    "ssh-rsa": ("rsa-sha2-512", "rsa-sha2-256"),
}
"""Key types we can check, in order of preference, and how each signs (RFC 8332 for RSA)."""

DEFAULT_FILES = (Path("~/.ssh/known_hosts"), Path("/etc/ssh/ssh_known_hosts"))
"""What ssh reads (ssh_config(5): UserKnownHostsFile, GlobalKnownHostsFile)."""

SSH_PORT = 22
"""The port that known_hosts leaves out of an entry's name (sshd(8))."""


@dataclass(frozen=True)
class HostKey:
    """A public host key.

    Attributes:
        kind: Its type, for example `ssh-ed25519`.
        blob: The key in SSH wire format.
    """

    kind: str
    blob: bytes

    @classmethod
    def parse(cls, text: str) -> HostKey:
        """A key as in a `.pub` file: type, base64, and perhaps a comment.

        Raises:
            ValueError: It is no such line, or a type that cannot be checked here.
        """
        kind, data, *_ = [*text.split(), "", ""]
        if kind not in ALGORITHMS:
            raise ValueError(f"its type is none of {', '.join(ALGORITHMS)}")
        try:
            blob = base64.b64decode(data, validate=True)
            whole = paramiko.PKey.from_type_string(kind, blob).asbytes() == blob
        except (ValueError, TypeError, IndexError, paramiko.SSHException) as error:
            raise ValueError("its base64 part is damaged") from error
        if not whole:
            raise ValueError("its base64 part is cut short or of another type")
        return cls(kind, blob)

    @property
    def fingerprint(self) -> str:
        """As `ssh-keygen -lf` prints it."""
        digest = base64.b64encode(hashlib.sha256(self.blob).digest())
        return f"SHA256:{digest.decode().rstrip('=')}"

    @property
    def line(self) -> str:
        """Type and base64: what a `.pub` file holds, and what `host_key` takes."""
        return f"{self.kind} {base64.b64encode(self.blob).decode()}"

    def __str__(self) -> str:
        return f"{self.kind} {self.fingerprint}"


@dataclass(frozen=True)
class TrustedKeys:
    """The keys one host may show.

    Attributes:
        source: Where they come from, for people.
        keys: Any of these is accepted.
        revoked: None of these is, even when it is also among `keys`.
        pinned: Only the algorithms of `keys` are negotiated.
    """

    source: str
    keys: tuple[HostKey, ...]
    revoked: tuple[HostKey, ...] = ()
    pinned: bool = False

    def algorithms(self) -> tuple[str, ...]:
        """Host key algorithms to negotiate: those of known keys first."""
        known = [kind for kind in ALGORITHMS if any(key.kind == kind for key in self.keys)]
        rest = [] if self.pinned else [kind for kind in ALGORITHMS if kind not in known]
        return tuple(name for kind in (*known, *rest) for name in ALGORITHMS[kind])

    def check(self, shown: HostKey, where: str) -> None:
        """Accept the key a host has shown, or raise.

        Args:
            shown: Its key; that it holds the private half is already proven.
            where: The host, for people.

        Raises:
            HostKeyRefused: It is unknown, revoked, or another than the known one.
        """
        if shown in self.revoked:
            raise HostKeyRefused(
                f"{where}: its host key {shown} is marked @revoked in {self.source}; "
                "nothing was sent to it",
                remedy="the key may be in wrong hands: give the host a new one "
                "(`ssh-keygen -A` after removing the old), and pin that",
            )
        if shown in self.keys:
            return
        raise _changed(self, shown, where) if self.keys else _unknown(self, shown, where)

    def missing(self, where: str) -> HostKeyRefused:
        """The error for a host that has no key of the pinned type at all."""
        return HostKeyRefused(
            f"{where}: it has no host key of the type in {self.source} "
            f"({', '.join(map(str, self.keys))}); nothing was sent to it",
            remedy="check that this is the right machine; if its keys were replaced on purpose, "
            "pin a new one: `cat /etc/ssh/ssh_host_*_key.pub` on the host shows them",
        )


def _unknown(trusted: TrustedKeys, shown: HostKey, where: str) -> HostKeyRefused:
    return HostKeyRefused(
        f"{where}: its host key is not known (looked in {trusted.source}): {shown}; "
        "nothing was sent to it",
        remedy=f"{_compare(shown)} if the fingerprint is the same, put this line into the "
        f"block's host_key: {shown.line}",
    )


def _changed(trusted: TrustedKeys, shown: HostKey, where: str) -> HostKeyRefused:
    known = ", ".join(map(str, trusted.keys))
    return HostKeyRefused(
        f"{where}: its host key has changed: {trusted.source} says {known}, it shows {shown}; "
        "nothing was sent to it",
        remedy="somebody may sit in between. If the host was set up anew: "
        f"{_compare(shown)} if the fingerprint is the same, replace the old key in "
        f"{trusted.source} by: {shown.line}",
    )


def _compare(shown: HostKey) -> str:
    name = {"ssh-ed25519": "ed25519", "ssh-rsa": "rsa"}.get(shown.kind, "ecdsa")
    return f"run `ssh-keygen -lf /etc/ssh/ssh_host_{name}_key.pub` on the host's console;"


def pinned(text: str) -> TrustedKeys:
    """Trust exactly one key.

    Raises:
        ValueError: The text is no public host key.
    """
    return TrustedKeys("host_key", (HostKey.parse(text),), pinned=True)


def read_known_hosts(paths: Iterable[Path], address: str, port: int) -> TrustedKeys:
    """Find a host's keys in known_hosts files; a file that does not exist holds none.

    An entry without port counts for other ports too, where none names the port (as in ssh).

    Args:
        paths: The files; `~` is allowed.
        address: As the host is called in the configuration.
        port: TCP port.

    Raises:
        BadInput: A file is there and cannot be read.
    """
    files = [path.expanduser() for path in paths]
    lines = [line for path in files for line in _lines(path)]
    source = " and ".join(map(str, files))
    plain = address.lower()
    names = [plain] if port == SSH_PORT else [f"[{plain}]:{port}", plain]
    revoked = tuple(key for name in names for key in _keys(lines, name, "@revoked"))
    for name in names:
        keys = tuple(dict.fromkeys(_keys(lines, name, "")))
        if keys:
            return TrustedKeys(source, keys, revoked)
    return TrustedKeys(source, (), revoked)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise BadInput(
            f"the known_hosts file {path} cannot be read: {error.strerror}",
            remedy="make it readable for this user, or pin the key in host_key instead",
        ) from error


def _keys(lines: Iterable[str], name: str, marker: str) -> Iterator[HostKey]:
    """Keys of the lines with this marker that match a name; senseless lines are passed over."""
    for line in lines:
        fields = line.split()
        found = fields.pop(0) if fields and fields[0].startswith("@") else ""
        if found != marker or not fields or not _matches(fields[0], name):
            continue
        with contextlib.suppress(ValueError):
            yield HostKey.parse(" ".join(fields[1:]))


def _matches(patterns: str, name: str) -> bool:
    """Whether a known_hosts name field means a host; a negated pattern that matches decides."""
    if patterns.startswith("|"):
        return _hash_matches(patterns, name)
    hit = False
    for pattern in patterns.lower().split(","):
        if re.fullmatch(_regex(pattern.removeprefix("!")), name):
            if pattern.startswith("!"):
                return False
            hit = True
    return hit


def _regex(pattern: str) -> str:
    """A host pattern: only `*` and `?` are special (ssh_config(5), PATTERNS)."""
    return re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".")


def _hash_matches(field: str, name: str) -> bool:
    """A hashed name: `|1|salt|HMAC-SHA1(salt, name)`, both in base64."""
    try:
        _, version, salt, digest = field.split("|")
        key, wanted = base64.b64decode(salt), base64.b64decode(digest)
    except ValueError:
        return False
    return version == "1" and hmac.compare_digest(
        hmac.new(key, name.encode(), hashlib.sha1).digest(), wanted
    )
