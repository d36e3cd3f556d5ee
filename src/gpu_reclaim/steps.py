"""What comes before anything is touched: what may be done, and the first look."""

from __future__ import annotations

import logging

from gpu_reclaim.errors import AccessRefused, BadInput, HostKeyRefused, Unreachable
from gpu_reclaim.models import Process, ReclaimPolicy, Survey
from gpu_reclaim.nvidia_smi import timed_out
from gpu_reclaim.owners import owner
from gpu_reclaim.protected import never_stopped, protected_name
from gpu_reclaim.session import Session, check_node, look

log = logging.getLogger(__name__)

SECOND_LOOK_S = 1
"""Pause before nvidia-smi is asked again after it failed, in seconds."""


def check_policy(policy: ReclaimPolicy) -> None:
    """Refuse what this version cannot do, before anything is touched.

    Raises:
        BadInput: The policy asks for it.
    """
    if policy.approve:
        raise BadInput("approve is not supported yet", remedy="run with mode='plan' first")
    if policy.hold_minutes:
        raise BadInput("hold_minutes is not supported yet", remedy="leave it at 0")


def check_may_act(policy: ReclaimPolicy) -> None:
    """Refuse to act under a policy that only plans, whoever calls.

    Raises:
        BadInput: The mode is plan, or as `check_policy`.
    """
    check_policy(policy)
    if policy.mode == "plan":
        raise BadInput(
            "the policy's mode is plan, and this step acts; nothing was touched",
            remedy="use mode='reclaim', or call reclaim_gpus, which ends after the plan",
        )


def survey(session: Session, policy: ReclaimPolicy) -> Survey:
    """Read everything; touch nothing.

    Raises:
        BadInput: A unit is unknown or protected, or a wanted GPU does not exist.
        GuestRefused: The node says that the guest is another one, locked or stopped.
        TransportError: As `Transport.run`.
    """
    name_units(session, policy)
    if (session.links.node is not None or session.fit is not None) and policy.via != "ssh":
        _check_node(session)
    found = look(session, "survey", apps=True, everybody=bool(policy.match), wide=True)
    if found.reading.problem and not timed_out(found.reading):
        # Everything rests on this reading, so a passing trouble gets a second one.
        session.sleep(SECOND_LOOK_S)
        found = look(session, "survey", apps=True, everybody=bool(policy.match), wide=True)
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


def name_units(session: Session, policy: ReclaimPolicy) -> None:
    """Add the protected units that the policy names in full to those to be stopped."""
    named = [unit for unit in policy.named_units if never_stopped(unit)]
    session.units = [*session.units, *(unit for unit in named if unit not in session.units)]


def _check_units(session: Session, policy: ReclaimPolicy, found: Survey) -> None:
    never = [x.name for x in found.units if never_stopped(x.name, policy.named_units)]
    if never:
        raise BadInput(
            f"{session.host}: {never[0]} is never stopped; nothing was touched",
            remedy="take it out of the units in the GpuHost block; one of the driver's own is "
            "stopped when the policy's match names it in full",
        )
    patterns = [*session.protect, *policy.protect]

    def kept(unit: str) -> bool:
        return never_stopped(unit, policy.named_units) or bool(protected_name(patterns, unit))

    for state in found.units:
        starts = [unit for unit in state.triggered_by if kept(unit)]
        if starts and not protected_name(patterns, state.name):
            raise BadInput(
                f"{session.host}: {starts[0]} would start {state.name} again, and it is "
                "protected; nothing was touched",
                remedy=f"protect {state.name} too, or let {starts[0]} be stopped",
            )
    # Targets only group units: nothing stops with them.
    along = [x.name for x in found.dependents if x.active and not x.name.endswith(".target")]
    lost = [unit for unit in along if kept(unit)]
    if lost:
        raise BadInput(
            f"{session.host}: systemd would stop {lost[0]} along with the host's units, and it is "
            "protected; nothing was touched",
            remedy=f"see `systemctl list-dependencies --reverse` of them, and untie {lost[0]}",
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
