"""Logging in, by the given credentials only, in a fixed order: keys, agent, password."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import paramiko

from gpu_reclaim.commands import printable
from gpu_reclaim.errors import AccessRefused, Unreachable
from gpu_reclaim.transport.ssh_options import Hop


@dataclass(frozen=True)
class Attempt:
    """One login method: what it is called, and the call that tries it."""

    name: str
    make: Callable[[], object]


def log_in(transport: paramiko.Transport, hop: Hop) -> None:
    """Try each credential in turn, until the host is content (it may want more than one).

    Raises:
        AccessRefused: It took none of them.
        Unreachable: It did not answer, or ended the connection before refusing anything.
    """
    with contextlib.closing(_Agent()) as agent:
        tried: list[str] = []
        for attempt in _attempts(transport, hop, agent):
            if _succeeds(attempt, transport, hop, tried):
                return
            tried.append(attempt.name)
        raise _refused(hop, tried, _allowed(transport, hop))


class _Agent:
    """The ssh-agent, connected only when its keys are asked for."""

    def __init__(self) -> None:
        self._agent: paramiko.Agent | None = None

    def keys(self) -> tuple[paramiko.AgentKey, ...]:
        self._agent = paramiko.Agent()
        return self._agent.get_keys()

    def close(self) -> None:
        if self._agent is not None:
            self._agent.close()


def _attempts(transport: paramiko.Transport, hop: Hop, agent: _Agent) -> Iterator[Attempt]:
    options = hop.options
    user, password = options.username, options.password
    for key in hop.keys:
        name = f"private key {key.get_name()} {key.fingerprint}"
        yield Attempt(name, partial(transport.auth_publickey, user, key))
    if options.agent:
        for held in _agent_keys(agent, hop):
            name = f"agent key {printable(held.comment, limit=80)}"
            yield Attempt(name, partial(transport.auth_publickey, user, held))
    if password:
        yield Attempt("password", partial(transport.auth_password, user, password))


def _agent_keys(agent: _Agent, hop: Hop) -> tuple[paramiko.AgentKey, ...]:
    try:
        keys = agent.keys()
    except (paramiko.SSHException, OSError) as error:
        raise Unreachable(
            f"{hop.where}: the ssh-agent does not answer ({type(error).__name__})",
            remedy="check SSH_AUTH_SOCK where the flow runs: `ssh-add -l`",
        ) from error
    if not keys and not hop.keys and not hop.options.password:
        raise AccessRefused(
            f"{hop.where}: the ssh-agent holds no keys, and there is nothing else to log in with",
            remedy="add one where the flow runs: `ssh-add`",
        )
    return keys


def _succeeds(
    attempt: Attempt, transport: paramiko.Transport, hop: Hop, refused: list[str]
) -> bool:
    """Try one method. False: refused, or accepted as one of several.

    Raises:
        AccessRefused: The host ended the connection after it had refused something.
        Unreachable: The host ended the connection, or did not answer in time.
    """
    until = time.monotonic() + hop.options.connect_timeout_s
    try:
        attempt.make()
    except (paramiko.SSHException, EOFError, OSError) as error:
        if not transport.is_active():
            raise _hung_up(hop, [*refused, attempt.name], bool(refused)) from error
        if time.monotonic() >= until or not isinstance(error, paramiko.AuthenticationException):
            raise Unreachable(
                f"{hop.where}: no answer to the login ({attempt.name}) within "
                f"{hop.options.connect_timeout_s:g} s",
                remedy="sshd may wait for DNS (UseDNS), PAM or a full disk: see its log on the "
                "host, or raise connect_timeout_s",
            ) from error
        return False
    return transport.is_authenticated()


def _allowed(transport: paramiko.Transport, hop: Hop) -> list[str]:
    """What the host would take: it says so when asked for a login without credentials."""
    try:
        transport.auth_none(hop.options.username)
    except paramiko.BadAuthenticationType as error:
        return error.allowed_types
    except (paramiko.SSHException, EOFError, OSError):
        return []
    return []


def _hung_up(hop: Hop, tried: list[str], refused: bool) -> Unreachable:
    if refused:
        return AccessRefused(
            f"{hop.where}: it ended the connection after refusing {', '.join(tried)}",
            remedy="too many keys may have been tried (MaxAuthTries): give the one right key",
        )
    return Unreachable(
        f"{hop.where}: it ended the connection during the login ({tried[-1]})",
        remedy="see sshd's log on the host: `journalctl -u ssh -u sshd`",
    )


def _refused(hop: Hop, tried: list[str], allowed: list[str]) -> AccessRefused:
    user = hop.options.username
    takes = f"; it allows {printable(', '.join(allowed), limit=200)}" if allowed else ""
    return AccessRefused(
        f"{hop.where}: the login was refused; tried {', '.join(tried) or 'nothing'}{takes}",
        remedy=f"put the public half of the key into ~{user}/.ssh/authorized_keys on the host, or "
        "correct username, key or password (root by password needs PermitRootLogin yes)",
    )
