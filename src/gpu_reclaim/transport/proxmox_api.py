"""The Proxmox VE API over HTTPS, by token: where a guest is, what it is, and its guest agent.

Of proxmoxer only the HTTPS backend is used (its SSH backends take any host key), and that is loaded
on first use: without `requests` it ends the process. Field names and limits are those of the
published schema (Proxmox VE 9.1); the words of errors those of qemu-server 9 (Agent.pm,
QMPClient.pm). Reads are repeated when the link fails, writes never. For one thread.
"""

from __future__ import annotations

import importlib
import json
import logging
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import requests
from proxmoxer.core import ProxmoxResource, ResourceException
from urllib3.exceptions import NewConnectionError

from gpu_reclaim import errors
from gpu_reclaim.commands import decode, printable

RETRY_WAITS_S = (0.2, 1.0)
"""Pauses before the second and third attempt of a read: a proxy's restart, not an outage."""

PASSING_CODES = frozenset({502, 503, 504, 595, 596})
"""A gateway, or the asked node (AnyEvent::HTTP 595, 596), did not reach the guest's node."""

LINK_CODES = PASSING_CODES | {597, 598, 599}
"""All that say "no answer from behind" (AnyEvent::HTTP)."""

INPUT_LIMIT = 65536
"""Characters of `input-data` (schema of agent/exec)."""

VMIDS = range(100, 1_000_000_000)
"""What the schema allows (`pve-vmid`)."""

_TOKEN_ID = re.compile(r"([^\s:/]+@[A-Za-z][A-Za-z0-9.\-_]+)!([A-Za-z][A-Za-z0-9.\-_]+)")  # schema
_ADDRESS = re.compile(r"[A-Za-z0-9._-]+|\[?[0-9A-Fa-f]*:[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*\]?")
_NODE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?")
_AUDIT = "VM.Audit"
_AGENT = "VM.GuestAgent.Unrestricted (before Proxmox VE 9: VM.Monitor)"

_Meaning = tuple[type[errors.GpuReclaimError], str]

_SAID: tuple[tuple[str, type[errors.GpuReclaimError], str], ...] = (
    ("does not exist", errors.IdentityMismatch, "check the vmid; was the guest moved just now?"),
    (
        "No QEMU guest agent configured",
        errors.Unreachable,
        "`qm set VMID --agent enabled=1`, then stop and start the guest",
    ),
    (
        "guest agent is not running",
        errors.Unreachable,
        "install and start qemu-guest-agent in the guest",
    ),
    ("unable to connect to VM", errors.Unreachable, "start qemu-guest-agent in the guest again"),
    ("not running", errors.GuestStopped, "start the guest"),
    (
        "has been disabled",
        errors.CommandFailed,
        "allow guest-exec and guest-exec-status in the agent's settings (/etc/sysconfig/qemu-ga)",
    ),
    (
        "Guest agent command failed",
        errors.CommandFailed,
        "the guest needs coreutils (`timeout`) and a POSIX shell",
    ),
)
"""Words in the status line of an error, what they mean, the remedy; the first that fits counts."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ProxmoxApiOptions:
    """How to reach the API.

    Attributes:
        address: Name or IP address of any node of the cluster, as its certificate has it.
        port: TCP port.
        token_id: `user@realm!name`.
        token_secret: The token's UUID. Never shown.
        ca_path: File with the CA that signed the certificate; a cluster's own is
            /etc/pve/pve-root-ca.pem on each node. Empty: the system's CAs.
        verify: False: the certificate is not checked, and each connection logs a warning.
        timeout_s: For connecting, and for each wait for an answer, in seconds.

    Raises:
        BadInput: A value cannot be right.
    """

    address: str
    port: int = 8006
    token_id: str
    token_secret: str = field(repr=False)
    ca_path: str | None = None
    verify: bool = True
    timeout_s: float = 30

    def __post_init__(self) -> None:
        checks = (
            (_ADDRESS.fullmatch(self.address), "address must be a bare host name or IP address"),
            (0 < self.port < 2**16, "port must be 1 to 65535"),
            (_TOKEN_ID.fullmatch(self.token_id), "token_id must look like user@realm!name"),
            (re.fullmatch(r"[!-~]+", self.token_secret), "token_secret must be the token's UUID"),
            (self.timeout_s > 0, "timeout_s must be above 0"),
        )
        for good, words in checks:
            if not good:
                raise errors.BadInput(f"Proxmox API: {words}")


@dataclass(frozen=True)
class GuestPlace:
    """A guest as the whole cluster sees it (GET /cluster/resources); may be seconds old.

    Attributes:
        vmid: Its number.
        node: The node it is on.
        kind: "lxc" or "qemu".
        status: "running", "stopped" or "unknown" (its node is offline).
        name: Its hostname or VM name; may be empty.
        lock: What holds it locked (backup, migrate, ...); empty when nothing does.
    """

    vmid: int
    node: str
    kind: str
    status: str
    name: str
    lock: str


@dataclass(frozen=True)
class GuestStatus:
    """A guest as its node sees it now: status, lock, and QEMU's own word ("running", "paused")."""

    status: str
    lock: str
    qmp_status: str


@dataclass(frozen=True)
class GuestConfig:
    """A guest's configuration: its hostname (lxc) or name (qemu), lock, and the file's digest."""

    name: str
    lock: str
    digest: str


@dataclass(frozen=True)
class ExecStatus:
    """How a command of the guest agent stands; `truncated`: a stream was not kept whole."""

    exited: bool
    exit_code: int | None
    signal: int | None
    stdout: str
    stderr: str
    truncated: bool


@dataclass(frozen=True)
class _Ask:
    """One call: where it goes, and what to say of it when it fails."""

    where: str
    path: str
    needs: str
    writes: bool = False

    def __str__(self) -> str:
        return f"{self.where}: {'POST' if self.writes else 'GET'} /{self.path}"


class ProxmoxApi:
    """A cluster's API, asked through one of its nodes.

    Besides what each method names, all raise:
        Unreachable: No answer, an untrusted certificate, or a node behind this one is away.
        AccessRefused: The token is not accepted, or lacks a privilege.
        CommandFailed: Proxmox said no for another reason.
        BadAnswer: What came back is not what the schema promises.
    """

    def __init__(
        self, options: ProxmoxApiOptions, *, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._options = options
        self._sleep = sleep
        self._session: requests.Session | None = None
        self._root: ProxmoxResource | None = None

    @property
    def name(self) -> str:
        """For people."""
        return f"Proxmox API {self._options.address}:{self._options.port}"

    def locate(self, vmid: int) -> GuestPlace:
        """Find a guest in the cluster.

        Raises:
            BadInput: Not a vmid.
            IdentityMismatch: No such guest is shown to this token.
        """
        if vmid not in VMIDS:
            raise errors.BadInput(f"{vmid} is no vmid ({VMIDS.start} to {VMIDS.stop - 1})")
        ask = _Ask(self.name, "cluster/resources", _AUDIT)
        rows = self._read(ask, type="vm")
        if not isinstance(rows, list):
            raise _odd(ask, "not a list")
        found = [row for row in rows if isinstance(row, dict) and str(row.get("vmid")) == str(vmid)]
        if not found:
            raise errors.IdentityMismatch(
                f"{self.name}: no guest {vmid} is shown to {self._options.token_id}",
                remedy=f"check the vmid; guests on which the token lacks {_AUDIT} are left out",
            )
        if len(found) > 1:
            raise _odd(ask, f"guest {vmid} is listed twice")
        return _place(ask, vmid, found[0])

    def status(self, place: GuestPlace) -> GuestStatus:
        """What a guest does now, as its node says.

        Raises:
            IdentityMismatch: It is not on that node (any more).
        """
        ask = self._ask(place, "status/current")
        row = _mapping(ask, self._read(ask))
        return GuestStatus(
            _text(ask, row, "status", need=True),
            _text(ask, row, "lock"),
            _text(ask, row, "qmpstatus"),
        )

    def config(self, place: GuestPlace) -> GuestConfig:
        """A guest's configuration.

        Raises:
            IdentityMismatch: It is not on that node (any more).
        """
        ask = self._ask(place, "config")
        row = _mapping(ask, self._read(ask))
        name = _text(ask, row, "hostname" if place.kind == "lxc" else "name")
        return GuestConfig(name, _text(ask, row, "lock"), _text(ask, row, "digest", need=True))

    def agent_exec(self, node: str, vmid: int, argv: Sequence[str], input_data: str) -> int:
        """Start a command in a VM; never repeated.

        Args:
            node: The VM's node.
            vmid: The VM.
            argv: The command.
            input_data: Its standard input: ASCII (Proxmox hands anything else on damaged).

        Returns:
            The process id by which `agent_exec_status` knows it.

        Raises:
            BadInput: The input is too long or not ASCII.
            GuestStopped: The VM is not running.
            LinkLost: It may have been started.
        """
        if len(input_data) > INPUT_LIMIT or not input_data.isascii():
            raise errors.BadInput(
                f"{self.name}: the script has {len(input_data)} characters; the guest agent takes "
                f"{INPUT_LIMIT} at most, all ASCII",
                remedy="reach the guest by SSH instead",
            )
        ask = _Ask(self.name, f"nodes/{node}/qemu/{vmid}/agent/exec", _AGENT, writes=True)
        answer = self._send(ask, {"command": list(argv), "input-data": input_data})
        pid = answer.get("pid") if isinstance(answer, dict) else None
        if not isinstance(pid, int):
            raise errors.Incomplete(f"{ask}: no pid in the answer, so the command may have started")
        return pid

    def agent_exec_status(self, node: str, vmid: int, pid: int) -> ExecStatus:
        """How a command started by `agent_exec` stands. Once ended, the agent tells it ONCE."""
        ask = _Ask(self.name, f"nodes/{node}/qemu/{vmid}/agent/exec-status", _AGENT)
        row = _mapping(ask, self._read(ask, pid=pid))
        return ExecStatus(
            _truth(ask, row, "exited", need=True),
            _number(ask, row, "exitcode"),
            _number(ask, row, "signal"),
            _raw(_text(ask, row, "out-data")),
            _raw(_text(ask, row, "err-data")),
            _truth(ask, row, "out-truncated") or _truth(ask, row, "err-truncated"),
        )

    def close(self) -> None:
        """End the connection, if one is open. Never raises."""
        session, self._session, self._root = self._session, None, None
        if session is not None:
            session.close()

    def _ask(self, place: GuestPlace, what: str) -> _Ask:
        return _Ask(self.name, f"nodes/{place.node}/{place.kind}/{place.vmid}/{what}", _AUDIT)

    def _read(self, ask: _Ask, **params: object) -> object:
        for wait_s in RETRY_WAITS_S:
            try:
                return self._send(ask, params)
            except errors.Unreachable as error:
                if not _passing(error.__cause__):
                    raise
                logger.info("%s; asking again in %g s", error.message, wait_s)
            self._sleep(wait_s)
        return self._send(ask, params)

    def _send(self, ask: _Ask, data: Mapping[str, object]) -> object:
        resource = self._connect()(ask.path)
        try:
            answer: object = resource.post(**data) if ask.writes else resource.get(**data)
        except ResourceException as error:
            raise _refused(ask, error, self._options.token_id) from error
        except requests.RequestException as error:
            raise _link_failed(ask, error) from error
        if answer is None and not ask.writes:
            raise _odd(ask, "not an answer of the Proxmox API (a login page? another service?)")
        return answer

    def _connect(self) -> ProxmoxResource:
        if self._root is None:
            options = self._options
            if options.verify and options.ca_path and not Path(options.ca_path).is_file():
                raise errors.BadInput(f"{self.name}: no file {options.ca_path} (ca_path)")
            if not options.verify:
                logger.warning(
                    "%s: the certificate is not checked (verify=False): "
                    "whoever sits in between can take the token",
                    self.name,
                )
            self._session, self._root = _open(options)
        return self._root


def _open(options: ProxmoxApiOptions) -> tuple[requests.Session, ProxmoxResource]:
    with warnings.catch_warnings():  # loading it turns off urllib3's warnings for the whole process
        https = importlib.import_module("proxmoxer.backends.https")
    # At INFO it logs what is posted (whole scripts), at DEBUG all answers. A filter, not a level:
    # a level is easily set back by an application that wants to see more of everything.
    logging.getLogger("proxmoxer.core").addFilter(_is_warning)
    user, name = options.token_id.rsplit("!", 1)
    backend = https.Backend(
        options.address,
        port=options.port,
        user=user,
        token_name=name,
        token_value=options.token_secret,
        verify_ssl=options.verify and (options.ca_path or True),
        timeout=options.timeout_s,
    )
    session: requests.Session = backend.get_session()
    session.max_redirects = 0  # the API never redirects, a login portal does
    url = backend.get_base_url()
    return session, ProxmoxResource(base_url=url, session=session, serializer=_Answers())


def _is_warning(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING


class _Answers:
    """Reads answers in place of proxmoxer's reader, to which a page that is no JSON is data."""

    def loads(self, response: requests.Response) -> object:
        """The `data` of an answer; None when it is no answer of the API."""
        body = _json(response)
        return body.get("data") if isinstance(body, dict) else None

    def loads_errors(self, response: requests.Response) -> object:
        """What was wrong with which parameter, if anything."""
        body = _json(response)
        return body.get("errors") if isinstance(body, dict) else None


def _json(response: requests.Response) -> object:
    try:
        return json.loads(response.content)
    except ValueError:
        return None


def _odd(ask: _Ask, what: str) -> errors.BadAnswer:
    return errors.BadAnswer(f"{ask}: {what}", remedy="check address and port")


def _mapping(ask: _Ask, answer: object) -> Mapping[str, object]:
    if not isinstance(answer, dict):
        raise _odd(ask, "not an object")
    return answer


def _text(ask: _Ask, row: Mapping[str, object], key: str, *, need: bool = False) -> str:
    value = row.get(key)
    if value is None and not need:
        return ""
    if isinstance(value, str | int | float):  # Perl gives a text of digits as a number
        return str(value)
    raise _odd(ask, f"no {key} in the answer")


def _number(ask: _Ask, row: Mapping[str, object], key: str) -> int | None:
    text = _text(ask, row, key)
    if text and not re.fullmatch(r"-?\d+", text):
        raise _odd(ask, f"{key} is {printable(text, limit=40)!r}, not a number")
    return int(text) if text else None


def _truth(ask: _Ask, row: Mapping[str, object], key: str, *, need: bool = False) -> bool:
    text = _text(ask, row, key, need=need)
    if text not in ("", "0", "1", "False", "True"):
        raise _odd(ask, f"{key} is {printable(text, limit=40)!r}, not 0 or 1")
    return text in ("1", "True")


def _place(ask: _Ask, vmid: int, row: Mapping[str, object]) -> GuestPlace:
    node, kind, status = (_text(ask, row, key, need=True) for key in ("node", "type", "status"))
    if not _NODE.fullmatch(node) or kind not in ("lxc", "qemu"):
        raise _odd(ask, f"guest {vmid} is {printable(kind)!r} on node {printable(node)!r}")
    return GuestPlace(vmid, node, kind, status, _text(ask, row, "name"), _text(ask, row, "lock"))


def _raw(text: str) -> str:
    """Undo Proxmox's reading of the guest's bytes as Latin-1 (Agent.pm decodes base64 only)."""
    try:
        return decode(text.encode("latin-1"))
    except UnicodeEncodeError:
        return text


def _passing(cause: BaseException | None) -> bool:
    """Whether asking again soon may help. A time-out has waited long enough already."""
    if isinstance(cause, ResourceException):
        return cause.status_code in PASSING_CODES
    if isinstance(cause, requests.Timeout | requests.exceptions.SSLError):
        return False
    return isinstance(cause, requests.ConnectionError | requests.exceptions.ChunkedEncodingError)


def _link_failed(ask: _Ask, error: requests.RequestException) -> errors.GpuReclaimError:
    words = printable(str(error), limit=300)
    if isinstance(error, requests.TooManyRedirects):
        return _odd(ask, "redirected, which the Proxmox API never does")
    if "CERTIFICATE_VERIFY_FAILED" in words:
        return errors.Unreachable(
            f"{ask}: the certificate is not trusted: {words}",
            remedy="set ca_path to a copy of the cluster's /etc/pve/pve-root-ca.pem, "
            "and address to a name or IP address that stands in the certificate",
        )
    if ask.writes and not _never_sent(error):
        return errors.LinkLost(f"{ask}: the link broke, the command may have started: {words}")
    return errors.Unreachable(
        f"{ask}: no answer: {words}", remedy="check address, port, ca_path and the firewall"
    )


def _never_sent(error: requests.RequestException) -> bool:
    reason = getattr(error.args[0], "reason", None) if error.args else None
    return isinstance(error, requests.ConnectTimeout) or isinstance(reason, NewConnectionError)


def _refused(ask: _Ask, error: ResourceException, token_id: str) -> errors.GpuReclaimError:
    code, words = error.status_code, _words(error)
    said = f"{ask}: {code} {words}"
    if code in LINK_CODES:
        return _no_answer_behind(ask, code, said)
    meaning = _by_code(ask, code, token_id) or _by_words(words)
    if meaning:
        kind, remedy = meaning
        return kind(said, remedy=remedy)
    if ask.writes and code == requests.codes.internal_server_error:
        return errors.LinkLost(f"{said}; the command may have started")
    return errors.CommandFailed(said)


def _by_code(ask: _Ask, code: int, token_id: str) -> _Meaning | None:
    return {
        401: (
            errors.AccessRefused,
            f"check token_id ({token_id}), its secret, and whether it has expired",
        ),
        403: (
            errors.AccessRefused,
            f"give the token {token_id}, and its user, the privilege {ask.needs}",
        ),
        404: (errors.IdentityMismatch, "check the vmid, address and port"),
    }.get(code)


def _by_words(words: str) -> _Meaning | None:
    return next(((kind, remedy) for text, kind, remedy in _SAID if text in words), None)


def _no_answer_behind(ask: _Ask, code: int, said: str) -> errors.TransportError:
    if ask.writes and code != 595:  # noqa: PLR2004 - 595: it was never connected, see LINK_CODES
        return errors.LinkLost(f"{said}; the command may have started")
    return errors.Unreachable(said, remedy="see whether the guest's node is up (`pvecm status`)")


def _words(error: ResourceException) -> str:
    detail = f" {error.errors}" if error.errors else ""
    return printable(f"{error.content}{detail}", limit=400)
