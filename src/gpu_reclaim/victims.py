"""Who is to be ended, and who is spared and why: pure functions over what was seen.

Wanted are holders of NVIDIA devices, what is left in the control groups of the units being stopped,
and whom the policy's `match` names. Nobody wanted is ended if a protection covers it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from gpu_reclaim.models import GpuReading, Process, ProcessTable, ReclaimPolicy, Spared
from gpu_reclaim.owners import in_unit, owner, services, stop_command
from gpu_reclaim.protected import (
    MPS_SERVER,
    PROTECTED,
    PROTECTED_UNITS,
    ZERO_MEMORY,
    protected_name,
    short_protected,
)

MANAGED = ("container", "Slurm step")
"""Owners whose own manager would start the process again, or take its end for a fault."""

GROUPS = ("unit", "user unit", "scope", "container", "Slurm step")
"""Owners whose processes work together: ending one of them stops the others' work."""

MATCHED = 4096
"""Characters of a command line that `match` looks at: a pattern's time grows with them."""

UNREAD = "its descriptors could not be read"
NOT_FOLLOWED = "they could not be followed in time"
UNASKED = "which you did not ask for"

MAX_UNREAD_ROWS = 10
"""Without root every other user's process is unread; beyond these they are counted in one row."""


@dataclass(frozen=True)
class Choice:
    """Whom to end, and whom not."""

    victims: list[Process] = field(default_factory=list)
    spared: list[Spared] = field(default_factory=list)


def choose(
    table: ProcessTable,
    reading: GpuReading,
    policy: ReclaimPolicy,
    *,
    units: Sequence[str] = (),
    protect: Sequence[str] = (),
) -> Choice:
    """Sort what was seen into victims and spared.

    Args:
        table: The processes seen.
        reading: GPUs and compute processes; needed when only some GPUs are wanted.
        policy: What may be done.
        units: Full names of the units being stopped.
        protect: The host's own additions to the protected names.
    """
    names = [*protect, *policy.protect]
    holders = wanted_holders(table, reading, policy)
    elsewhere = _uses_elsewhere(table, reading, policy)
    choice = Choice()
    for process in table.processes:
        if not wanted(process, holders, policy, units):
            continue
        reason = protection(process, table, policy, names)
        others = elsewhere.get(process.pid, "")
        if reason or others:
            row = spare(process, reason or others)
            row.straddles = bool(others) and not reason and process.pid in holders
            row.by_command = row.by_command and not policy.gpus and not _named(process, names)
            choice.spared.append(row)
        else:
            choice.victims.append(process)
    seen = {process.pid for process in choice.victims}
    choice.spared.extend(row for row in _unseen(table) if row.pid not in seen)
    return choice


def wanted(
    process: Process, wanted_pids: Collection[int], policy: ReclaimPolicy, units: Sequence[str]
) -> bool:
    """It holds a wanted GPU, is left of a stopped unit, or is named by the policy."""
    if process.pid in wanted_pids:
        return True
    return matches(process, policy) or any(in_unit(process.cgroups, unit) for unit in units)


def wanted_holders(
    table: ProcessTable, reading: GpuReading, policy: ReclaimPolicy
) -> frozenset[int]:
    """Pids of the holders of wanted GPUs.

    CUDA programs open every device node though they use one GPU (cupy/cupy#1930), so with part of
    the GPUs wanted only nvidia-smi's own list of processes decides; and only if everybody on it is
    a holder here, for otherwise its pids are those of another namespace, and mean nobody here.
    """
    holders = frozenset(process.pid for process in table.holders)
    if not policy.gpus:
        return holders
    if not trusted(table, reading):
        return frozenset()
    uuids = {gpu.uuid for gpu in reading.gpus if gpu.index in policy.gpus}
    return frozenset(app.pid for app in reading.apps if app.gpu_uuid in uuids)


def _uses_elsewhere(
    table: ProcessTable, reading: GpuReading, policy: ReclaimPolicy
) -> dict[int, str]:
    """Pid to why it is not to be ended for some GPUs alone: it, or its group, uses others."""
    if not policy.gpus:
        return {}
    if not trusted(table, reading):
        return {x.pid: "nvidia-smi does not tell which GPU it uses" for x in table.holders}
    index = {gpu.uuid: gpu.index for gpu in reading.gpus}
    uses: dict[int, set[int]] = {}
    for app in reading.apps:
        if app.gpu_uuid in index:
            uses.setdefault(app.pid, set()).add(index[app.gpu_uuid])
    owners = {process.pid: owner(process.cgroups) for process in table.processes}
    groups: dict[str, set[int]] = {}
    for pid, of in owners.items():
        if of.kind in GROUPS:
            groups.setdefault(str(of), set()).update(uses.get(pid, ()))
    found = {}
    for pid, of in owners.items():
        own = uses.get(pid, set())
        shared = groups.get(str(of), set())
        if own - set(policy.gpus):
            also = "also " if own & set(policy.gpus) else ""
            found[pid] = f"it {also}uses {_gpu_names(own - set(policy.gpus))}, {UNASKED}"
        elif shared - set(policy.gpus):
            found[pid] = f"its {of} also uses {_gpu_names(shared - set(policy.gpus))}, {UNASKED}"
    return found


def trusted(table: ProcessTable, reading: GpuReading) -> bool:
    """Everybody that nvidia-smi lists holds a device here, so its pids are those of here."""
    return {app.pid for app in reading.apps} <= {process.pid for process in table.holders}


def _gpu_names(indexes: Iterable[int]) -> str:
    return ", ".join(f"GPU {index}" for index in sorted(indexes))


def matches(process: Process, policy: ReclaimPolicy) -> bool:
    """The policy's `match` names it by executable, title or command line."""
    texts = (process.exe, process.name, process.comm, process.command_line)
    # A unit of the driver named in full is meant as that unit, not as a word in a command line.
    units = {unit for unit in policy.named_units if protected_name(PROTECTED_UNITS, unit)}
    patterns = [text for text in policy.match if text.replace("\\.", ".") not in units]
    return any(re.search(pattern, text[:MATCHED]) for pattern in patterns for text in texts)


def protection(
    process: Process, table: ProcessTable, policy: ReclaimPolicy, names: Iterable[str] = ()
) -> str:
    """Why it must not be signalled; empty when it may be."""
    if process.pid in table.ourselves or process.pid == 1:
        return "it is this run itself, or what started it"
    if not process.exe and 2 in (process.pid, process.ppid):  # noqa: PLR2004 - kthreadd and its threads
        return "it is a kernel thread"
    runs = program(process)
    why = PROTECTED.get(runs, "") if process.exe else short_protected(process.comm)
    if why:
        return f"protected: {why}"
    belongs = owner(process.cgroups)
    if belongs.kind == "guest":
        return f"it belongs to {belongs}, which is another machine"
    driver_unit = protected_name(PROTECTED_UNITS, *services(process.cgroups))
    if driver_unit:
        return f"protected: it belongs to {belongs}"
    name = _named(process, names)
    if name:
        return f"protected by name: {name}"
    if belongs.kind in MANAGED and not matches(process, policy):
        command = stop_command(belongs) or "its engine's own command"
        return f"it belongs to {belongs}; stop that with: {command}"
    return ""


def _named(process: Process, names: Iterable[str]) -> str:
    """The name of host or policy that protects it; empty when none does."""
    groups = services(process.cgroups)
    units = [owner(process.cgroups).name, *groups, *(x.removesuffix(".service") for x in groups)]
    known = (program(process), process.exe, process.name, process.comm, *units)
    return protected_name(names, *known)


def program(process: Process) -> str:
    """The executable's base name; the short name where the executable cannot be read."""
    return process.exe.rpartition("/")[2] or process.comm


def spare(process: Process, reason: str) -> Spared:
    """The report's line about a process left alone."""
    belongs = owner(process.cgroups)
    return Spared(
        pid=process.pid,
        name=process.name,
        owner=str(belongs),
        reason=reason,
        devices=process.devices,
        command=stop_command(belongs),
        idle=program(process) in ZERO_MEMORY,
        by_command=program(process) == MPS_SERVER and belongs.kind not in (*MANAGED, "guest"),
    )


def _unseen(table: ProcessTable) -> list[Spared]:
    known = {process.pid: process for process in table.processes}
    unread = table.uninspected
    rows = [(pid, UNREAD) for pid in unread[:MAX_UNREAD_ROWS]]
    rows += [(pid, "named by fuser alone, not confirmed") for pid in table.fuser_only]
    spared = [
        spare(known.get(pid, Process(pid=pid, start_time=0, name="not inspected")), reason)
        for pid, reason in rows
    ]
    if table.cut:
        spared.append(Spared(pid=0, name="descriptors outside /dev", owner="", reason=NOT_FOLLOWED))
    more = len(unread) - MAX_UNREAD_ROWS
    if more > 0:
        spared.append(Spared(pid=0, name=f"{more} more processes", owner="", reason=UNREAD))
    return spared


def is_gpu_node(device: str) -> bool:
    """A held device is a GPU's own node: `/dev/nvidia0 (fd)`, not `/dev/nvidiactl (fd)`."""
    path = device.rpartition(" (")[0].removesuffix(" (deleted)")
    return path.rpartition("nvidia")[2].isdigit()
