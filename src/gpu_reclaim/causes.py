"""Every way a reclaim can end: what it means, how it is recognised, what to do now.

One source for both: the remedy in a report, and the table in docs/verdicts.md (`make docs`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpu_reclaim.models import Verdict


@dataclass(frozen=True)
class Finding:
    """A verdict with its sentence, and what a person should do now."""

    verdict: Verdict
    summary: str
    remedy: str = ""


@dataclass(frozen=True)
class Cause:
    """One way a reclaim can end.

    Attributes:
        verdict: The verdict it gives.
        meaning: What it means, for people.
        recognised: By what it is recognised.
        remedy: What a person should do now; words in braces are filled in. Empty: nothing.
    """

    verdict: Verdict
    meaning: str
    recognised: str
    remedy: str = ""

    def finding(self, summary: str, **details: object) -> Finding:
        """This cause, as it was found on a host."""
        return Finding(self.verdict, summary, self.remedy.format(**details))

    def advice(self, **details: object) -> str:
        """What to do now, with its details filled in."""
        return self.remedy.format(**details)


CLEAN = Cause(
    Verdict.CLEAN,
    "Every wanted GPU is free.",
    "Each expected GPU's row was read, at 0 MiB, in several readings in a row; no unprotected "
    "process holds an NVIDIA device.",
)
RESIDUE = Cause(
    Verdict.RESIDUE,
    "Free but for a small rest that the driver keeps.",
    "As clean, with 1 to `residue_mib` MiB left on a GPU and no unprotected process holding it. "
    "`strict_zero` refuses it.",
)
PLANNED = Cause(
    Verdict.PLANNED,
    "Nothing was touched; the report says what a reclaim would do.",
    'The policy\'s mode is "plan". A plan raises too, where a reclaim would be refused before it '
    "begins.",
)
PROTECTED = Cause(
    Verdict.HELD_BY_PROTECTED,
    "The memory belongs to a process that must not be ended: one of the driver's own, a display, "
    "one named by `protect`, or one of a container or Slurm job that `match` does not name.",
    "Memory above the limit; nvidia-smi lists the process with it, or lists nobody while the "
    "process has the GPU's node open and is not known to work without memory. Refused before "
    "anything is touched where nvidia-smi lists it.",
    "stop it yourself if it may be stopped{commands}, then run this again",
)
STRADDLES = Cause(
    Verdict.HELD_BY_PROTECTED,
    "Only some GPUs are wanted, and what uses them uses others too.",
    "nvidia-smi lists the process, or another of its unit or container, on a GPU that is not in "
    "`gpus`. Nothing was touched.",
    "want those GPUs too (the policy's gpus), or stop it yourself{commands}",
)
OTHER_GUEST = Cause(
    Verdict.HELD_BY_OTHER_GUEST,
    "Another guest on the same node, or the node itself, uses the GPUs.",
    "Memory above the limit, no holder inside the guest, and the node's own look through /proc "
    "finds holders whose control groups are not this guest's. Needs `node_ssh`.",
    "nothing there was touched: ask whoever runs it",
)
UNSEEN = Cause(
    Verdict.HELD_UNSEEN,
    "Memory is in use, and no holder can be seen from anywhere we may look.",
    "Memory above the limit, no unprotected holder in /proc (descriptors, mappings, threads of "
    "dead leaders), none on the node where it could be asked.",
    "look from the machine that runs the driver (the Proxmox node): a holder may live in another "
    "guest or PID namespace; if nobody holds it there either, the driver has not released it and "
    "only a GPU reset or reboot, decided by a person, will",
)
UNSEEN_MIG = Cause(
    Verdict.HELD_UNSEEN,
    "The same on a GPU in MIG mode, whose instances take some memory when idle.",
    "As above, with `mig.mode.current` enabled.",
    "MIG instances take 10 to 60 MiB of a GPU when idle: if no more is in use, raise residue_mib "
    "above it; else look from the machine that runs the driver",
)
UNSEEN_RESERVE = Cause(
    Verdict.HELD_UNSEEN,
    "The same under a driver that counts its own reserve as memory in use.",
    "As above, under a driver older than 510 (nvidia-smi counted reserved memory as used then).",
    "drivers before 510 count their own reserve (300 to 1000 MiB) as used: set residue_mib above "
    "what the idle GPU shows; if more is in use, look from the machine that runs the driver",
)
UNLISTED = Cause(
    Verdict.HELD_UNSEEN,
    "Only some GPUs are wanted, and nothing tells who uses which.",
    "Unprotected holders of GPU nodes that nvidia-smi does not list: every CUDA program opens "
    "every GPU's node, so the nodes do not tell.",
    "reclaim all GPUs of the host (inside a container nvidia-smi often lists no process), or name "
    "in `protect` what only watches them",
)
STUCK = Cause(
    Verdict.UNKILLABLE,
    "A process stays although it was sent KILL: it waits in the kernel.",
    "It is there at the end after TERM and KILL, or is in state D with the memory in use, having "
    "held a device before or being listed by nvidia-smi.",
    "a process in state D waits for the kernel, mostly for the driver: see `dmesg`, and plan a "
    "reboot of the machine that runs the driver; do not try again before",
)
TRACED = Cause(
    Verdict.UNKILLABLE,
    "A debugger or tracer holds the process at its end.",
    "It is there after TERM and KILL, in state t.",
    "end its tracer, which TracerPid in /proc/PID/status names",
)
ZOMBIE = Cause(
    Verdict.ZOMBIE,
    "A process is dead but not gone, and its memory is not released.",
    "State Z without living threads, memory in use, and it held a device before or nvidia-smi "
    "lists it.",
    "end its parent ({parents}); if init is its parent, only a reboot frees the memory",
)
CAME_BACK = Cause(
    Verdict.RESPAWNED,
    "What was ended was started again, or somebody else came meanwhile.",
    "An unprotected holder at the end that was not there, or was another process, before.",
    "stop what starts them: {commands}",
)
RESTARTS = Cause(
    Verdict.RESPAWNED,
    "A unit outside the host's units brings its holder back.",
    "A unit of which a process was ended is `activating`, or runs in another invocation, though it "
    "may hold no GPU yet.",
    "stop it: systemctl stop {units}; or add it to the host's units",
)
RUNS_AGAIN = Cause(
    Verdict.RESPAWNED,
    "One of the host's units was stopped and runs again, though it may hold no GPU yet.",
    "The unit is active at the end. Live units that may have started it are named: its sockets, "
    "timers and paths, and what requires, wants or upholds it.",
    "stop what starts it: {commands}",
)
GPU_LOST = Cause(
    Verdict.GPU_MISSING,
    "A GPU that answered before is gone, or another one answers in its place.",
    "A UUID of the first reading is missing in the last one, or has another number.",
    "see `nvidia-smi -L` and `dmesg | grep -i xid`; the GPU may have fallen off the bus",
)
GPU_COUNT = Cause(
    Verdict.GPU_MISSING,
    "More or fewer GPUs answer than the host should have, or a wanted one is not there.",
    "The number of rows is not `expected_gpus`, or an index in `gpus` has no row.",
    "see `nvidia-smi -L` and `dmesg | grep -i xid`; correct expected_gpus if it changed",
)
UNREADABLE = Cause(
    Verdict.DRIVER_FAULT,
    "nvidia-smi does not work, so nothing can be proven.",
    "It is missing, failed, or printed what is no row for every GPU. Refused before anything is "
    "touched.",
    "run nvidia-smi on the host; see `dmesg | grep -i -e nvrm -e xid` on the machine that loads "
    "the driver",
)
NOT_INSTALLED = Cause(
    Verdict.DRIVER_FAULT,
    "There is no nvidia-smi, so nothing can be proven.",
    "The shell finds none (exit status 127). Refused before anything is touched.",
    "check that this is the right host; put nvidia-smi (the driver brings it) on the login's PATH",
)
FAULTY = Cause(
    Verdict.DRIVER_FAULT,
    "The driver itself says that a GPU is broken.",
    "A field reads `[Unknown Error]`, `GPU is lost`, `ERR!` or `reset required`.",
    "see `dmesg | grep -i xid`; a reset or reboot is a person's decision",
)
OTHER_MACHINE = Cause(
    Verdict.IDENTITY_MISMATCH,
    "Another machine answers than the one described.",
    "Hostname or machine-id, read in the same call that acts, is not the expected one.",
    "check the address and vmid; if this is the right machine, put its {what} into the "
    "ProxmoxGuest block",
)
OTHER_NAME = Cause(
    Verdict.IDENTITY_MISMATCH,
    "The container with that number is another one.",
    "`pct status --verbose` gives another name.",
    "check the vmid and the hostname in the ProxmoxGuest block",
)
NOT_ON_NODE = Cause(
    Verdict.IDENTITY_MISMATCH,
    "The container is not on this node.",
    "pct says that its configuration does not exist there, as after a migration.",
    "check the vmid; after a migration, give the node it runs on now",
)
TEMPLATE = Cause(
    Verdict.IDENTITY_MISMATCH,
    "The container is a template, which never runs.",
    "`pct status --verbose` says `template: 1`.",
    "check the vmid: give that of a container made from it",
)
LOCKED = Cause(
    Verdict.GUEST_LOCKED,
    "Proxmox is backing up, migrating, cloning or rolling back the guest.",
    "The guest's `lock`, read in the same call that acts (`pct exec` itself ignores it).",
    "wait until the {lock} is over; see `{command}`",
)
STOPPED = Cause(
    Verdict.GUEST_STOPPED,
    "The guest does not run.",
    "Its status on the node is not `running`.",
    "start it (`{command}`) if it should run",
)
FROZEN = Cause(
    Verdict.GUEST_STOPPED,
    "The guest is frozen: whoever enters it hangs.",
    "The state of its freezer control group, read on the node before it is entered.",
    "let it go on (`{command}`), or wait for the backup that froze it",
)
UNREACHABLE = Cause(
    Verdict.UNREACHABLE,
    "No session could be opened on any allowed way; nothing was run.",
    "The address does not answer, or the host key, login or sudo was refused. A refused host key "
    "or login is never passed over for another way.",
    "{advice}",
)
SLOW = Cause(
    Verdict.UNKNOWN,
    "nvidia-smi is too slow to be read; whether something is broken is not known.",
    "It did not answer within a minute.",
    "run nvidia-smi on the host and look for processes in state D; turn persistence mode on if it "
    "is merely slow",
)
UNSOUND = Cause(
    Verdict.UNKNOWN,
    "The reading contradicts itself.",
    "A reading that seemed sound has no wanted GPU, or has one twice: the last guard. Where "
    "nvidia-smi prints such rows it is a driver_fault.",
    "run nvidia-smi on the host",
)
NOT_A_NUMBER = Cause(
    Verdict.UNKNOWN,
    "Memory in use is not known, and unknown is not zero.",
    "It reads `[N/A]`, `[Insufficient Permissions]` or anything else that is no number.",
    "see what `nvidia-smi` shows there, as root: with MIG, memory is shown per instance only to "
    "the privileged",
)
NOT_ROOT = Cause(
    Verdict.UNKNOWN,
    "Other users' holders cannot be seen.",
    "The login on the host is not root. Refused before anything is touched.",
    "log in as root, or set sudo on the SshAccess block",
)
APPS_UNKNOWN = Cause(
    Verdict.UNKNOWN,
    "Only some GPUs are wanted, and nvidia-smi cannot list processes.",
    "`--query-compute-apps` failed. Refused before anything is touched.",
    "reclaim all GPUs of the host, or mend `nvidia-smi --query-compute-apps`",
)
DENIED = Cause(
    Verdict.UNKNOWN,
    "A holder could not be signalled.",
    "kill was refused, and the process is still there.",
    "log in as root, or set sudo on the SshAccess block",
)
UNSTABLE = Cause(
    Verdict.UNKNOWN,
    "The GPUs read free at the end, but not often enough in a row.",
    "The settle time limit passed before `stable_samples` readings agreed.",
    "run it again with a longer settle time limit; see the readings in the settle artifact",
)
HELD = Cause(
    Verdict.UNKNOWN,
    "Another run holds the host, so its GPUs were not touched.",
    "The host's concurrency limit in Prefect (`gpu-reclaim-HOST`) is taken, or the lease on the "
    "host itself (`cat /run/gpu-reclaim/lease`) is another's and not over.",
    "wait until {until} (by the host's clock); or, if that run is dead or in the way, end its hold "
    "with the flow restore-services, or on the host with `sh /run/gpu-reclaim/restore any`",
)
HOLD_LOST = Cause(
    Verdict.UNKNOWN,
    "The hold was lost while the run worked, so somebody else may use the GPUs.",
    "The lease on the host is gone, over or another's when it should be prolonged.",
    "see who ended it (`journalctl -u gpu-reclaim-deadman` on the host), and run it again",
)
HOLD_BROKEN = Cause(
    Verdict.UNKNOWN,
    "The hold could not be set, or a held unit could be started all the same.",
    "A file, the timer or a drop-in could not be made on the host; or the trial start of a held "
    "unit after the last look was not refused (the unit was stopped again).",
    "see whether /run and /var/lib can be written, and `systemctl cat` of the unit for another "
    "AssertPathExists=",
)
CUT_SHORT = Cause(
    Verdict.UNKNOWN,
    "The run was cancelled or broke off.",
    "The page is written by the run that ends; what it lists was done before.",
    "look at the host, start what was stopped, and run it again",
)
UNCLEAR = Cause(
    Verdict.UNKNOWN,
    "A step failed, or its answer was lost or made no sense.",
    "No end marker came back, a time limit passed, or a tool said no; the message says which.",
    "{advice}",
)

CAUSES = tuple(value for value in list(globals().values()) if isinstance(value, Cause))
"""All of them, in the order of the verdicts."""


def table() -> str:
    """All causes as a markdown table, for docs/verdicts.md."""
    lines = [
        "| Verdict | What it means | How it was recognised | What to do |",
        "|---|---|---|---|",
    ]
    for cause in CAUSES:
        cells = [f"`{cause.verdict}`", cause.meaning, cause.recognised, _shown(cause.remedy)]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _shown(remedy: str) -> str:
    """A remedy for the table; what is filled in is shown in italics."""
    if remedy == "{advice}":
        return "what the message asks for, which names the setting or command"
    return re.sub(r" ?(\(?)`?\{(\w+)\}`?", r" \1*\2*", remedy) or "nothing"
