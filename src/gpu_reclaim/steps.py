"""The verbs of a reclaim, over any transport.

Each looks first and does only what is still needed, so calling it again after a lost connection is
safe; none repeats a write by itself.
"""

from __future__ import annotations

import logging

from gpu_reclaim import signals
from gpu_reclaim.commands import Script
from gpu_reclaim.errors import AccessRefused, BadInput, HostKeyRefused, Unreachable
from gpu_reclaim.models import (
    Ended,
    Outcome,
    Process,
    ReclaimPolicy,
    Step,
    Survey,
)
from gpu_reclaim.nvidia_smi import timed_out
from gpu_reclaim.owners import owner
from gpu_reclaim.session import Run, Session, check_node, look
from gpu_reclaim.victims import Choice, choose, never_stopped, protected_name

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
    if (session.links.node is not None or session.fit is not None) and policy.via != "ssh":
        _check_node(session)
    found = look(session, "survey", apps=True, everybody=bool(policy.match))
    if found.reading.problem and not timed_out(found.reading):
        # Everything rests on this reading, so a passing trouble gets a second one.
        session.sleep(SECOND_LOOK_S)
        found = look(session, "survey", apps=True, everybody=bool(policy.match))
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


def _check_units(session: Session, policy: ReclaimPolicy, found: Survey) -> None:
    patterns = [*session.protect, *policy.protect]
    for state in found.units:
        kept = [x for x in state.triggered_by if never_stopped(x) or protected_name(patterns, x)]
        if kept and not protected_name(patterns, state.name):
            raise BadInput(
                f"{session.host}: {kept[0]} would start {state.name} again, and it is protected; "
                "nothing was touched",
                remedy=f"protect {state.name} too, or let {kept[0]} be stopped",
            )
    never = [x.name for x in found.units if never_stopped(x.name)]
    if never:
        raise BadInput(
            f"{session.host}: {never[0]} is never stopped; nothing was touched",
            remedy="take it out of the units in the GpuHost block",
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


def proxmox_exec_kill(session: Session, policy: ReclaimPolicy) -> Outcome:
    """End holders and the policy's matches inside the guest, through its hypervisor.

    Without a hypervisor, or with `via="ssh"`, there is nothing to do.

    Raises:
        GuestRefused: The guest is another one, locked or stopped; nothing was touched.
        TransportError: As `Transport.run`.
    """
    check_may_act(policy)
    if not session.links.has_hypervisor():
        note = "no way through a hypervisor is configured or allowed"
        return Outcome(step=Step(name="proxmox_exec_kill"), note=note)
    try:
        return release(session, policy, "proxmox_exec_kill", session.links.through_hypervisor)
    except (HostKeyRefused, AccessRefused):
        raise
    except Unreachable as error:
        if policy.via == "hypervisor" or session.links.direct is None:
            raise
        log.warning("%s; the guest's own SSH is used instead", error.message)
        return Outcome(step=Step(name="proxmox_exec_kill"), note=error.message)


def fuser_release(session: Session, policy: ReclaimPolicy) -> Outcome:
    """End whoever still holds an NVIDIA device; fuser is asked for a second opinion.

    Raises:
        TransportError: As `Transport.run`.
    """
    return release(session, policy, "fuser_release", session.links.run, with_fuser=True)


def release(
    session: Session, policy: ReclaimPolicy, name: str, run: Run, *, with_fuser: bool = False
) -> Outcome:
    """Look, choose, end."""
    check_may_act(policy)
    started = session.clock()
    partly = bool(policy.gpus)
    seen = look(
        session,
        name,
        run=run,
        gpus=partly,
        apps=partly,
        everybody=bool(policy.match),
        with_fuser=with_fuser,
    )
    units = () if policy.gpus else session.units
    choice = choose(seen.table, seen.reading, policy, units=units, protect=session.protect)
    outcome = Outcome(step=Step(name=name, via=seen.step.via), spared=choice.spared)
    outcome.ended = end(session, choice, seen.table.pid_namespace, policy, run=run)
    outcome.step.seconds = session.clock() - started
    return outcome


def end(
    session: Session,
    choice: Choice,
    namespace: str,
    policy: ReclaimPolicy,
    *,
    run: Run | None = None,
) -> list[Ended]:
    """End the chosen victims, and say what became of each.

    Raises:
        BadAnswer: They were seen in another PID namespace; nothing was signalled.
        TransportError: As `Transport.run`.
    """
    victims = choice.victims
    if not victims:
        return []
    for victim in victims:
        log.info("%s: ending %s", session.host, describe(victim))
    script = Script(
        f"end {len(victims)} processes",
        {"end": signals.end(victims, namespace, grace_s=policy.term_grace_s)},
        timeout_s=signals.time_limit_s(policy.term_grace_s),
        writes=True,
    )
    belongs = {victim.pid: owner(victim.cgroups) for victim in victims}
    session.owners |= {x.name for x in belongs.values() if x.kind == "unit"} - set(session.units)
    result = (run or session.links.run)(script)
    owners = {pid: str(of) for pid, of in belongs.items()}
    return signals.parse_end(result, result.section("end"), victims, owners, result.where)


def describe(process: Process) -> str:
    """For example `sglang::scheduler_TP0 (pid 412, unit sglang.service, /dev/nvidia0 (fd))`."""
    belongs = owner(process.cgroups)
    owners = [str(belongs)] if belongs.kind != "none" else []
    return f"{process.name} ({', '.join([f'pid {process.pid}', *owners, *process.devices[:3]])})"
