"""The verdict: evidence in, one of the stable names out, with a sentence and a remedy.

Rules of this file. Everything that decides is here, and nothing here reads or does anything. The
checks are asked in order and the first that has an answer gives it: what makes a reading worthless
comes before what the reading says, what is proven comes before what is likely, and `clean` comes
last, when nothing else was left to say. What each cause means, and what a person should do about
it, is in `causes`; what is known, in `evidence`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpu_reclaim import causes
from gpu_reclaim.causes import Cause, Finding
from gpu_reclaim.errors import (
    CameBack,
    GpuReclaimError,
    GuestLocked,
    GuestStopped,
    HeldByOther,
    HoldBroken,
    HoldLost,
    IdentityMismatch,
    Unreachable,
)
from gpu_reclaim.evidence import Evidence
from gpu_reclaim.models import Ended, Gpu, Process, Spared
from gpu_reclaim.nvidia_smi import is_fault, timed_out
from gpu_reclaim.owners import owner, stop_command
from gpu_reclaim.victims import is_gpu_node


def decide(e: Evidence) -> Finding:
    """The verdict at the end of a reclaim."""
    return (
        unprovable(e)
        or _held_visibly(e)
        or _survived(e)
        or _running_again(e)
        or _restarting(e)
        or _held_by_other_guest(e)
        or _held_by_undead(e)
        or _held_by_protected(e)
        or _unlisted(e)
        or _held_unseen(e)
        or _not_settled(e)
        or _free(e)
    )


def hopeless(e: Evidence) -> Finding | None:
    """The verdict that is certain before anything was touched: then nothing is.

    Stopping a service would be for nothing, if nothing could be proven afterwards, or if a process
    that must be left alone is known to use the memory.
    """
    return unprovable(e) or _straddles(e) or _kept_by_protected(e) or _unlisted(e)


def unprovable(e: Evidence) -> Finding | None:
    """The GPUs cannot be read as they should be."""
    return (
        _reading_failed(e)
        or _gpu_missing(e)
        or _rows_unsound(e)
        or _gpu_faulty(e)
        or _memory_unread(e)
        or _blind(e)
    )


SAID_LINES = 3
"""Lines of a tool's own words in a summary; a log line has more."""

OF_ERRORS: dict[type[GpuReclaimError], Cause] = {
    IdentityMismatch: causes.OTHER_MACHINE,
    GuestLocked: causes.LOCKED,
    GuestStopped: causes.STOPPED,
    Unreachable: causes.UNREACHABLE,
    CameBack: causes.RUNS_AGAIN,
    HeldByOther: causes.HELD,
    HoldLost: causes.HOLD_LOST,
    HoldBroken: causes.HOLD_BROKEN,
}


def of_error(error: GpuReclaimError) -> Finding:
    """The verdict when an error ended the run before the end; the error knows what to do."""
    cause = next((x for kind, x in OF_ERRORS.items() if isinstance(error, kind)), causes.UNCLEAR)
    advice = error.remedy or "look at the host, then run it again"
    spoke = error.result is not None and error.result.stderr.strip() != ""
    said = error.result.words(SAID_LINES).replace("\n", " / ") if error.result and spoke else ""
    return Finding(
        cause.verdict, f"{error.message}; it said: {said}" if said else error.message, advice
    )


# The reading.


def _reading_failed(e: Evidence) -> Finding | None:
    if not e.after.problem:
        return None
    cause = causes.SLOW if timed_out(e.after) else causes.UNREADABLE
    if "exit status 127" in e.after.problem:
        cause = causes.NOT_INSTALLED
    return cause.finding(f"GPU memory could not be read: {e.after.problem}")


def _gpu_missing(e: Evidence) -> Finding | None:
    seen = {gpu.uuid for gpu in e.after.gpus}
    lost = [gpu for gpu in e.before.gpus if gpu.uuid not in seen]
    indexes = {gpu.index for gpu in e.after.gpus}
    unasked = [index for index in e.policy.gpus if index not in indexes]
    if lost:
        names = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in lost)
        return causes.GPU_LOST.finding(f"GPUs seen before are gone: {names}")
    then = {(gpu.index, gpu.uuid) for gpu in e.before.gpus}
    moved = [x for x in e.after.gpus if e.before.gpus and (x.index, x.uuid) not in then]
    if any(gpu.uuid in {x.uuid for x in e.before.gpus} for gpu in moved):
        names = ", ".join(f"{gpu.index} is now {gpu.uuid}" for gpu in moved)
        return causes.GPU_LOST.finding(f"GPUs have other numbers than before: {names}")
    if unasked:
        return causes.GPU_COUNT.finding(f"there is no GPU {unasked[0]} on the host")
    if e.expected_gpus is not None and len(e.after.gpus) != e.expected_gpus:
        text = f"{len(e.after.gpus)} GPUs answer, {e.expected_gpus} are expected"
        return causes.GPU_COUNT.finding(text)
    return None


def _rows_unsound(e: Evidence) -> Finding | None:
    rows = e.after.gpus
    twice = len({gpu.index for gpu in rows}) < len(rows) or len({x.uuid for x in rows}) < len(rows)
    if e.wanted and not twice:
        return None
    what = "a GPU is listed twice" if twice else "no GPU was read"
    return causes.UNSOUND.finding(f"{what}, so nothing is proven")


def _gpu_faulty(e: Evidence) -> Finding | None:
    faulty = [gpu for gpu in e.wanted if is_fault(gpu)]
    if not faulty:
        return None
    text = "; ".join(f"GPU {gpu.index}: {gpu.note}" for gpu in faulty)
    return causes.FAULTY.finding(f"the driver reports a fault: {text}")


def _memory_unread(e: Evidence) -> Finding | None:
    unread = [gpu for gpu in e.wanted if gpu.memory_used_mib is None]
    if not unread:
        return None
    text = "; ".join(f"GPU {gpu.index}: {gpu.note}" for gpu in unread)
    return causes.NOT_A_NUMBER.finding(f"memory in use is not known: {text}")


def _blind(e: Evidence) -> Finding | None:
    if e.blind:
        return causes.NOT_ROOT.finding(
            "the login there is not root, so holders of other users cannot be seen"
        )
    if e.policy.gpus and not e.after.apps_known:
        return causes.APPS_UNKNOWN.finding(
            "nvidia-smi could not list processes, so nothing tells who uses which GPU"
        )
    return None


# Who is left, or came back.


def _held_visibly(e: Evidence) -> Finding | None:
    if not e.holders:
        return None
    tried = {(row.pid, row.start_time): row for row in e.ended}
    rows = [(process, tried.get((process.pid, process.start_time))) for process in e.holders]
    text = "; ".join(_holder(process, e.starters) for process, _ in rows)
    stuck = [process for process, row in rows if row and row.outcome != "denied"]
    denied = [process for process, row in rows if row and row.outcome == "denied"]
    if stuck:
        return _still_there(e, stuck, text)
    if denied:
        return causes.DENIED.finding(f"not allowed to signal: {text}")
    if e.policy.gpus and all((x.pid, x.start_time) in e.known for x in e.holders):
        return causes.UNLISTED.finding(f"nvidia-smi did not tell before whose they are: {text}")
    return causes.CAME_BACK.finding(
        f"new holders appeared: {text}", commands=_stop_starters(e.holders, e.running_again)
    )


def _survived(e: Evidence) -> Finding | None:
    if not e.survivors:
        return None
    text = "; ".join(_holder(process, {}) for process in e.survivors)
    return _still_there(e, e.survivors, text)


def _still_there(e: Evidence, stuck: Sequence[Process], text: str) -> Finding:
    cause = causes.TRACED if all(x.state == "t" for x in stuck) else causes.STUCK
    return cause.finding(f"still there after KILL: {text}{_waits(e.ended, stuck)}")


def _running_again(e: Evidence) -> Finding | None:
    if not e.running_again:
        return None
    return runs_again(e.running_again)


def runs_again(again: Mapping[str, Sequence[str]]) -> Finding:
    """What is said of units that run though they were stopped, each with who may have done it."""
    text = "; ".join(_unit(unit, by) for unit, by in again.items())
    return causes.RUNS_AGAIN.finding(
        f"stopped, and running again: {text}", commands=_stop_starters([], again)
    )


def _restarting(e: Evidence) -> Finding | None:
    if not e.restarting:
        return None
    units = ", ".join(e.restarting)
    return causes.RESTARTS.finding(
        f"systemd starts {units} again, of which a holder was ended",
        units=" ".join(e.restarting),
    )


def _unit(unit: str, by: Sequence[str]) -> str:
    return f"{unit} (perhaps by {', '.join(by)})" if by else unit


def _holder(process: Process, starters: Mapping[int, str]) -> str:
    by = starters.get(process.pid, "")
    started = f", started by {by}" if by else ""
    of = owner(process.cgroups)
    return f"{process.name} (pid {process.pid}, {of}, state {process.state}{started})"


def _waits(ended: Sequence[Ended], stuck: Sequence[Process]) -> str:
    pids = {process.pid for process in stuck}
    places = sorted({row.wchan for row in ended if row.pid in pids and row.wchan not in ("", "0")})
    return f"; waiting in {', '.join(places)}" if places else ""


def _stop_starters(holders: Sequence[Process], again: Mapping[str, Sequence[str]]) -> str:
    """What a person types so that it does not come back."""
    known = sorted({unit for by in again.values() for unit in by})
    owners = [owner(process.cgroups) for process in holders]
    others = [x for x in owners if x.kind != "unit" or x.name not in again]
    commands = [f"systemctl stop {' '.join(known)}"] if known else []
    commands += sorted({stop_command(of) for of in others} - {""})
    units = [of.name for of in others if of.kind == "unit"]
    if units:
        commands.append("add such units to the host's units")
    if again and not known:
        commands.append(
            f"`journalctl -u {next(iter(again))}` and `last` show when, and who was logged in"
        )
    return "; ".join(commands) or "`ps -eo pid,ppid,lstart,args` shows it; end that first"


# Memory in use without an unprotected holder.


def _held_by_other_guest(e: Evidence) -> Finding | None:
    if not e.in_use or not e.other_guests:
        return None
    text = "; ".join(f"{place}: {', '.join(who)}" for place, who in e.other_guests.items())
    return causes.OTHER_GUEST.finding(f"{_memory(e.in_use)}, held by {text}")


def _held_by_undead(e: Evidence) -> Finding | None:
    if not e.in_use:
        return None
    tried = {(row.pid, row.start_time) for row in e.ended}
    stuck = [f"{x.name} (pid {x.pid}) in {x.wchan or 'D'}" for x in e.ended if x.outcome == "D"]
    waits = [x for x in e.undead if x.state == "D" and (x.pid, x.start_time) not in tried]
    dead = [f"{x.name} (pid {x.pid})" for x in e.ended if x.outcome in ("zombie", "Z")]
    dead += [f"{x.name} (pid {x.pid})" for x in e.undead if x.state == "Z"]
    if stuck:
        return causes.STUCK.finding(
            f"{_memory(e.in_use)}; still there after KILL: {', '.join(stuck)}"
        )
    if waits:
        names = ", ".join(f"{x.name} (pid {x.pid})" for x in waits)
        return causes.STUCK.finding(f"{_memory(e.in_use)}; in state D: {names}")
    if dead:
        names = ", ".join(dict.fromkeys(dead))
        parents = sorted({f"pid {x.ppid}" for x in e.undead if x.state == "Z"})
        return causes.ZOMBIE.finding(
            f"{_memory(e.in_use)}; dead but not gone: {names}",
            parents=", ".join(parents) or "`ps -o ppid= -p PID` names it",
        )
    return None


def _held_by_protected(e: Evidence) -> Finding | None:
    listed = e.listed_mib
    theirs = [row for row in e.spared if row.devices and _uses_memory(e, row, listed)]
    return _protected(e, theirs) if e.in_use and theirs else None


def _kept_by_protected(e: Evidence) -> Finding | None:
    """Before anything was touched: only nvidia-smi's word that the memory is theirs will do."""
    limit = e.policy.limit_mib
    theirs = [
        row
        for row in e.spared
        if row.devices
        and not (row.by_command or row.idle)
        and (e.listed_mib.get(row.pid) or 0) > limit
    ]
    return _protected(e, theirs) if theirs and e.in_use else None


def _protected(e: Evidence, theirs: Sequence[Spared]) -> Finding:
    text = "; ".join(f"{x.name} (pid {x.pid}, {x.owner}): {x.reason}" for x in theirs)
    return causes.PROTECTED.finding(
        f"{_memory(e.in_use)}, held by what must not be ended: {text}", commands=_commands(theirs)
    )


def _straddles(e: Evidence) -> Finding | None:
    rows = [row for row in e.spared if row.straddles]
    if not rows or not e.in_use:
        return None
    text = "; ".join(f"{x.name} (pid {x.pid}, {x.owner}): {x.reason}" for x in rows)
    return causes.STRADDLES.finding(
        f"{_memory(e.in_use)}, and it cannot be freed alone: {text}", commands=_commands(rows)
    )


def _commands(rows: Sequence[Spared]) -> str:
    commands = sorted({row.command for row in rows} - {""})
    return f": {'; '.join(commands)}" if commands else ""


def _uses_memory(e: Evidence, row: Spared, listed: Mapping[int, int | None]) -> bool:
    """nvidia-smi lists it with memory above the limit; of whom it says nothing, the node decides.

    A process without a GPU's own node open, or of a kind known to work without memory, has none.
    """
    mib = listed.get(row.pid)
    if mib is not None:
        return mib > e.policy.limit_mib
    return not row.idle and any(is_gpu_node(device) for device in row.devices)


def _unlisted(e: Evidence) -> Finding | None:
    """Also at 0 MiB: one that has the nodes open and no memory yet may be about to use a GPU."""
    if not e.unlisted:
        return None
    memory = f"{_memory(e.in_use)}; " if e.in_use else ""
    return causes.UNLISTED.finding(
        f"{memory}{', '.join(e.unlisted)} hold devices, and nvidia-smi does not tell which GPU "
        "they use"
    )


def _held_unseen(e: Evidence) -> Finding | None:
    if not e.in_use:
        return None
    clues = [f"{e.uninspected} processes could not be looked into"] if e.uninspected else []
    clues += [f"nvidia-smi lists {', '.join(e.strangers)}"] if e.strangers else []
    clues += [f"the node sees {', '.join(e.inside)} in this guest"] if e.inside else []
    text = f" ({'; '.join(clues)})" if clues else ""
    return _unseen_cause(e).finding(f"{_memory(e.in_use)} and no holder can be seen{text}")


FIRST_WITHOUT_RESERVE = 510
"""Since this driver nvidia-smi no longer counts reserved memory as used (nvml.h, nvmlMemory_v2)."""


def _unseen_cause(e: Evidence) -> Cause:
    major = e.driver.partition(".")[0]
    if e.mig:
        return causes.UNSEEN_MIG
    if major.isdecimal() and int(major) < FIRST_WITHOUT_RESERVE:
        return causes.UNSEEN_RESERVE
    return causes.UNSEEN


# Free.


def _not_settled(e: Evidence) -> Finding | None:
    if e.settled is None or e.settled.free:
        return None
    return causes.UNSTABLE.finding(
        "the GPUs read free in the last look, but never in "
        f"{e.policy.stable_samples} readings in a row ({e.settled.reason})"
    )


def _free(e: Evidence) -> Finding:
    left = [gpu for gpu in e.wanted if gpu.memory_used_mib]
    if left:
        allowed = e.policy.residue_mib
        return causes.RESIDUE.finding(
            f"no unprotected holder; {_memory(left)}, at most {allowed} allowed"
        )
    count = len(e.wanted)
    what = "1 GPU" if count == 1 else f"{count} GPUs"
    return causes.CLEAN.finding(f"{what} at 0 MiB, no unprotected holder")


def _memory(gpus: Sequence[Gpu]) -> str:
    return ", ".join(f"GPU {gpu.index}: {gpu.memory_used_mib} MiB in use" for gpu in gpus)
