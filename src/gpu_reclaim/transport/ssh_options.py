"""How a machine is reached by SSH, checked and made ready before anything is opened."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path

import paramiko

from gpu_reclaim.errors import BadInput
from gpu_reclaim.transport import host_keys
from gpu_reclaim.transport.host_keys import TrustedKeys
from gpu_reclaim.transport.ssh_keys import KeyTroubleError, open_key

MAX_PORT = 65535
"""The highest TCP port."""


@dataclass(frozen=True)
class SshOptions:
    """How a machine is reached by SSH. At least one of the credentials is needed.

    Attributes:
        address: Name or IP address.
        port: TCP port of sshd.
        username: Who to log in as.
        private_key: The text of a private key.
        private_key_path: A file that holds one; `~` is allowed.
        passphrase: Opens both keys, where they are encrypted.
        password: For the login, also where sshd asks for it interactively.
        agent: Use the keys of the running ssh-agent.
        host_key: The host's public key, `ssh-ed25519 AAAA...`; a comment may follow. Counts alone.
        known_hosts_path: Read instead of `~/.ssh/known_hosts` and `/etc/ssh/ssh_known_hosts`.
        jump: The machine to go through.
        sudo: Run scripts by `sudo -n` on the far side.
        connect_timeout_s: Limit, in seconds, on each step on the way to a session: TCP, key
            exchange, each login method, opening a channel.

    Raises:
        BadInput: A value makes no sense.
    """

    address: str
    port: int = host_keys.SSH_PORT
    username: str = "root"
    private_key: str | None = field(default=None, repr=False)
    private_key_path: str | Path | None = None
    passphrase: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    agent: bool = False
    host_key: str | None = None
    known_hosts_path: str | Path | None = None
    jump: SshOptions | None = None
    sudo: bool = False
    connect_timeout_s: float = 10

    def __post_init__(self) -> None:
        wrong = _wrong_value(self)
        if wrong:
            raise _bad(self, *wrong)

    @property
    def where(self) -> str:
        """For people: `root@10.0.0.9:22`."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{self.username}@{host}:{self.port}"


def _wrong_value(options: SshOptions) -> tuple[str, str] | None:
    """What is wrong with the values alone, and the cure."""
    address, seconds = options.address, options.connect_timeout_s
    texts = (options.username, options.private_key_path, options.known_hosts_path)
    if any("PRIVATE KEY" in str(x) or "\n" in str(x) for x in texts if x):
        return (
            "the text of a key stands where a name or path belongs",
            "put the key into private_key, which is kept as a secret",
        )
    if "@" in address or "://" in address:
        return (
            "the address holds more than a host name or IP address",
            "give the bare name or IP address; the login goes into username",
        )
    if not address or any(c.isspace() or not c.isprintable() for c in address):
        return (
            f"the address {address!r} is no host name or IP address",
            "give the bare name or IP address; the login goes into username",
        )
    if not options.username:
        return "the username is empty", "give a username, for example root"
    if not 1 <= options.port <= MAX_PORT:
        return f"the port {options.port} is out of range", f"give a port from 1 to {MAX_PORT}"
    if not (seconds > 0 and math.isfinite(seconds)):
        return "connect_timeout_s is not above 0", "give a number of seconds, for example 10"
    if not (options.private_key or options.private_key_path or options.password or options.agent):
        return (
            "there is nothing to log in with",
            "give a private_key, private_key_path or password, or set agent",
        )
    return _wrong_host_key(options)


def _wrong_host_key(options: SshOptions) -> tuple[str, str] | None:
    try:
        if options.host_key:
            host_keys.pinned(options.host_key)
    except ValueError as error:
        return (
            f"host_key is no public host key: {error}",
            "put in the line that `cat /etc/ssh/ssh_host_ed25519_key.pub` shows on the host",
        )
    return None


@dataclass(frozen=True)
class Hop:
    """One machine on the way, with all that was read and checked beforehand.

    Attributes:
        options: As given.
        where: For people; says what part of the way it is.
        keys: Private keys, opened.
        trusted: The host keys it may show.
        before: The jump host, if there is one.
    """

    options: SshOptions
    where: str
    keys: tuple[paramiko.PKey, ...] = field(repr=False)
    trusted: TrustedKeys
    before: Hop | None


def prepare(options: SshOptions, target: str = "") -> Hop:
    """Read keys and known_hosts files, for this machine and its jump hosts.

    Args:
        options: Where to go.
        target: The machine this one is a jump host for; empty for the last one.

    Raises:
        BadInput: A key or file cannot be read, or there is no agent.
    """
    if options.agent and not os.environ.get("SSH_AUTH_SOCK"):
        raise _bad(
            options,
            "the ssh-agent is to be used, but none runs for this process (no SSH_AUTH_SOCK)",
            "start one where the flow runs (`eval $(ssh-agent); ssh-add`), or give a private_key",
        )
    jump = options.jump
    way = f" (jump host for {target})" if target else f" (through {jump.where})" if jump else ""
    return Hop(
        options,
        options.where + way,
        _private_keys(options),
        _trusted(options),
        prepare(jump, options.where) if jump else None,
    )


def _trusted(options: SshOptions) -> TrustedKeys:
    if options.host_key:
        return host_keys.pinned(options.host_key)
    given = options.known_hosts_path
    paths = (Path(given),) if given else host_keys.DEFAULT_FILES
    return host_keys.read_known_hosts(paths, options.address, options.port)


def _private_keys(options: SshOptions) -> tuple[paramiko.PKey, ...]:
    keys = []
    if options.private_key:
        keys.append(_open_key(options, "private_key", options.private_key))
    if options.private_key_path:
        path = Path(options.private_key_path).expanduser()
        try:
            text = path.read_text("utf-8", errors="replace")
        except OSError as error:
            raise _bad(
                options,
                f"the key file {path} cannot be read: {error.strerror}",
                "correct private_key_path, or make the file readable where the flow runs",
            ) from error
        keys.append(_open_key(options, f"the key file {path}", text))
    return tuple(keys)


def _open_key(options: SshOptions, name: str, text: str) -> paramiko.PKey:
    try:
        return open_key(text, options.passphrase)
    except KeyTroubleError as error:
        raise _bad(options, f"{name} {error.trouble}", error.cure) from error


def _bad(options: SshOptions, message: str, cure: str) -> BadInput:
    # A login or password that somebody put into the address is not repeated.
    bare = options.address.rpartition("@")[2]
    where = (
        f"SSH to {bare or 'nowhere'}:{options.port}" if "@" in options.address else options.where
    )
    safe = "SSH" if "PRIVATE KEY" in options.where else where
    return BadInput(f"{safe}: {message}", remedy=cure)
