"""What a stand-in cluster knows and does, by the paths of its API.

Parameters, limits and privileges are those of the published schema (Proxmox VE 9.1). The guest
agent really runs what it is told, on this machine, and tells the end of a command once only.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import IO, Any

INPUT_LIMIT = 65536

Params = dict[str, list[str]]


class PveError(Exception):
    """An answer above 399: code, the words in the status line, and errors by parameter."""

    def __init__(
        self, code: int, words: str, by_parameter: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(words)
        self.code = code
        self.words = words
        self.by_parameter = by_parameter


@dataclass
class Guest:
    """One guest; `agent` is "running", "stopped" or "" (none configured)."""

    vmid: int
    kind: str = "qemu"
    node: str = "pve1"
    name: str = "llm"
    status: str = "running"
    lock: str = ""
    qmp_status: str = "running"
    agent: str = "running"


@dataclass
class _Command:
    process: subprocess.Popen[bytes]
    out: IO[bytes]
    err: IO[bytes]


@dataclass
class Cluster:
    """The cluster.

    Attributes:
        guests: All guests.
        privileges: What the token may do, on every guest.
        hidden: Guests on which it lacks VM.Audit, which the list of resources then leaves out.
        environment: Of commands run by the guest agent.
        hang: Commands are taken and never end.
        doctor: Changes the answers of exec-status about ended commands.
    """

    guests: list[Guest] = field(default_factory=list)
    privileges: set[str] = field(default_factory=lambda: {"VM.Audit", "VM.GuestAgent.Unrestricted"})
    hidden: set[int] = field(default_factory=set)
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": "/usr/bin:/bin"})
    hang: bool = False
    doctor: Callable[[dict[str, Any]], object] = lambda answer: answer
    _commands: dict[int, _Command] = field(default_factory=dict)

    def answer(self, method: str, path: str, params: Params) -> object:
        """The data of an answer.

        Raises:
            PveError: Anything but 200.
        """
        for route in ROUTES:
            found = re.fullmatch(route.path, path)
            if found and method == route.method:
                return self._routed(route, found.groupdict(), params)
        raise PveError(501, f"Method '{method} {path}' not implemented")

    def _routed(self, route: Route, place: dict[str, str], params: Params) -> object:
        if route.privilege and route.privilege not in self.privileges:
            where = f"/vms/{place['vmid']}"
            raise PveError(403, f"Permission check failed ({where}, {route.privilege})")
        wrong = {
            name: "property is not defined in schema and the schema does not allow "
            "additional properties"
            for name in params
            if name not in route.parameters
        }
        for name, check in route.parameters.items():
            complaint = check(params.get(name, []))
            if complaint:
                wrong[name] = complaint
        if wrong:
            raise PveError(400, "Parameter verification failed.", wrong)
        return route.act(self, place, params)

    def find(self, place: dict[str, str]) -> Guest:
        """The guest of a path, which must be on that node and of that kind."""
        kind = place.get("kind", "qemu")
        for guest in self.guests:
            if (str(guest.vmid), guest.node, guest.kind) == (place["vmid"], place["node"], kind):
                return guest
        folder = "lxc" if kind == "lxc" else "qemu-server"
        file = f"nodes/{place['node']}/{folder}/{place['vmid']}.conf"
        raise PveError(500, f"Configuration file '{file}' does not exist")

    def agent(self, place: dict[str, str]) -> Guest:
        """The guest, whose agent must be there: the three checks of `assert_agent_available`."""
        guest = self.find(place)
        if not guest.agent:
            raise PveError(500, "No QEMU guest agent configured")
        if guest.status != "running":
            raise PveError(500, f"VM {guest.vmid} is not running")
        if guest.agent != "running":
            raise PveError(500, "QEMU guest agent is not running")
        return guest

    def start(self, argv: list[str], data: str) -> int:
        """Run a command; its input goes through a file, so that nothing can block."""
        source, out, err = (tempfile.TemporaryFile() for _ in range(3))  # noqa: SIM115
        source.write(data.encode("latin-1"))
        source.seek(0)
        if self.hang:
            argv = ["sleep", "1000"]
        process = subprocess.Popen(
            argv, stdin=source, stdout=out, stderr=err, env=self.environment, cwd="/"
        )
        self._commands[process.pid] = _Command(process, out, err)
        return process.pid

    def look(self, pid: int) -> object:
        """How a command stands; once it has ended it is forgotten, as the agent does."""
        command = self._commands.get(pid)
        if command is None:
            raise PveError(500, "Agent error: Invalid parameter 'pid'")
        code = command.process.poll()
        if code is None:
            return {"exited": 0}
        del self._commands[pid]
        answer: dict[str, Any] = {"exited": 1}
        answer["signal" if code < 0 else "exitcode"] = abs(code)
        for stream, name in ((command.out, "out-data"), (command.err, "err-data")):
            stream.seek(0)
            text = stream.read().decode("latin-1")
            if text:
                answer[name] = text
        return self.doctor(answer)

    def end_all(self) -> None:
        """End commands that still run."""
        for command in self._commands.values():
            command.process.kill()
            command.process.wait()


Check = Callable[[list[str]], str]
"""Complains about the values of a parameter, or returns an empty text."""


@dataclass(frozen=True)
class Route:
    """A path of the schema."""

    method: str
    path: str
    act: Callable[[Cluster, dict[str, str], Params], object]
    parameters: Mapping[str, Check] = field(default_factory=dict)
    privilege: str = ""


def _needed(values: list[str]) -> str:
    return "" if values else "property is missing and it is not optional"


def _short(values: list[str]) -> str:
    if any(len(value) > INPUT_LIMIT for value in values):
        return f"value may only be {INPUT_LIMIT} characters long"
    return ""


def _integer(values: list[str]) -> str:
    good = len(values) == 1 and re.fullmatch(r"-?\d+", values[0])
    return "" if good else "type check ('integer') failed"


def _type(values: list[str]) -> str:
    known = set(values) <= {"vm", "storage", "node", "sdn"}
    return "" if known else f"value '{values[0]}' does not have a value in the enumeration"


def _resources(cluster: Cluster, _place: dict[str, str], params: Params) -> object:
    guests = [_row(guest) for guest in cluster.guests if guest.vmid not in cluster.hidden]
    nodes = [{"id": f"node/{name}", "type": "node", "node": name} for name in ("pve1", "pve2")]
    return guests if params.get("type") == ["vm"] else [*nodes, *guests]


def _row(guest: Guest) -> dict[str, object]:
    row: dict[str, object] = {
        "id": f"{guest.kind}/{guest.vmid}",
        "type": guest.kind,
        "vmid": guest.vmid,
        "node": guest.node,
        "name": guest.name,
        "status": guest.status,
        "template": 0,
    }
    return {**row, "lock": guest.lock} if guest.lock else row


def _status(cluster: Cluster, place: dict[str, str], _params: Params) -> object:
    guest = cluster.find(place)
    row = {key: value for key, value in _row(guest).items() if key not in ("id", "type", "node")}
    row["ha"] = {"managed": 0}
    if guest.kind == "qemu":
        row |= {"qmpstatus": guest.qmp_status, "agent": 1 if guest.agent else 0}
    return row


def _config(cluster: Cluster, place: dict[str, str], _params: Params) -> object:
    guest = cluster.find(place)
    row = {"hostname" if guest.kind == "lxc" else "name": guest.name, "digest": "d1ce5"}
    return {**row, "lock": guest.lock} if guest.lock else row


def _exec(cluster: Cluster, place: dict[str, str], params: Params) -> object:
    cluster.agent(place)
    data = "".join(params.get("input-data", []))
    if not data.isascii():
        raise PveError(500, "Wide character in subroutine entry at Agent.pm line 75.")
    try:
        return {"pid": cluster.start(params["command"], data)}
    except OSError as error:
        said = f"Failed to execute child process ({error.strerror})"
        raise PveError(
            500, f"Agent error: Guest agent command failed, error was '{said}'"
        ) from error


def _exec_status(cluster: Cluster, place: dict[str, str], params: Params) -> object:
    cluster.agent(place)
    return cluster.look(int(params["pid"][0]))


_GUEST = r"/nodes/(?P<node>[^/]+)/(?P<kind>lxc|qemu)/(?P<vmid>\d+)"
_AGENT = r"/nodes/(?P<node>[^/]+)/qemu/(?P<vmid>\d+)/agent"

ROUTES = (
    Route("GET", "/version", lambda *_: {"version": "9.1.2", "release": "9.1", "repoid": "c0ffee"}),
    Route(
        "GET",
        "/access/permissions",
        lambda cluster, *_: {"/vms": dict.fromkeys(sorted(cluster.privileges), 1)},
        {"path": lambda _: "", "userid": lambda _: ""},
    ),
    Route("GET", "/cluster/resources", _resources, {"type": _type}),
    Route("GET", f"{_GUEST}/status/current", _status, privilege="VM.Audit"),
    Route(
        "GET",
        f"{_GUEST}/config",
        _config,
        {"current": lambda _: "", "snapshot": lambda _: ""},
        "VM.Audit",
    ),
    Route(
        "POST",
        f"{_AGENT}/exec",
        _exec,
        {"command": _needed, "input-data": _short},
        "VM.GuestAgent.Unrestricted",
    ),
    Route(
        "GET",
        f"{_AGENT}/exec-status",
        _exec_status,
        {"pid": _integer},
        "VM.GuestAgent.Unrestricted",
    ),
)
