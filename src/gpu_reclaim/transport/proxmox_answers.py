"""Answers of the Proxmox VE API: their values, how they are read, and what a refusal means.

Field names are those of the published schema (Proxmox VE 9.1); the words of errors those of
qemu-server 9 (Agent.pm, QMPClient.pm).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import requests
from proxmoxer.core import ResourceException
from urllib3.exceptions import NewConnectionError

from gpu_reclaim import errors
from gpu_reclaim.commands import decode, printable

PASSING_CODES = frozenset({502, 503, 504, 595, 596})
"""A gateway, or the asked node (AnyEvent::HTTP 595, 596), did not reach the guest's node."""

LINK_CODES = PASSING_CODES | {597, 598, 599}
"""All that say "no answer from behind" (AnyEvent::HTTP)."""

_NODE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?")

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
class Ask:
    """One call: where it goes, and what to say of it when it fails."""

    where: str
    path: str
    needs: str
    writes: bool = False

    def __str__(self) -> str:
        return f"{self.where}: {'POST' if self.writes else 'GET'} /{self.path}"


def odd(ask: Ask, what: str) -> errors.BadAnswer:
    """The error behind an answer that is not what the schema promises."""
    return errors.BadAnswer(f"{ask}: {what}", remedy="check address and port")


def mapping_of(ask: Ask, answer: object) -> Mapping[str, object]:
    """An answer that must be an object."""
    if not isinstance(answer, dict):
        raise odd(ask, "not an object")
    return answer


def text_of(ask: Ask, row: Mapping[str, object], key: str, *, need: bool = False) -> str:
    """A field as text; empty where it is missing and not needed."""
    value = row.get(key)
    if value is None and not need:
        return ""
    if isinstance(value, str | int | float):  # Perl gives a text of digits as a number
        return str(value)
    raise odd(ask, f"no {key} in the answer")


def number_of(ask: Ask, row: Mapping[str, object], key: str) -> int | None:
    """A field that must be a whole number where there is one."""
    text = text_of(ask, row, key)
    if text and not re.fullmatch(r"-?[0-9]{1,18}", text):
        raise odd(ask, f"{key} is {printable(text, limit=40)!r}, not a number")
    return int(text) if text else None


def truth_of(ask: Ask, row: Mapping[str, object], key: str, *, need: bool = False) -> bool:
    """A field that must be 0 or 1; False where it is missing and not needed."""
    text = text_of(ask, row, key, need=need)
    if text not in ("", "0", "1", "False", "True"):
        raise odd(ask, f"{key} is {printable(text, limit=40)!r}, not 0 or 1")
    return text in ("1", "True")


def place_of(ask: Ask, vmid: int, row: Mapping[str, object]) -> GuestPlace:
    """A row of /cluster/resources."""
    node, kind, status = (text_of(ask, row, key, need=True) for key in ("node", "type", "status"))
    if not _NODE.fullmatch(node) or kind not in ("lxc", "qemu"):
        raise odd(ask, f"guest {vmid} is {printable(kind)!r} on node {printable(node)!r}")
    return GuestPlace(
        vmid, node, kind, status, text_of(ask, row, "name"), text_of(ask, row, "lock")
    )


def guest_text(text: str) -> str:
    """Undo Proxmox's reading of the guest's bytes as Latin-1 (Agent.pm decodes base64 only)."""
    try:
        return decode(text.encode("latin-1"))
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace").decode()


def passing(cause: BaseException | None) -> bool:
    """Whether asking again soon may help. A time-out has waited long enough already."""
    if isinstance(cause, ResourceException):
        return cause.status_code in PASSING_CODES
    if isinstance(cause, requests.Timeout | requests.exceptions.SSLError):
        return False
    return isinstance(cause, requests.ConnectionError | requests.exceptions.ChunkedEncodingError)


def link_failed(ask: Ask, error: requests.RequestException) -> errors.GpuReclaimError:
    """The error behind a call that got no answer."""
    words = printable(str(error), limit=300)
    if isinstance(error, requests.TooManyRedirects):
        return odd(ask, "redirected, which the Proxmox API never does")
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


def refused(ask: Ask, error: ResourceException, token_id: str) -> errors.GpuReclaimError:
    """The error behind an answer with an error status."""
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


def _by_code(ask: Ask, code: int, token_id: str) -> _Meaning | None:
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


def _no_answer_behind(ask: Ask, code: int, said: str) -> errors.TransportError:
    if ask.writes and code != 595:  # noqa: PLR2004 - 595: it was never connected, see LINK_CODES
        return errors.LinkLost(f"{said}; the command may have started")
    return errors.Unreachable(said, remedy="see whether the guest's node is up (`pvecm status`)")


def _words(error: ResourceException) -> str:
    detail = f" {error.errors}" if error.errors else ""
    return printable(f"{error.content}{detail}", limit=400)
