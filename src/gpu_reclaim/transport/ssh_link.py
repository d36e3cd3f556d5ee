"""One logged-in SSH connection, through as many jump hosts as it takes."""

from __future__ import annotations

import contextlib
import logging
import socket
from typing import cast

import paramiko
from paramiko.ssh_exception import IncompatiblePeer

from gpu_reclaim.commands import decode, printable
from gpu_reclaim.errors import Unreachable
from gpu_reclaim.transport.host_keys import HostKey
from gpu_reclaim.transport.ssh_login import log_in
from gpu_reclaim.transport.ssh_options import Hop
from gpu_reclaim.transport.ssh_wire import KEEPALIVE_S, Stream, Wire, dial

PARAMIKO_LOG = f"{__name__}.paramiko"
"""Where paramiko's own words about our connections go. Silent, because each failure is raised with
its meaning; set this logger's level to see them."""

CONNECT_FAILED = 2
"""SSH_OPEN_CONNECT_FAILED (RFC 4254, 5.1): the jump host tried, and got no connection; or sshd
allows no more sessions on this one."""

TURNED_AWAY = ("Exceeded MaxStartups", "Not allowed at this time")
"""What OpenSSH says in place of a greeting when it drops a connection (sshd.c, 9.2 and 9.8)."""

logging.getLogger(PARAMIKO_LOG).setLevel(logging.CRITICAL)


class Link:
    """A logged-in connection.

    Attributes:
        hop: Where it leads.
        transport: paramiko's side of it.
        wire: The bytes below.
        before: The connection to the jump host that carries it.
    """

    def __init__(
        self, hop: Hop, transport: paramiko.Transport, wire: Wire, before: Link | None
    ) -> None:
        self.hop = hop
        self.transport = transport
        self.wire = wire
        self.before = before

    @property
    def alive(self) -> bool:
        """As far as is known, it can be used."""
        return self.transport.is_active()

    def limit(self, deadline: float | None) -> None:
        """Fail writes that are still blocked at a monotonic time, on every hop."""
        self.wire.deadline = deadline
        if self.before:
            self.before.limit(deadline)

    def close(self) -> None:
        """Close it and the hops below. Never raises."""
        self.limit(0)
        with contextlib.suppress(Exception):
            # Its thread would otherwise live on for the rest of the handshake's time.
            self.transport.packetizer.complete_handshake()
        with contextlib.suppress(Exception):
            self.transport.close()
        with contextlib.suppress(Exception):
            self.wire.close()
        if self.before:
            self.before.close()


def connect(hop: Hop) -> Link:
    """Open a connection: TCP or through the jump host, key exchange, host key, login.

    Raises:
        Unreachable: No connection; says which hop failed.
        HostKeyRefused: The host key is not the right one; no login was tried.
        AccessRefused: The login was refused.
    """
    before = connect(hop.before) if hop.before else None
    try:
        wire = Wire(_through(before, hop) if before else _directly(hop))
        link = Link(hop, _transport(hop, wire), wire, before)
    except BaseException:
        if before:
            before.close()
        raise
    try:
        _shake_hands(link)
        log_in(link.transport, hop)
    except BaseException:
        link.close()
        raise
    link.transport.set_keepalive(KEEPALIVE_S)
    return link


def _directly(hop: Hop) -> Stream:
    options = hop.options
    try:
        return dial(options.address, options.port, options.connect_timeout_s)
    except socket.gaierror as error:
        trouble = f"the name {options.address!r} cannot be resolved ({error.strerror})"
        cure = "check the address, and DNS on the machine where the flow runs"
    except ConnectionRefusedError:
        trouble = "it refuses the connection"
        cure = "check the port; see on the host whether sshd runs: `systemctl status ssh sshd`"
    except TimeoutError:
        trouble = f"no answer within {options.connect_timeout_s:g} s"
        cure = "check that the host is up and no firewall is in between: `ssh -v` from here"
    except OSError as error:
        trouble = f"no connection: {error.strerror or error}"
        cure = "check the address, and the routes from the machine where the flow runs"
    raise Unreachable(f"{hop.where}: {trouble}", remedy=cure)


def _through(before: Link, hop: Hop) -> Stream:
    options = hop.options
    target = (options.address, options.port)
    try:
        return before.transport.open_channel(
            "direct-tcpip", target, ("127.0.0.1", 0), timeout=options.connect_timeout_s
        )
    except paramiko.ChannelException as error:
        trouble = printable(error.text, limit=200)
        if error.code == CONNECT_FAILED:
            trouble = f"the jump host gets no connection to it ({trouble})"
            cure = "check address and port as seen from the jump host, and whether sshd runs there"
        else:
            trouble = f"the jump host forwards no connections ({trouble})"
            cure = f"set AllowTcpForwarding yes in sshd_config of {before.hop.options.where}"
    except (paramiko.SSHException, EOFError, OSError) as error:
        trouble = f"the jump host does not connect to it: {_words(error)}"
        cure = "check that the jump host reaches it, for example with `ssh -J`"
    raise Unreachable(f"{hop.where}: {trouble}", remedy=cure)


def _transport(hop: Hop, wire: Wire) -> paramiko.Transport:
    # paramiko asks only for the methods that a Wire has; its stubs name classes instead.
    transport = paramiko.Transport(cast("socket.socket", wire))
    transport.set_log_channel(PARAMIKO_LOG)
    transport.get_security_options().key_types = hop.trusted.algorithms()
    limit = hop.options.connect_timeout_s
    transport.banner_timeout = transport.auth_timeout = limit
    transport.handshake_timeout = 2 * limit  # `start_client` is to be the first to give up
    return transport


def _shake_hands(link: Link) -> None:
    """Exchange keys and check the host key; nothing of ours has been sent before that."""
    hop, transport, limit = link.hop, link.transport, link.hop.options.connect_timeout_s
    try:
        transport.start_client(timeout=limit)
        if not transport.initial_kex_done:  # that call just returns when its time is over
            raise TimeoutError(f"no end within {limit:g} s")
        shown = transport.get_remote_server_key()
    except IncompatiblePeer as error:
        if hop.trusted.pinned and "host key" in str(error):
            raise hop.trusted.missing(hop.where) from error
        raise Unreachable(
            f"{hop.where}: no algorithm in common: {_words(error)}",
            remedy="update OpenSSH on the host: SHA-1 and older algorithms are not used",
        ) from error
    except (paramiko.SSHException, EOFError, OSError) as error:
        raise _no_handshake(link, error) from error
    hop.trusted.check(HostKey(shown.get_name(), shown.asbytes()), hop.where)


def _no_handshake(link: Link, error: Exception) -> Unreachable:
    where, limit = link.hop.where, link.hop.options.connect_timeout_s
    if link.transport.remote_version.startswith("SSH-"):
        return Unreachable(
            f"{where}: the key exchange failed: {_words(error)}",
            remedy="see sshd's log on the host: `journalctl -u ssh -u sshd`",
        )
    if link.wire.heard:
        return _no_greeting(where, link.wire.heard)
    if link.wire.ended:
        return Unreachable(
            f"{where}: it ended the connection before a word was said",
            remedy="sshd may be overloaded (MaxStartups) or this machine banned (fail2ban); "
            "see `journalctl -u ssh -u sshd` on the host",
        )
    return Unreachable(
        f"{where}: it accepts connections but sent no SSH greeting within {limit:g} s",
        remedy="check the port; if it is right, see whether the host hangs (memory, disk, sshd), "
        "or is a frozen guest",
    )


def _no_greeting(where: str, heard: bytes) -> Unreachable:
    said = printable(decode(heard).strip().partition("\n")[0].strip(), limit=100)
    if said in TURNED_AWAY:
        return Unreachable(
            f"{where}: its sshd takes no more connections for now: it said {said!r}",
            remedy="try again; if it stays so, see who logs in there all the time, and MaxStartups "
            "and PerSourcePenalties in sshd_config: `journalctl -u ssh -u sshd` on the host",
        )
    return Unreachable(
        f"{where}: what answers there is not an SSH server: it said {said!r}",
        remedy="check the port",
    )


def _words(error: BaseException) -> str:
    if isinstance(error, EOFError):
        return "the connection ended"
    return printable(str(error) or type(error).__name__, limit=200)
