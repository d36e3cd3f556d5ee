"""The verdict: evidence in, one of the stable names out, with a sentence and a remedy.

Rules of this file. Everything that decides is here, and nothing here reads or does anything. The
checks are asked in order and the first that has an answer gives it: what makes a reading worthless
comes before what the reading says, what is proven comes before what is likely, and `clean` comes
last, when nothing else was left to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gpu_reclaim.errors import (
    GpuReclaimError,
    GuestLocked,
    GuestStopped,
    IdentityMismatch,
    Unreachable,
)
from gpu_reclaim.models import (
    Ended,
    Gpu,
    GpuReading,
    Process,
    ReclaimPolicy,
    Settled,
    Spared,
    Verdict,
)
from gpu_reclaim.nvidia_smi import is_fault, timed_out
from gpu_reclaim.owners import owner, stop_command
from gpu_reclaim.victims import ZERO_MEMORY


@dataclass(frozen=True)
class Evidence:
    """All that decides.

    Attributes:
        policy: What was asked.
        before: GPUs before anything was touched.
        after: GPUs at the end.
        settled: How the wait before the last look went; None: there was none.
        expected_gpus: How many GPUs the host must have; None: as many as before.
        holders: Unprotected holders at the end.
        spared: Who was left alone at the end, and why.
        ended: Whom we signalled, and what became of them.
        restarting: Units of ended holders that are about to run again.
        uninspected: How many processes could not be looked into at the end.
        blind: Other users' processes cannot be looked into at all.
        unlisted: Unprotected holders of which nvidia-smi does not tell the GPU, when only some
            GPUs are wanted.
        other_guests: Where else (`guest 130`, `the node itself`) to the processes that hold the
            devices there, seen from the node.
    """

    policy: ReclaimPolicy
    before: GpuReading
    after: GpuReading
    settled: Settled | None = None
    expected_gpus: int | None = None
    holders: Sequence[Process] = ()
    spared: Sequence[Spared] = ()
    ended: Sequence[Ended] = ()
    restarting: Sequence[str] = ()
    uninspected: int = 0
    blind: bool = False
    unlisted: Sequence[str] = ()
    other_guests: dict[str, list[str]] = field(default_factory=dict)

    @property
    def wanted(self) -> list[Gpu]:
        """The wanted GPUs, as read at the end."""
        return self.policy.wanted(self.after.gpus)

    @property
    def in_use(self) -> list[Gpu]:
        """Wanted GPUs with more memory in use than may remain."""
        return [gpu for gpu in self.wanted if (gpu.memory_used_mib or 0) > self.policy.limit_mib]


@dataclass(frozen=True)
class Finding:
    """A verdict with its sentence, and what a person should do now."""

    verdict: Verdict
    summary: str
    remedy: str = ""


def decide(e: Evidence) -> Finding:
    """The verdict."""
    return (
        unprovable(e)
        or _held_visibly(e)
        or _restarting(e)
        or _held_by_other_guest(e)
        or _held_by_undead(e)
        or _held_by_protected(e)
        or _held_unseen(e)
        or _not_settled(e)
        or _free(e)
    )


def unprovable(e: Evidence) -> Finding | None:
    """The verdict that no reclaim could improve: the GPUs cannot be read as they should be."""
    return (
        _reading_failed(e)
        or _gpu_missing(e)
        or _rows_unsound(e)
        or _gpu_faulty(e)
        or _memory_unread(e)
        or _blind(e)
    )


def of_error(error: GpuReclaimError) -> Finding:
    """The verdict when an error ended the run before the end."""
    kinds = {
        IdentityMismatch: Verdict.IDENTITY_MISMATCH,
        GuestLocked: Verdict.GUEST_LOCKED,
        GuestStopped: Verdict.GUEST_STOPPED,
        Unreachable: Verdict.UNREACHABLE,
    }
    verdict = next((v for kind, v in kinds.items() if isinstance(error, kind)), Verdict.UNKNOWN)
    return Finding(verdict, error.message, error.remedy or "look at the host, then run it again")


def _reading_failed(e: Evidence) -> Finding | None:
    if not e.after.problem:
        return None
    if timed_out(e.after):
        return Finding(
            Verdict.UNKNOWN,
            f"GPU memory could not be read: {e.after.problem}",
            "run nvidia-smi on the host and look for processes in state D; turn persistence mode "
            "on if it is merely slow",
        )
    return Finding(
        Verdict.DRIVER_FAULT,
        f"GPU memory could not be read: {e.after.problem}",
        "run nvidia-smi on the host; see `dmesg | grep -i -e nvrm -e xid` on the machine that "
        "loads the driver",
    )


def _gpu_missing(e: Evidence) -> Finding | None:
    seen = {gpu.uuid for gpu in e.after.gpus}
    lost = [gpu for gpu in e.before.gpus if gpu.uuid not in seen]
    indexes = {gpu.index for gpu in e.after.gpus}
    unasked = [index for index in e.policy.gpus if index not in indexes]
    remedy = "see `nvidia-smi -L` and `dmesg | grep -i xid`; correct expected_gpus if it changed"
    if lost:
        names = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in lost)
        return Finding(Verdict.GPU_MISSING, f"GPUs seen before are gone: {names}", remedy)
    if unasked:
        return Finding(Verdict.GPU_MISSING, f"there is no GPU {unasked[0]} on the host", remedy)
    if e.expected_gpus is not None and len(e.after.gpus) != e.expected_gpus:
        text = f"{len(e.after.gpus)} GPUs answer, {e.expected_gpus} are expected"
        return Finding(Verdict.GPU_MISSING, text, remedy)
    return None


def _rows_unsound(e: Evidence) -> Finding | None:
    rows = e.after.gpus
    twice = len({gpu.index for gpu in rows}) < len(rows) or len({x.uuid for x in rows}) < len(rows)
    if e.wanted and not twice:
        return None
    what = "a GPU is listed twice" if twice else "no GPU was read"
    return Finding(Verdict.UNKNOWN, f"{what}, so nothing is proven", "run nvidia-smi on the host")


def _gpu_faulty(e: Evidence) -> Finding | None:
    faulty = [gpu for gpu in e.wanted if is_fault(gpu)]
    if not faulty:
        return None
    text = "; ".join(f"GPU {gpu.index}: {gpu.note}" for gpu in faulty)
    return Finding(
        Verdict.DRIVER_FAULT,
        f"the driver reports a fault: {text}",
        "see `dmesg | grep -i xid`; a reset or reboot is a person's decision",
    )


def _blind(e: Evidence) -> Finding | None:
    if e.blind:
        return Finding(
            Verdict.UNKNOWN,
            "the login there is not root, so holders of other users cannot be seen",
            "log in as root, or set sudo on the SshAccess block",
        )
    if e.policy.gpus and not e.after.apps_known:
        return Finding(
            Verdict.UNKNOWN,
            "nvidia-smi could not list processes, so nothing tells who uses which GPU",
            "reclaim all GPUs of the host, or mend `nvidia-smi --query-compute-apps`",
        )
    return None


def _memory_unread(e: Evidence) -> Finding | None:
    unread = [gpu for gpu in e.wanted if gpu.memory_used_mib is None]
    if not unread:
        return None
    text = "; ".join(f"GPU {gpu.index}: {gpu.note}" for gpu in unread)
    return Finding(
        Verdict.UNKNOWN,
        f"memory in use is not known: {text}",
        "run as root; with MIG, memory is shown per instance only to the privileged",
    )


def _held_visibly(e: Evidence) -> Finding | None:
    if not e.holders:
        return None
    tried = {(row.pid, row.start_time): row for row in e.ended}
    rows = [(process, tried.get((process.pid, process.start_time))) for process in e.holders]
    text = "; ".join(_holder(process) for process, _ in rows)
    stuck = [process for process, row in rows if row and row.outcome != "denied"]
    denied = [process for process, row in rows if row and row.outcome == "denied"]
    if stuck:
        return Finding(
            Verdict.UNKILLABLE,
            f"still there after KILL: {text}{_waits(e.ended, stuck)}",
            "a process in state D waits for the kernel, mostly for the driver: see `dmesg`, and "
            "plan a reboot of the machine that runs the driver",
        )
    if denied:
        return Finding(
            Verdict.UNKNOWN,
            f"not allowed to signal: {text}",
            "log in as root, or set sudo on the SshAccess block",
        )
    return Finding(Verdict.RESPAWNED, f"new holders appeared: {text}", _respawn_remedy(e.holders))


def _restarting(e: Evidence) -> Finding | None:
    if not e.restarting:
        return None
    units = ", ".join(e.restarting)
    return Finding(
        Verdict.RESPAWNED,
        f"systemd is about to start {units} again, of which a holder was ended",
        f"stop it: systemctl stop {' '.join(e.restarting)}; or add it to the host's units",
    )


def _holder(process: Process) -> str:
    return f"{process.name} (pid {process.pid}, {owner(process.cgroups)}, state {process.state})"


def _waits(ended: Sequence[Ended], stuck: Sequence[Process]) -> str:
    pids = {process.pid for process in stuck}
    places = sorted({row.wchan for row in ended if row.pid in pids and row.wchan not in ("", "0")})
    return f"; waiting in {', '.join(places)}" if places else ""


def _respawn_remedy(holders: Sequence[Process]) -> str:
    commands = sorted({stop_command(owner(process.cgroups)) for process in holders} - {""})
    if commands:
        return f"stop what starts them: {'; '.join(commands)}; add such units to the host's units"
    return "find what starts them (`ps -o pid,ppid,lstart,args`) and stop that first"


def _held_by_other_guest(e: Evidence) -> Finding | None:
    if not e.in_use or not e.other_guests:
        return None
    text = "; ".join(f"{place}: {', '.join(who)}" for place, who in e.other_guests.items())
    return Finding(
        Verdict.HELD_BY_OTHER_GUEST,
        f"{_memory(e.in_use)}, held by {text}",
        "nothing there was touched: ask whoever runs it",
    )


def _held_by_undead(e: Evidence) -> Finding | None:
    if not e.in_use:
        return None
    zombies = [row for row in e.ended if row.outcome in ("zombie", "Z")]
    stuck = [row for row in e.ended if row.outcome == "D"]
    if stuck:
        names = ", ".join(f"{row.name} (pid {row.pid}) in {row.wchan or 'D'}" for row in stuck)
        return Finding(
            Verdict.UNKILLABLE,
            f"{_memory(e.in_use)}; still there after KILL: {names}",
            "see `dmesg`, and plan a reboot of the machine that runs the driver",
        )
    if zombies:
        names = ", ".join(f"{row.name} (pid {row.pid})" for row in zombies)
        return Finding(
            Verdict.ZOMBIE,
            f"{_memory(e.in_use)}; dead but not gone: {names}",
            "end its parent; if init is its parent, only a reboot frees the memory",
        )
    return None


def _held_by_protected(e: Evidence) -> Finding | None:
    if not e.in_use:
        return None
    listed = {app.pid: app.memory_used_mib for app in e.after.apps}
    theirs = [row for row in e.spared if row.devices and _uses_memory(e, row, listed.get(row.pid))]
    if not theirs:
        return None
    text = "; ".join(f"{x.name} (pid {x.pid}, {x.owner}): {x.reason}" for x in theirs)
    return Finding(
        Verdict.HELD_BY_PROTECTED,
        f"{_memory(e.in_use)}, held by what must not be ended: {text}",
        "stop it yourself if it may be stopped, then run this again",
    )


def _uses_memory(e: Evidence, row: Spared, listed_mib: int | None) -> bool:
    """nvidia-smi lists it with memory; where it says nothing, its name decides."""
    if listed_mib is None:
        return row.name not in ZERO_MEMORY
    return listed_mib > e.policy.limit_mib


def _held_unseen(e: Evidence) -> Finding | None:
    if not e.in_use:
        return None
    if e.unlisted:
        return Finding(
            Verdict.HELD_UNSEEN,
            f"{_memory(e.in_use)}; {', '.join(e.unlisted)} hold devices, and nvidia-smi does not "
            "tell which GPU they use",
            "reclaim all GPUs of the host; inside a container nvidia-smi often lists no process",
        )
    blind = f" ({e.uninspected} processes could not be looked into)" if e.uninspected else ""
    return Finding(
        Verdict.HELD_UNSEEN,
        f"{_memory(e.in_use)} and no holder can be seen{blind}",
        "look from the machine that runs the driver (the Proxmox node): a holder may live in "
        "another guest or PID namespace; if nobody holds it there either, the driver has not "
        "released it and only a GPU reset or reboot, decided by a person, will",
    )


def _not_settled(e: Evidence) -> Finding | None:
    if e.settled is None or e.settled.free:
        return None
    return Finding(
        Verdict.UNKNOWN,
        "the GPUs read free in the last look, but never in "
        f"{e.policy.stable_samples} readings in a row ({e.settled.reason})",
        "run it again with a longer settle time limit; see the readings in the settle artifact",
    )


def _free(e: Evidence) -> Finding:
    left = [gpu for gpu in e.wanted if gpu.memory_used_mib]
    if left:
        return Finding(
            Verdict.RESIDUE, f"no holder; {_memory(left)}, at most {e.policy.residue_mib} allowed"
        )
    return Finding(Verdict.CLEAN, f"{len(e.wanted)} GPUs at 0 MiB, no unprotected holder")


def _memory(gpus: Sequence[Gpu]) -> str:
    return ", ".join(f"GPU {gpu.index}: {gpu.memory_used_mib} MiB in use" for gpu in gpus)
