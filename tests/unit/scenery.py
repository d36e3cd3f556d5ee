"""A host in memory, a clock that only sleeping moves, and the session over both."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from gpu_reclaim.commands import Script, Section
from gpu_reclaim.models import Process
from gpu_reclaim.session import Session
from gpu_reclaim.systemd import REFUSED
from gpu_reclaim.transport.links import Links
from gpu_reclaim.transport.scripted import Answer, ScriptedTransport
from unit.values import UUIDS

NAMESPACE = "pid:[4026531836]"

LEASE = "lease token t\nlease owner me\nlease since 10:00\nlease expires 11:00\n"
LOCKS = ("lock the host", "unlock the host")
"""What every reclaim without a hold begins and ends with."""

HOLDS = {
    "lock the host": f"{LEASE}status taken\n",
    "unlock the host": "status taken\n",
    "take the host": f"{LEASE}status taken\n",
    "keep the hold": f"{LEASE}status taken\n",
    "look at the hold": "",
    "prove the hold": f"refused sglang.service\n{LEASE}status taken\n",
    "put back what was stopped": "owner me\nunit sglang.service started\nstatus done\n",
}


def scan_text(processes: list[Process], namespace: str = NAMESPACE) -> str:
    """What the look through /proc prints about them."""
    lines = [f"ns {namespace}", "major 195 nvidia", "self 900", "session 899"]
    lines += ["sees fds", "sees nodes", "sees people"]
    for process in processes:
        pid = process.pid
        for number, device in enumerate(process.devices, 3):
            path = device.removesuffix(" (fd)")
            lines += [f"link '{pid}/fd/{number}' -> '{path}'"]
            lines += [f"node c3 {number} character special file|{pid}/fd/{number}"]
        lines += [
            f"{pid}/comm:{process.comm}\x01",
            *(f"{pid}/cmdline:{word}" for word in process.command_line.split(" ")),
            f"{pid}/stat:{pid} ({process.comm}) {process.state} {process.ppid} 1 {process.session}"
            f"{' 0' * 15} {process.start_time} 0 0\x01",
            f"{pid}/cgroup:{''.join(f'0::{group}' + chr(1) for group in process.cgroups)}",
            f"exe '{pid}/exe' -> '{process.exe}'",
        ]
    return "\n".join([*lines, ""])


def named_units(body: str) -> list[str]:
    """The units that a script asks systemd about."""
    tree = re.search(r"set -- ([^\n]*)", body)
    return (tree[1] if tree else body.rpartition(" -- ")[2]).split()


@dataclass
class Clock:
    """Time that passes only while somebody sleeps."""

    now: float = 1000.0
    sleeps: list[float] = field(default_factory=list)

    def read(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds


@dataclass
class Unit:
    """A unit of the host, and what triggers it."""

    active: str = "active"
    triggers: str = ""
    can_stop: str = "yes"
    required_by: str = ""
    wanted_by: str = ""
    invocation: str = "1"
    names: str = ""
    more: str = ""
    load: str = "loaded"


@dataclass
class Host:
    """Answers scripts as a machine would.

    Attributes:
        used: Memory by GPU, in MiB; what is no number is printed as it is.
        memory: Pid to GPU index and MiB, given back when the process ends.
        immortal: Pids that stay in state D whatever they are sent.
        lingering: Pids that stay when their unit is stopped.
        hook: Called with each script before it is answered.
        scanned: More lines of the look through /proc.
        lease: Who holds the host at present, as its first look prints it.
        holds: What scripts of a hold print, by their names; by default that all is well.
    """

    used: list[int | str] = field(default_factory=lambda: [0])
    processes: list[Process] = field(default_factory=list)
    units: dict[str, Unit] = field(default_factory=dict)
    memory: dict[int, tuple[int, int]] = field(default_factory=dict)
    immortal: set[int] = field(default_factory=set)
    lingering: set[int] = field(default_factory=set)
    smi_code: int = 0
    fuser: str = ""
    mps: str = ""
    apps: str = ""
    scanned: str = ""
    driver: str = "590.48.01"
    mig: str = "[N/A]"
    lease: str = ""
    hook: Callable[[Script], None] = lambda _: None
    holds: dict[str, str] = field(default_factory=dict)

    def answer(self, script: Script) -> Answer:
        try:
            self.hook(script)
        except Exception as error:
            return error
        return self.carry_out(script)

    def carry_out(self, script: Script) -> dict[str, str | Section]:
        """Do what the script says, section by section."""
        parts: dict[str, Callable[[str], str]] = {
            "identity": lambda _: "hostname llm\nmachine-id a1b2\n",
            "processes": lambda _: scan_text(self.processes) + self.scanned,
            "apps": lambda _: (
                "".join(
                    f"app {UUIDS[index]}, {pid}, {mib}\n"
                    for pid, (index, mib) in self.memory.items()
                )
                + self.apps
            ),
            "units": self._show,
            "owners": self._show,
            "fuser": lambda _: f"fuser {self.fuser}\n",
            "end": self._end,
            "mps": lambda _: self.mps,
            "lease": lambda _: self.lease,
            "driver": lambda _: f"gpu {self.driver}\n",
            "mig": lambda _: f"gpu {self.mig}\n",
        }
        found: dict[str, str | Section] = {}
        for name, body in script.sections.items():
            if name == "gpus":
                found[name] = Section(self._gpus(), self.smi_code)
            elif name == "stop":
                found[name] = self._stop(body)
            elif name == "hold":
                found[name] = Section(self.holds.get(script.name, HOLDS[script.name]), 0)
            else:
                found[name] = parts[name](body)
        return found

    def _gpus(self) -> str:
        return "".join(
            f"gpu {index}, {UUIDS[index]}, L40S, {used}, 46068\n"
            for index, used in enumerate(self.used)
        )

    def _show(self, body: str) -> str:
        names = named_units(body)
        return self._blocks(self._with_dependents(names) if "set -- " in body else names)

    def _with_dependents(self, names: list[str]) -> list[str]:
        found = list(names)
        for name in found:
            unit = self.units.get(name, Unit())
            more = [*unit.required_by.split(), *unit.triggers.split()]
            found += [unit for unit in more if unit not in found]
        return found

    def _blocks(self, names: list[str]) -> str:
        return "\n".join(
            f"Id={name}\nNames={name} {self.units[name].names}\n"
            f"LoadState={self.units[name].load}\nActiveState={self.units[name].active}\n"
            f"SubState=x\nInvocationID={self.units[name].invocation}\n"
            f"TriggeredBy={self.units[name].triggers}\n"
            f"RequiredBy={self.units[name].required_by}\nWantedBy={self.units[name].wanted_by}\n"
            f"ControlGroup=/system.slice/{name}\nCanStop={self.units[name].can_stop}\n"
            f"{self.units[name].more}\n"
            if name in self.units
            else f"Id={name}\nLoadState=not-found\nActiveState=inactive\n"
            for name in names
        )

    def _stop(self, body: str) -> Section:
        names = named_units(body)
        shown = self._blocks(self._with_dependents(names))
        if any(name not in self.units or self.units[name].can_stop == "no" for name in names):
            return Section(shown, REFUSED)
        triggers = [x for name in names for x in self.units[name].triggers.split()]
        shown = f"{shown}\n{self._blocks(triggers)}"
        for name in [*triggers, *self._with_dependents(names)]:
            running = self.units[name].active not in ("inactive", "failed")
            for process in list(self.processes):
                inside = f"/system.slice/{name}" in process.cgroups
                if running and inside and process.pid not in self.lingering:
                    self.gone(process.pid)
            self.units[name].active = "inactive"
        return Section(shown, 0)

    def _end(self, body: str) -> str:
        targets = re.search(r"targets='([^']*)'", body)
        lines = []
        for target in targets[1].split() if targets else []:
            pid, start = (int(part) for part in target.split(":"))
            found = next((x for x in self.processes if x.pid == pid), None)
            if found is None:
                lines.append(f"gone {pid}")
            elif found.start_time != start:
                lines.append(f"changed {pid}")
            elif pid in self.immortal:
                found.state = "D"
                lines += [f"sent {pid} TERM", f"sent {pid} KILL", f"left {pid} D nvidia_close"]
            else:
                lines.append(f"sent {pid} TERM")
                self.gone(pid)
        return "\n".join([*lines, ""])

    def gone(self, pid: int) -> None:
        """A process ends, and its memory is released."""
        self.processes = [process for process in self.processes if process.pid != pid]
        index, mib = self.memory.pop(pid, (0, 0))
        used = self.used[index]
        if isinstance(used, int):
            self.used[index] = used - mib


@dataclass
class Scene:
    """A session with a host in memory; the transports remember what they were asked."""

    host: Host
    direct: ScriptedTransport
    session: Session
    clock: Clock

    @property
    def asked(self) -> list[str]:
        """Names of the scripts that the direct way was asked, but for lock and unlock."""
        return [script.name for script in self.direct.asked if script.name not in LOCKS]

    @property
    def writes(self) -> list[str]:
        """Names of the scripts, on any way, that change something but for lock and unlock."""
        links = self.session.links
        ways = [way for way in (links.direct, links.hypervisor, links.node) if way is not None]
        scripts = [
            script for way in ways if isinstance(way, ScriptedTransport) for script in way.asked
        ]
        return [x.name for x in scripts if x.writes and x.name not in LOCKS]


def scene(host: Host, *, links: Links | None = None, **more: object) -> Scene:
    """A session over one direct way to a host, or over the given links."""
    clock = Clock()
    direct = ScriptedTransport(host.answer, name="ssh root@llm")
    ways = links or Links(direct=direct)
    session = Session("llm", ways, clock=clock.read, sleep=clock.sleep, **more)  # type: ignore[arg-type]
    return Scene(host, direct, session, clock)
