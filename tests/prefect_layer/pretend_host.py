"""A host in memory: answers the library's scripts as a machine would, and remembers the writes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from gpu_reclaim.commands import Script, Section
from gpu_reclaim.session import Session
from gpu_reclaim.transport.links import Links
from gpu_reclaim.transport.scripted import Answer, ScriptedTransport

OTHER = "lease token another\nlease owner the nightly run\nlease since 10:00\nlease expires 11:00\n"
"""What the host says of another run's lease."""

NAMESPACE = "pid:[4026532201]"
UUIDS = [f"GPU-0000000{index}-0000-4000-8000-000000000000" for index in range(2)]


@dataclass
class Holder:
    """A process that holds GPU `gpu` with `mib` of memory."""

    pid: int
    title: str
    gpu: int
    mib: int = 1000
    exe: str = "/usr/bin/python3.11"
    unit: str = "sglang.service"


@dataclass
class PretendHost:
    """Two GPUs, one unit, and whoever holds them.

    Attributes:
        holders: Processes that hold a GPU now.
        stuck_mib: Memory in use with no holder, per GPU.
        smi_code: Exit status of nvidia-smi.
        taken: Another run has the host's lease.
        token: Of the lease of ours.
        runs: Ids of the runs on that lease.
        record: Units to be put back.
        broken: They do not start again.
        healths: What the server answers, one after the other, the last for ever.
        asked: Names of all scripts so far; those that change something in `wrote`.
        trouble: Called with each script first; it may raise.
    """

    holders: list[Holder] = field(default_factory=list)
    active: bool = True
    stuck_mib: int = 0
    smi_code: int = 0
    taken: bool = False
    token: str = ""
    runs: str = ""
    record: list[str] = field(default_factory=list)
    broken: bool = False
    healths: list[str] = field(default_factory=lambda: ["200"])
    asked: list[str] = field(default_factory=list)
    wrote: list[str] = field(default_factory=list)
    trouble: Callable[[Script], None] = lambda _: None
    ended: list[tuple[int, str]] = field(default_factory=list)
    stops: int = 0

    def transport(self) -> ScriptedTransport:
        return ScriptedTransport(self.answer, name="ssh root@pretend")

    def session(self, host: str = "pretend", **changes: object) -> Session:
        session = Session(host, Links(direct=self.transport()), units=["sglang"], expected_gpus=2)
        for name, value in changes.items():
            setattr(session, name, value)
        return session

    def answer(self, script: Script) -> Answer:
        try:
            self.trouble(script)
        except Exception as error:
            return error
        return self._carry_out(script)

    def answer_quietly(self, script: Script) -> None:
        """Do what a script says, and lose the answer."""
        self._carry_out(script)

    def _carry_out(self, script: Script) -> dict[str, str | Section]:
        self.asked.append(script.name)
        self.wrote += [script.name] if script.writes else []
        return {
            name: Section(self._hold(script.name, body), 0)
            if name == "hold"
            else self._section(name, body)
            for name, body in script.sections.items()
        }

    def _hold(self, script: str, body: str) -> str:
        if script == "put back what was stopped":
            return self._put_back(body.rpartition("restore ")[2].strip("'"))
        if self.taken:
            return f"{OTHER}status {'lost' if script == 'keep the hold' else 'held'}\n"
        words = dict(re.findall(r"^(TOKEN|RUNS|OWN)='?([^'\n]*?)'?(?: ORDER.*)?$", body, re.M))
        if script in ("take the host", "lock the host"):
            self.token, self.runs = words["TOKEN"], words["RUNS"]
            self.record = ["sglang.service"] if words["OWN"] and self.active else []
        if words["TOKEN"] != self.token:
            return "status lost\n"
        if script == "unlock the host":
            self.token = self.runs = ""
        return "lease owner me\nlease since 10:00\nlease expires 11:00\nstatus taken\n"

    def _put_back(self, whose: str) -> str:
        run = whose.removeprefix("run:")
        ours = run in self.runs.split() if run != whose else whose in ("any", self.token)
        if self.taken or not ours:
            return f"status {'other' if self.taken or self.token else 'nothing'}\n"
        rows = [f"unit {x} {'failed' if self.broken else 'started'}" for x in self.record]
        self.active = self.active or (bool(rows) and not self.broken)
        self.record, self.token, self.runs = [], "", ""
        status = "failed" if self.broken and rows else "done"
        return "\n".join(["owner me", *rows, f"status {status}", ""])

    def _health(self) -> str:
        said = self.healths.pop(0) if len(self.healths) > 1 else self.healths[0]
        code, _, why = said.partition(" ")
        return f"answer 0 {code} 0.1 {json.dumps(why)}" if code else ""

    def _section(self, name: str, body: str) -> Section:
        if name == "stop":
            shown = self._unit()
            # systemd stops what runs; stopping the rest is no event.
            self.active, self.stops = False, self.stops + self.active
            return Section(shown, 0)
        if name == "end":
            return Section(self._end(body), 0)
        texts: dict[str, Callable[[], str]] = {
            "identity": lambda: "hostname pretend\nmachine-id 0123",
            "gpus": self._gpus,
            "units": self._unit,
            "processes": self._processes,
            "health": self._health,
            "lease": lambda: OTHER if self.taken else "",
        }
        code = self.smi_code if name == "gpus" else 0
        return Section(texts.get(name, lambda: "")(), code)

    def _end(self, body: str) -> str:
        targets = re.findall(r"(\d+):(\d+)", re.findall(r"targets='(.*)'", body)[0])
        pids = {int(pid) for pid, _ in targets}
        self.ended += [(pid, "TERM") for pid in sorted(pids)]
        self.holders = [holder for holder in self.holders if holder.pid not in pids]
        return "\n".join(f"sent {pid} TERM" for pid in sorted(pids))

    def _gpus(self) -> str:
        if self.smi_code:
            return "gpu NVIDIA-SMI has failed because it couldn't communicate with the driver."
        used = [
            self.stuck_mib + sum(holder.mib for holder in self.holders if holder.gpu == index)
            for index in range(2)
        ]
        return "\n".join(
            f"gpu {index}, {UUIDS[index]}, NVIDIA L40S, {used[index]}, 46068" for index in range(2)
        )

    def _unit(self) -> str:
        state = "active\nSubState=running" if self.active else "inactive\nSubState=dead"
        return (
            f"Id=sglang.service\nNames=sglang.service\nLoadState=loaded\nActiveState={state}\n"
            "TriggeredBy=\nCanStop=yes"
        )

    def _processes(self) -> str:
        lines = [f"ns {NAMESPACE}", "major 195 nvidia", "self 900", "session 900"]
        lines += ["sees fds", "sees nodes", "sees people"]
        for holder in self.holders:
            pid = holder.pid
            stat = " ".join(["S", "1", "1", "1", *["0"] * 15, str(pid * 10), "0"])
            lines += [
                f"link '{pid}/fd/5' -> '/dev/nvidia{holder.gpu}'",
                f"node c3 {holder.gpu} character special file|{pid}/fd/5",
                f"{pid}/comm:{holder.title[:15]}\x01",
                f"{pid}/cmdline:{holder.title}",
                f"{pid}/stat:{pid} ({holder.title[:15]}) {stat}\x01",
                f"{pid}/cgroup:0::/system.slice/{holder.unit}\x01",
                f"exe '{pid}/exe' -> '{holder.exe}'",
            ]
        return "\n".join(lines)


def daemon() -> Holder:
    """The driver's own, which is spared."""
    name = "nvidia-persistenced"
    return Holder(7, name, 0, 0, f"/usr/bin/{name}", f"{name}.service")


def workers() -> list[Holder]:
    """A server's, on both GPUs."""
    return [Holder(100 + gpu, f"sglang::scheduler_TP{gpu}", gpu, 40_000) for gpu in range(2)]


def serving() -> PretendHost:
    """A host whose server holds both GPUs, beside a persistence daemon."""
    return PretendHost([daemon(), *workers()])
