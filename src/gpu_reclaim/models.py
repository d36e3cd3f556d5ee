"""The values that travel between steps, and the report: plain pydantic models, no behaviour."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

Via = Literal["auto", "ssh", "hypervisor"]


class Verdict(StrEnum):
    """How a reclaim ended. The names are a stable contract for automations: never rename one."""

    CLEAN = "clean"
    RESIDUE = "residue"
    PLANNED = "planned"
    HELD_BY_PROTECTED = "held_by_protected"
    HELD_BY_OTHER_GUEST = "held_by_other_guest"
    HELD_UNSEEN = "held_unseen"
    UNKILLABLE = "unkillable"
    ZOMBIE = "zombie"
    RESPAWNED = "respawned"
    GPU_MISSING = "gpu_missing"
    DRIVER_FAULT = "driver_fault"
    IDENTITY_MISMATCH = "identity_mismatch"
    GUEST_LOCKED = "guest_locked"
    GUEST_STOPPED = "guest_stopped"
    UNREACHABLE = "unreachable"
    UNKNOWN = "unknown"


GOOD_VERDICTS = frozenset({Verdict.CLEAN, Verdict.RESIDUE, Verdict.PLANNED})
"""Verdicts with which `reclaim_gpus` returns; with every other one it raises."""


class ReclaimPolicy(BaseModel):
    """What a reclaim may do, and how long it may take."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Literal["reclaim", "plan"] = Field(
        default="reclaim",
        title="Mode",
        description="reclaim frees the GPUs; plan only says what would be done.",
    )
    gpus: list[Annotated[int, Field(ge=0, le=1023)]] = Field(
        default=[], title="GPUs", description="Indexes of the wanted GPUs. Empty: all of the host."
    )
    match: list[str] = Field(
        default=[],
        title="Match",
        description="Regular expressions for processes to end although they hold no GPU, matched "
        "against executable, title and command line. Protected processes are never ended; a "
        "protected unit named in full (nvidia-dcgm.service) is stopped through systemd.",
    )
    protect: list[str] = Field(
        default=[],
        title="Protect",
        description="Executables, process names or units never to be signalled or stopped, with "
        "wildcards, for example ollama*. Adds to the host's and the built-in list.",
    )
    term_grace_s: float = Field(
        default=5,
        ge=0,
        le=600,
        title="Term grace (s)",
        description="Seconds between TERM and KILL.",
    )
    settle_timeout_s: float = Field(
        default=60,
        ge=0,
        le=3600,
        title="Settle time limit (s)",
        description="Longest wait for GPU memory to be released, in seconds.",
    )
    stable_samples: int = Field(
        default=3,
        ge=1,
        le=100,
        title="Stable samples",
        description="Readings in a row that must show the GPUs free.",
    )
    residue_mib: int = Field(
        default=100,
        ge=0,
        le=1_000_000,
        title="Residue (MiB)",
        description="Memory per GPU that may remain in use with nobody holding it, in MiB.",
    )
    strict_zero: bool = Field(
        default=False, title="Strict zero", description="Refuse any residue above 0 MiB."
    )
    via: Via = Field(
        default="auto",
        title="Via",
        description="How the host is reached: its own SSH, its hypervisor, or whichever answers.",
    )
    approve: bool = Field(
        default=False,
        title="Approve",
        description="Not in this version: refused. Will ask a person before anything is touched.",
    )
    hold_minutes: float = Field(
        default=0,
        ge=0,
        le=10_080,
        title="Hold (minutes)",
        description="How long the stopped units and their triggers cannot be started afterwards, "
        "in minutes; then the host puts them back by itself. 0: no hold, they stay stopped. "
        "exclusive_gpus renews it as long as its block runs, and takes 0 for 5.",
    )
    wait_minutes: float = Field(
        default=0,
        ge=0,
        le=10_080,
        title="Wait for the host (minutes)",
        description="Longest wait while another run holds the host, in minutes. 0: fail at once, "
        "and say who holds it.",
    )
    on_intruder: Literal["go on", "fail"] = Field(
        default="go on",
        title="On an intruder",
        description="What exclusive_gpus does when somebody else uses the GPUs during its block: "
        "go on (it is named in log, event and report) or fail.",
    )

    @property
    def limit_mib(self) -> int:
        """Memory per GPU that may remain in use."""
        return 0 if self.strict_zero else self.residue_mib

    @property
    def named_units(self) -> list[str]:
        """Services that `match` names in full, with or without the point escaped."""
        names = [text.replace("\\.", ".") for text in self.match]
        return [name for name in names if re.fullmatch(r"[A-Za-z0-9:_.@-]+\.service", name)]

    def wanted(self, gpus: list[Gpu]) -> list[Gpu]:
        """Those of the GPUs that are wanted."""
        return [gpu for gpu in gpus if not self.gpus or gpu.index in self.gpus]

    def in_use(self, gpus: list[Gpu]) -> list[Gpu]:
        """Those of the wanted GPUs with more memory in use than may remain."""
        return [x for x in self.wanted(gpus) if (x.memory_used_mib or 0) > self.limit_mib]

    @field_validator("match")
    @classmethod
    def _regexes(cls, patterns: list[str]) -> list[str]:
        for pattern in patterns:
            if not pattern.strip():
                raise ValueError("match: an empty pattern would match every process")
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"match: {pattern!r} is no regular expression: {error}") from error
            if re.search(pattern, ""):
                raise ValueError(f"match: {pattern!r} matches every process")
        return patterns

    @field_validator("protect")
    @classmethod
    def _names(cls, names: list[str]) -> list[str]:
        if any(not name.strip() for name in names):
            raise ValueError("protect: an empty name protects nothing; remove it")
        return names


class Gpu(BaseModel):
    """One GPU as nvidia-smi reads it; memory in MiB, None where it gave no number."""

    index: int
    uuid: str
    name: str
    memory_used_mib: int | None
    memory_total_mib: int | None
    note: str = ""


class GpuApp(BaseModel):
    """A compute process as nvidia-smi lists it. Its pid may belong to another namespace."""

    gpu_uuid: str
    pid: int
    memory_used_mib: int | None


class GpuReading(BaseModel):
    """What nvidia-smi said.

    Attributes:
        gpus: The rows, by index.
        apps: The compute processes, where they were asked for.
        apps_known: They could be listed.
        problem: Why the rows cannot be trusted (missing tool, exit status, text); empty when fine.
    """

    gpus: list[Gpu] = []
    apps: list[GpuApp] = []
    apps_known: bool = True
    problem: str = ""


class Process(BaseModel):
    """One process, by identity: (host, PID namespace, pid, start time).

    Attributes:
        start_time: Clock ticks after boot (field 22 of /proc/PID/stat).
        state: Letter of /proc/PID/stat (R, S, D, Z, T and so on).
        exe: The executable's path; empty where it could not be read.
        name: For people: title, or program and script; never further arguments.
        command_line: Everything, for matching; left out of dumps and representations.
        cgroups: Control group paths, without the hierarchy's name.
        devices: Paths of NVIDIA device nodes it holds, with `fd` or `map` as the way.
    """

    pid: int
    start_time: int
    ppid: int = 0
    session: int = 0
    state: str = ""
    exe: str = ""
    comm: str = ""
    name: str = ""
    command_line: str = Field(default="", exclude=True, repr=False)
    cgroups: list[str] = []
    devices: list[str] = []


class ProcessTable(BaseModel):
    """What was seen in /proc.

    Attributes:
        pid_namespace: As /proc/self/ns/pid names it, for example `pid:[4026532201]`.
        boot_id: Names the machine's present run.
        ourselves: Our own shell on the host and its ancestors.
        processes: Holders, members of the asked units' control groups, and, if asked, all others.
        uninspected: Processes whose descriptors could not be read.
        cut: Some descriptors of files outside /dev could not be followed in time.
        root: We look as root; others see only their own processes' descriptors.
        fuser_only: Pids that fuser named and the scan did not confirm.
    """

    pid_namespace: str = ""
    boot_id: str = ""
    ourselves: list[int] = []
    processes: list[Process] = []
    uninspected: list[int] = []
    cut: bool = False
    root: bool = True
    fuser_only: list[int] = []

    @property
    def holders(self) -> list[Process]:
        """Processes that hold an NVIDIA device."""
        return [process for process in self.processes if process.devices]


class UnitState(BaseModel):
    """A systemd unit, from `systemctl show`.

    Attributes:
        invocation: Names its present or last run; another one means that it was started anew.
        triggered_by: Sockets, timers and paths that start it.
        required_by: Units that systemd stops along with it.
        end_actions: What systemd does to the machine when it ends, for example poweroff.
        after: Units that systemd starts before it and stops after it.
        wanted_by: Units whose start, or whose running, starts it.
    """

    name: str
    names: list[str] = []
    load_state: str
    active_state: str
    sub_state: str = ""
    invocation: str = ""
    triggered_by: list[str] = []
    required_by: list[str] = []
    after: list[str] = []
    wanted_by: list[str] = []
    control_group: str = ""
    can_stop: bool = True
    end_actions: list[str] = []

    @property
    def active(self) -> bool:
        """It runs, or systemd is about to run it again."""
        return self.active_state not in ("inactive", "failed")


class Owner(BaseModel):
    """What a process belongs to."""

    kind: Literal[
        "unit", "user unit", "guest", "container", "Slurm step", "scope", "session", "none"
    ]
    name: str = ""

    def __str__(self) -> str:
        """For example `unit sglang.service`."""
        return f"{self.kind} {self.name}".strip()


class Step(BaseModel):
    """One step of a reclaim.

    Attributes:
        via: The transport's name; empty where none was needed.
        at: When it began, as `13:05:59`, by the clock and in the time zone of whoever ran it.
    """

    name: str
    via: str = ""
    at: str = ""
    attempts: int = 1
    seconds: float = 0


class Lease(BaseModel):
    """Who holds a host, as the host itself says; times by the host's clock.

    Attributes:
        runs: Ids of the Prefect run that took it and of the runs that it is part of.
    """

    token: str = ""
    owner: str = ""
    url: str = ""
    runs: str = ""
    since: str = ""
    expires: str = ""

    def __str__(self) -> str:
        """For example `root@pve, pid 4711 since ... until ...`."""
        who = f"{self.owner} {self.url}".strip() or "somebody"
        return f"{who} since {self.since or '?'} until {self.expires or '?'}"


class Survey(BaseModel):
    """All that one look read.

    Attributes:
        other_guests: Where else holders are (`guest 130`, `the node itself`) to who they are;
            filled only when the node was asked.
        restarting: Units that are about to run again, though a process of theirs was ended.
        running_again: The host's units that run though they were to be stopped, each with the
            live units that may have started it.
        dependents: Units that systemd stops along with the host's.
        starters: Pid of a holder to who started it; filled only in the last look.
        undead: Dead and uninterruptible processes; filled only when memory is in use and nobody
            is seen to hold it.
        inside: Holders in this very guest that only the node sees.
        lease: Who holds the host at present; read in the first look alone.
        driver: Driver version; asked only when memory is in use and nobody is seen to hold it.
        mig: A GPU is in MIG mode; asked only then.
    """

    host: str
    step: Step
    hostname: str = ""
    machine_id: str = ""
    reading: GpuReading = GpuReading()
    units: list[UnitState] = []
    table: ProcessTable = ProcessTable()
    other_guests: dict[str, list[str]] = {}
    restarting: list[str] = []
    running_again: dict[str, list[str]] = {}
    dependents: list[UnitState] = []
    starters: dict[int, str] = {}
    undead: list[Process] = []
    inside: list[str] = []
    lease: Lease | None = None
    driver: str = ""
    mig: bool = False


class Ended(BaseModel):
    """A process that was ended, or that we tried to end.

    Attributes:
        signal: The last signal it was sent; empty when it was gone before.
        outcome: ended, gone (before us), changed (another process had its pid), denied, or its
            state letter after KILL.
        wchan: Where in the kernel it waits, if it is still there.
    """

    pid: int
    start_time: int
    name: str
    owner: str
    signal: str
    via: str
    outcome: str = "ended"
    devices: list[str] = []
    wchan: str = ""


class Spared(BaseModel):
    """A process that was looked at and left alone, and why.

    Attributes:
        command: With what a person stops it or what owns it; empty where that is not known.
        idle: It is of a kind known to hold devices without memory of its own.
        by_command: It is asked to end by its own command, once its clients are gone (MPS).
        straddles: It uses wanted GPUs and others too.
    """

    pid: int
    name: str
    owner: str
    reason: str
    devices: list[str] = []
    command: str = ""
    idle: bool = False
    by_command: bool = False
    straddles: bool = False


class StoppedUnit(BaseModel):
    """A unit that was stopped, with the live sockets, timers and paths stopped before it.

    Attributes:
        active: It ran; False where only its triggers were live.
        because: Why systemd stopped it along with another; empty for a unit that was named.
    """

    unit: str
    active: bool = True
    triggered_by: list[str] = []
    because: str = ""


class Outcome(BaseModel):
    """What a step did."""

    step: Step
    stopped: list[StoppedUnit] = []
    ended: list[Ended] = []
    spared: list[Spared] = []
    note: str = ""


class Sample(BaseModel):
    """One reading of `settle`: memory in MiB by GPU index, and the unprotected holders."""

    seconds: float
    memory_mib: dict[int, int | None]
    holders: list[str]
    problem: str = ""


class Settled(BaseModel):
    """How the wait for free GPUs went; `free` is False when it ended for another reason."""

    step: Step
    free: bool
    reason: str
    samples: list[Sample] = []


RestoreOutcome = Literal["started", "running", "edited", "gone", "failed"]
"""What became of a unit that a run had stopped: started again; left alone because it runs already,
was edited meanwhile, or is unknown now (it was transient); or it did not start."""


class RestoredUnit(BaseModel):
    """A unit, socket, timer or path that a run had stopped, and what became of it."""

    unit: str
    outcome: RestoreOutcome
    detail: str = ""

    def __str__(self) -> str:
        """For example `sglang.service: started`."""
        return f"{self.unit}: {self.outcome}{f' ({self.detail})' if self.detail else ''}"


class RestoreReport(BaseModel):
    """What was put back on a host.

    Attributes:
        owner: Whose hold was ended, and the run's URL; empty where there was none.
        restored: In the order of putting back.
        complete: Nothing is left to be put back.
        ours: The hold was still that of whoever asked, or was asked for by its record alone; False
            when another run holds the host by now, or somebody had put back everything before.
    """

    host: str
    summary: str
    remedy: str = ""
    owner: str = ""
    restored: list[RestoredUnit] = []
    complete: bool = True
    ours: bool = True

    def __str__(self) -> str:
        """The report for a terminal."""
        lines = [f"{self.host}: {self.summary}"]
        lines += [f"what to do: {self.remedy}"] if self.remedy else []
        return "\n".join([*lines, *(f"  {row}" for row in self.restored)])


class Intruder(BaseModel):
    """Who uses GPUs, or is a held unit that runs, while they are held for a stage.

    Attributes:
        at: When it was first seen, as `13:05:59`, by the worker's clock.
        pid: 0 for a unit.
    """

    at: str
    pid: int = 0
    start_time: int = 0
    name: str
    owner: str = ""
    devices: list[str] = []

    def __str__(self) -> str:
        """For example `python3 (pid 412, session session-3, /dev/nvidia0 (fd))`."""
        if not self.pid:
            return f"{self.owner}, which runs although it is held"
        known = [f"pid {self.pid}", *([self.owner] if self.owner != "none" else [])]
        return f"{self.name} ({', '.join([*known, *self.devices[:3]])})"


class Taken(BaseModel):
    """A host that was taken.

    Attributes:
        leftovers: What an earlier run had left stopped, and what became of it.
        waited: Another run had it first.
    """

    leftovers: list[RestoredUnit] = []
    waited: bool = False


class ReclaimReport(BaseModel):
    """What a reclaim found, did and proved.

    Attributes:
        held_until: When the host ends the hold by itself, by its clock; empty: no hold.
        leftovers: What an earlier run had left stopped, and what became of it before this one.
        restored: What this run put back, because it did not end well.
        restore: One sentence on that.
    """

    host: str
    verdict: Verdict
    summary: str
    remedy: str = ""
    gpus_before: list[Gpu] = []
    gpus_after: list[Gpu] = []
    stopped: list[StoppedUnit] = []
    ended: list[Ended] = []
    spared: list[Spared] = []
    steps: list[Step] = []
    seconds: float = 0
    held_until: str = ""
    leftovers: list[RestoredUnit] = []
    restored: list[RestoredUnit] = []
    restore: str = ""

    def __str__(self) -> str:
        """The report for a terminal: verdict, remedy, units, processes."""
        planned = self.verdict == Verdict.PLANNED
        late = {gpu.uuid: gpu.memory_used_mib for gpu in self.gpus_after}
        lines = [f"{self.host}: {self.verdict}: {self.summary}"]
        lines += [f"what to do: {self.remedy}"] if self.remedy else []
        for gpu in self.gpus_before:
            after = f", now {late.get(gpu.uuid)} MiB" if late else ""
            lines.append(f"  GPU {gpu.index}: {gpu.memory_used_mib} MiB in use{after}")
        verb = "would stop" if planned else "stopped"
        for unit in self.stopped:
            because = f", because {unit.because}" if unit.because else ""
            lines.append(f"  {verb} {' '.join([unit.unit, *unit.triggered_by])}{because}")
        for row in self.ended:
            what = "would end" if planned else _fate(row)
            lines.append(f"  {what}: {_line(row)}")
        lines += [f"  spared: {_line(row)}: {row.reason}" for row in self.spared]
        lines += [f"  put back first, of an earlier run: {row}" for row in self.leftovers]
        lines += [f"  {self.restore}"] if self.restore else []
        lines += [f"  put back: {row}" for row in self.restored]
        lines += [f"  held until {self.held_until}, then put back"] if self.held_until else []
        return "\n".join(lines)


def _line(row: Ended | Spared) -> str:
    known = [f"pid {row.pid}"] if row.pid else []
    known += [row.owner] if row.owner not in ("", "none") else []
    known += [f"holds {', '.join(row.devices)}"] if row.devices else []
    return f"{row.name} ({', '.join(known)})" if known else row.name


def _fate(row: Ended) -> str:
    if len(row.outcome) == 1:
        return f"still there (state {row.outcome}) after {row.signal}"
    return f"{row.outcome} {row.signal}".strip()
