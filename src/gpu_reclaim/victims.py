"""Who is to be ended, and who is spared and why: pure functions over what was seen.

Wanted are holders of NVIDIA devices, what is left in the control groups of the units being stopped,
and whom the policy's `match` names. Nobody wanted is ended if a protection covers it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from gpu_reclaim.models import GpuReading, Process, ProcessTable, ReclaimPolicy, Spared
from gpu_reclaim.owners import in_unit, owner, stop_command

KEEPS_DRIVER = "it keeps the driver or the fabric up"
MONITORS = "it monitors"
DISPLAYS = "it drives a display"
SYSTEM = "the machine needs it"

PROTECTED = {
    # NVIDIA's own services; KILL of the DCGM ones has frozen GPUs (NVIDIA/dcgm-exporter#84).
    "nvidia-persistenced": KEEPS_DRIVER,
    "nv-fabricmanager": KEEPS_DRIVER,
    "nvidia-fabricmanager": KEEPS_DRIVER,
    "nvidia-imex": KEEPS_DRIVER,
    "nvidia-powerd": KEEPS_DRIVER,
    "nvidia-cuda-mps-control": "MPS is ended by its own command, after its clients",
    "nvidia-cuda-mps-server": "MPS is ended by its own command, after its clients",
    "nv-hostengine": MONITORS,
    "dcgm-exporter": MONITORS,
    "nvsm_core": MONITORS,
    "node_exporter": MONITORS,
    "prometheus-node-exporter": MONITORS,
    "nvidia_gpu_exporter": MONITORS,
    "telegraf": MONITORS,
    "netdata": MONITORS,
    "nvidia-smi": MONITORS,
    "nvtop": MONITORS,
    "Xorg": DISPLAYS,
    "Xwayland": DISPLAYS,
    "gnome-shell": DISPLAYS,
    "kwin_wayland": DISPLAYS,
    "kwin_x11": DISPLAYS,
    "sddm": DISPLAYS,
    "gdm3": DISPLAYS,
    "weston": DISPLAYS,
    "systemd": SYSTEM,
    "systemd-logind": SYSTEM,
    "systemd-udevd": SYSTEM,
    "dbus-daemon": SYSTEM,
    "sshd": SYSTEM,
    "sshd-session": SYSTEM,
    "dockerd": SYSTEM,
    "containerd": SYSTEM,
    "lxc-start": SYSTEM,
}
"""Executables never signalled, by base name (from mig-parted's list of GPU clients, NVIDIA's
documentation and reports of people whose scripts ended the wrong process)."""

_SHORT = {name[:15]: why for name, why in PROTECTED.items()}
"""The same as /proc/PID/comm has them, for when the executable cannot be read (proc(5))."""

PROTECTED_UNITS = (
    "nvidia-persistenced.service",
    "nvidia-fabricmanager.service",
    "nvidia-imex.service",
    "nvidia-powerd.service",
    "nvidia-mps.service",
    "nvsm*.service",
    "*dcgm*.service",
    "*node-exporter.service",
    "*node_exporter.service",
)
"""Units whose processes are never signalled, with wildcards, whatever their executable is."""

NEVER_STOPPED = (
    *PROTECTED_UNITS,
    "*.slice",
    "*.target",
    "*.mount",
    "init.scope",
    "ssh.service",
    "ssh.socket",
    "sshd.service",
    "dbus*.service",
    "systemd-*.service",
    "user@*.service",
)
"""Units that are refused although a block names them: stopping them cuts the machine off."""

ZERO_MEMORY = frozenset({"nvidia-persistenced", "nv-hostengine", "dcgm-exporter", "nvidia-smi"})
"""Of these it is known that they hold devices without GPU memory of their own."""

UNREAD = "its descriptors could not be read"

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
    choice = Choice()
    for process in table.processes:
        if not wanted(process, holders, policy, units):
            continue
        reason = protection(process, table, policy, names)
        if reason:
            choice.spared.append(spare(process, reason))
        else:
            choice.victims.append(process)
    choice.spared.extend(_unseen(table))
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
    if not {app.pid for app in reading.apps} <= holders:
        return frozenset()
    uuids = {gpu.uuid for gpu in reading.gpus if gpu.index in policy.gpus}
    return frozenset(app.pid for app in reading.apps if app.gpu_uuid in uuids)


def matches(process: Process, policy: ReclaimPolicy) -> bool:
    """The policy's `match` names it by executable, title or command line."""
    texts = (process.exe, process.name, process.comm, process.command_line)
    return any(re.search(pattern, text) for pattern in policy.match for text in texts)


def protection(
    process: Process, table: ProcessTable, policy: ReclaimPolicy, names: Iterable[str] = ()
) -> str:
    """Why it must not be signalled; empty when it may be."""
    if process.pid in table.ourselves or process.pid == 1:
        return "it is this run itself, or what started it"
    if not process.exe and 2 in (process.pid, process.ppid):  # noqa: PLR2004 - kthreadd and its threads
        return "it is a kernel thread"
    program = process.exe.rpartition("/")[2] or process.comm
    why = PROTECTED.get(program) if process.exe else _SHORT.get(process.comm)
    if why:
        return f"protected: {why}"
    belongs = owner(process.cgroups)
    if belongs.kind == "unit" and protected_name(PROTECTED_UNITS, belongs.name):
        return f"protected: it belongs to {belongs}"
    if belongs.kind == "guest":
        return f"it belongs to {belongs}, which is another machine"
    name = protected_name(names, program, process.name, process.comm, belongs.name)
    if name:
        return f"protected by name: {name}"
    if belongs.kind == "container" and not matches(process, policy):
        command = stop_command(belongs) or "its engine's own command"
        return f"it belongs to {belongs}; stop that with: {command}"
    return ""


def spare(process: Process, reason: str) -> Spared:
    """The report's line about a process left alone."""
    return Spared(
        pid=process.pid,
        name=process.name,
        owner=str(owner(process.cgroups)),
        reason=reason,
        devices=process.devices,
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
    more = len(unread) - MAX_UNREAD_ROWS
    if more > 0:
        spared.append(Spared(pid=0, name=f"{more} more processes", owner="", reason=UNREAD))
    return spared


def protected_name(patterns: Iterable[str], *names: str) -> str:
    """The first pattern (with wildcards) that covers one of the names; empty when none does."""
    found = (x for x in patterns if any(fnmatchcase(name, x) for name in names))
    return next(found, "")


def never_stopped(unit: str) -> bool:
    """Stopping this unit would cut the machine off or break the driver."""
    return bool(protected_name(NEVER_STOPPED, unit))
