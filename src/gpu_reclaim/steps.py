"""What comes before anything is touched: what may be done, and the first look."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from gpu_reclaim.commands import Result
from gpu_reclaim.errors import (
    AccessRefused,
    BadInput,
    CommandFailed,
    HostKeyRefused,
    Unreachable,
)
from gpu_reclaim.models import Process, ReclaimPolicy, Survey, UnitState
from gpu_reclaim.nvidia_smi import timed_out
from gpu_reclaim.owners import in_unit, owner
from gpu_reclaim.protected import PROTECTED_UNITS, never_stopped, protected_name
from gpu_reclaim.session import Session, check_node, look
from gpu_reclaim.systemd import dependents
from gpu_reclaim.victims import choose, wanted_holders

log = logging.getLogger(__name__)

SECOND_LOOK_S = 1
"""Pause before nvidia-smi is asked again after it failed, in seconds."""


def check_policy(policy: ReclaimPolicy) -> None:
    """Refuse what this version cannot do, before anything is touched.

    Raises:
        BadInput: The policy asks for it.
    """
    if policy.approve:
        raise BadInput(
            "approve is not supported yet",
            remedy="leave it out; mode='plan' shows what would be done",
        )


def check_may_act(session: Session, policy: ReclaimPolicy) -> None:
    """Refuse to act under a policy that only plans, or before the hold it asks for, whoever calls.

    Raises:
        BadInput: The mode is plan, or a hold is asked for and not taken, or as `check_policy`.
    """
    check_policy(policy)
    if policy.mode == "plan":
        raise BadInput(
            "the policy's mode is plan, and this step acts; nothing was touched",
            remedy="use mode='reclaim', or call reclaim_gpus, which ends after the plan",
        )
    if policy.hold_minutes and session.held is None:
        raise BadInput(
            "the policy asks for a hold, and this session has not taken it; nothing was touched",
            remedy="call reclaim_gpus, which takes it first, or use hold_minutes=0",
        )


def survey(session: Session, policy: ReclaimPolicy) -> Survey:
    """Read everything; touch nothing.

    Raises:
        BadInput: A unit is unknown or protected, or a wanted GPU does not exist.
        GuestRefused: The node says that the guest is another one, locked or stopped.
        TransportError: As `Transport.run`.
    """
    for state in (session.stopped, session.left, session.owners, session.mps_left):
        state.clear()
    name_units(session, policy)
    if (session.links.node is not None or session.fit is not None) and policy.via != "ssh":
        _check_node(session)
    found = _first_look(session, policy)
    if found.reading.problem and not timed_out(found.reading):
        # Everything rests on this reading, so a passing trouble gets a second one.
        session.sleep(SECOND_LOOK_S)
        found = _first_look(session, policy)
    _check_units(session, policy, found)
    indexes = [gpu.index for gpu in found.reading.gpus]
    unknown = [index for index in policy.gpus if index not in indexes]
    if unknown and not found.reading.problem:
        raise BadInput(
            f"{session.host}: there is no GPU {unknown[0]} (there are {indexes}); "
            "nothing was touched",
            remedy="correct the policy's gpus; see `nvidia-smi -L` on the host",
        )
    return found


def _first_look(session: Session, policy: ReclaimPolicy) -> Survey:
    return look(session, "survey", apps=True, everybody=bool(policy.match), wide=True, lease=True)


def name_units(session: Session, policy: ReclaimPolicy) -> None:
    """Add the protected units that the policy names in full to those to be stopped."""
    named = [unit for unit in policy.named_units if protected_name(PROTECTED_UNITS, unit)]
    own = [unit for unit in session.units if unit not in session.named]
    session.named = set(named) - set(own)
    session.units = [*own, *(unit for unit in named if unit not in own)]


def names_to_stop(session: Session, policy: ReclaimPolicy, seen: Survey | None) -> list[str]:
    """The host's units that no protection names; with only some GPUs wanted, those on them."""
    units = [unit for unit in session.units if not _protected(session, policy, unit)]
    if not policy.gpus or seen is None:
        return units
    choice = choose(seen.table, seen.reading, policy, protect=session.protect)
    holders = wanted_holders(seen.table, seen.reading, policy)
    users = [process for process in choice.victims if process.pid in holders]
    return [x for x in units if x in session.named or any(in_unit(p.cgroups, x) for p in users)]


def units_to_stop(session: Session, policy: ReclaimPolicy, seen: Survey) -> list[UnitState]:
    """The states of those units."""
    names = names_to_stop(session, policy, seen)
    return [state for state in seen.units if state.name in names]


def _protected(session: Session, policy: ReclaimPolicy, unit: str) -> str:
    """The name of host or policy that protects a unit, by any of its names."""
    patterns = [*session.protect, *policy.protect]
    names = [unit, *session.aliases.get(unit, ())]
    return protected_name(patterns, *names, *(name.removesuffix(".service") for name in names))


def _check_units(session: Session, policy: ReclaimPolicy, found: Survey) -> None:
    never = [x.name for x in found.units if never_stopped(x.name, session.named)]
    if never:
        raise BadInput(
            f"{session.host}: {never[0]} is never stopped; nothing was touched",
            remedy="take it out of the units in the GpuHost block; one of the driver's own is "
            "stopped when the policy's match names it in full",
        )
    going = units_to_stop(session, policy, found)
    others = _along(found, going)
    _check_triggers(session, policy, [*going, *others])
    _check_along(session, policy, others)
    _check_gpus(session, policy, found, others)
    _check_ourselves(session, found, [*going, *others])
    _check_machine(session, [*going, *others])
    refusing = [state.name for state in going if state.active and not state.can_stop]
    if refusing:
        raise refuses_stop(session, refusing)


def refuses_stop(
    session: Session, names: Sequence[str], result: Result | None = None
) -> CommandFailed:
    """The error about units with RefuseManualStop."""
    return CommandFailed(
        f"{session.host}: {', '.join(names)} refuses to be stopped by hand "
        "(RefuseManualStop); nothing was touched",
        remedy="stop what it belongs to, and name that in the GpuHost block",
        result=result,
    )


def _along(found: Survey, going: Sequence[UnitState]) -> list[UnitState]:
    """Live units that systemd stops along with those, and with their triggers."""
    shown = [*found.units, *found.dependents]
    along = dependents(shown, [state.name for state in going])
    # Targets only group units: nothing stops with them.
    return [
        state
        for state in shown
        if state.name in along and state.active and not state.name.endswith(".target")
    ]


def _check_gpus(
    session: Session, policy: ReclaimPolicy, found: Survey, along: Sequence[UnitState]
) -> None:
    """Who stops along must not use GPUs that nobody asked for."""
    if not policy.gpus:
        return
    wanted = wanted_holders(found.table, found.reading, policy)
    for process in found.table.holders:
        unit = next((x.name for x in along if in_unit(process.cgroups, x.name)), "")
        if unit and process.pid not in wanted:
            raise BadInput(
                f"{session.host}: systemd would stop {unit} along, which uses GPUs that you did "
                "not ask for; nothing was touched",
                remedy="want those GPUs too (the policy's gpus), or untie the units",
            )


def _check_machine(session: Session, going: Sequence[UnitState]) -> None:
    acts = [state for state in going if state.active and state.end_actions]
    if acts:
        raise BadInput(
            f"{session.host}: when {acts[0].name} ends, systemd would {acts[0].end_actions[0]} the "
            "machine; nothing was touched",
            remedy=f"take SuccessAction= and FailureAction= out of {acts[0].name}",
        )


def _kept(session: Session, policy: ReclaimPolicy, unit: str) -> bool:
    return never_stopped(unit, session.named) or bool(_protected(session, policy, unit))


def _check_triggers(session: Session, policy: ReclaimPolicy, going: Sequence[UnitState]) -> None:
    for state in going:
        starts = [unit for unit in state.triggered_by if _kept(session, policy, unit)]
        if starts:
            raise BadInput(
                f"{session.host}: {starts[0]} would start {state.name} again, and it is "
                "protected; nothing was touched",
                remedy=f"protect {state.name} too, or let {starts[0]} be stopped",
            )


def _check_along(session: Session, policy: ReclaimPolicy, along: Sequence[UnitState]) -> None:
    lost = [state.name for state in along if _kept(session, policy, state.name)]
    if lost:
        raise BadInput(
            f"{session.host}: systemd would stop {lost[0]} along with the host's units, and it is "
            "protected; nothing was touched",
            remedy=f"see `systemctl list-dependencies --reverse` of them, and untie {lost[0]}",
        )


def _check_ourselves(session: Session, found: Survey, going: Sequence[UnitState]) -> None:
    ours = [x for x in found.table.processes if x.pid in found.table.ourselves]
    for state in going:
        if any(in_unit(process.cgroups, state.name) for process in ours):
            raise BadInput(
                f"{session.host}: this run is part of {state.name}, which would be stopped; "
                "nothing was touched",
                remedy="run it from elsewhere, for example a worker with a unit of its own",
            )


def _check_node(session: Session) -> None:
    try:
        check_node(session)
    except (HostKeyRefused, AccessRefused):  # no reason to try another door, see Links
        raise
    except Unreachable as error:
        if session.links.direct is None:
            raise
        log.warning("%s; the guest is reached without it", error.message)


def describe(process: Process) -> str:
    """For example `sglang::scheduler_TP0 (pid 412, unit sglang.service, /dev/nvidia0 (fd))`."""
    belongs = owner(process.cgroups)
    owners = [str(belongs)] if belongs.kind != "none" else []
    return f"{process.name} ({', '.join([f'pid {process.pid}', *owners, *process.devices[:3]])})"
