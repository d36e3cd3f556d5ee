"""The verbs of a reclaim, over any transport.

Each looks first and does only what is still needed, so calling it again after a lost connection is
safe; none repeats a write by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from gpu_reclaim import processes, signals, systemd
from gpu_reclaim.commands import Result, Script
from gpu_reclaim.errors import BadInput, CommandFailed, Unreachable
from gpu_reclaim.models import (
    Ended,
    Outcome,
    Process,
    ProcessTable,
    ReclaimPolicy,
    Step,
    StoppedUnit,
    Survey,
    UnitState,
)
from gpu_reclaim.owners import in_unit, owner
from gpu_reclaim.session import Run, Session, check_node, look, unit_states
from gpu_reclaim.victims import Choice, choose

log = logging.getLogger(__name__)


def survey(session: Session, policy: ReclaimPolicy) -> Survey:
    """Read everything; touch nothing.

    Raises:
        BadInput: A unit is unknown or protected, or a wanted GPU does not exist.
        GuestRefused: The node says that the guest is another one, locked or stopped.
        TransportError: As `Transport.run`.
    """
    if session.links.node is not None and policy.via != "ssh":
        _check_node(session)
    found = look(session, "survey", apps=True, everybody=bool(policy.match))
    indexes = [gpu.index for gpu in found.reading.gpus]
    unknown = [index for index in policy.gpus if index not in indexes]
    if unknown and not found.reading.problem:
        raise BadInput(
            f"{session.host}: there is no GPU {unknown[0]} (there are {indexes}); "
            "nothing was touched",
            remedy="correct the policy's gpus; see `nvidia-smi -L` on the host",
        )
    return found


def _check_node(session: Session) -> None:
    try:
        check_node(session)
    except Unreachable as error:
        if session.links.direct is None:
            raise
        log.warning("%s; the guest is reached without it", error.message)


def stop_systemd(
    session: Session, policy: ReclaimPolicy, before: Sequence[UnitState] = ()
) -> Outcome:
    """Stop the host's units, triggers first, then end what is left in their control groups.

    Args:
        session: The host.
        policy: What may be done.
        before: The units' states when the run began, so that a repeated attempt still reports
            what the first one stopped.

    Raises:
        CommandFailed: A unit did not stop; its own words are in the result.
        TransportError: As `Transport.run`.
    """
    started = session.clock()
    partly = bool(policy.gpus)
    seen = look(session, "look at units", gpus=partly, apps=partly)
    units = _units_to_stop(session, policy, seen)
    outcome = Outcome(step=Step(name="stop_systemd", via=seen.step.via))
    table = seen.table
    if any(state.active for state in units):
        outcome.stopped, table = _stop(session, units)
    known = {row.unit for row in outcome.stopped}
    names = {state.name for state in units}
    earlier = [x for x in before if x.active and x.name in names and x.name not in known]
    outcome.stopped += [StoppedUnit(unit=x.name, triggered_by=x.triggered_by) for x in earlier]
    choice = choose(
        _members(table, names), seen.reading, policy, units=sorted(names), protect=session.protect
    )
    outcome.ended = end(session, choice, table.pid_namespace, policy)
    outcome.spared = choice.spared
    outcome.step.seconds = session.clock() - started
    return outcome


def _units_to_stop(session: Session, policy: ReclaimPolicy, seen: Survey) -> list[UnitState]:
    """All units of the host; with only some GPUs wanted, those that compute on them."""
    if not policy.gpus:
        return seen.units
    choice = choose(seen.table, seen.reading, policy, protect=session.protect)
    return [x for x in seen.units if any(in_unit(p.cgroups, x.name) for p in choice.victims)]


def _members(table: ProcessTable, units: set[str]) -> ProcessTable:
    inside = [x for x in table.processes if any(in_unit(x.cgroups, unit) for unit in units)]
    return table.model_copy(update={"processes": inside, "uninspected": []})


def _stop(session: Session, units: Sequence[UnitState]) -> tuple[list[StoppedUnit], ProcessTable]:
    active = [state for state in units if state.active]
    refused = [state.name for state in active if not state.can_stop]
    if refused:
        raise CommandFailed(
            f"{session.host}: {refused[0]} refuses to be stopped by hand (RefuseManualStop); "
            "nothing was touched",
            remedy="stop what it belongs to, and name that in the GpuHost block",
        )
    triggers = sorted({trigger for state in units for trigger in state.triggered_by})
    names = [state.name for state in active]
    log.info("%s: stopping %s", session.host, ", ".join([*triggers, *names]))
    parts = {"triggers": systemd.show(triggers), "stop triggers": systemd.stop(triggers)}
    script = Script(
        f"stop {', '.join(names)}",
        (parts if triggers else {})
        | {
            "stop": systemd.stop(names),
            "units": systemd.show(session.units),
            "processes": processes.scan(session.devices, units=session.units),
        },
        timeout_s=systemd.stop_limit_s(units) + session.script_timeout_s,
        writes=True,
    )
    result = session.links.run(script)
    _check_stopped(session, names, result)
    table = processes.parse_scan(result, result.section("processes"), session.devices)
    return _stopped(active, result, triggers), table


def _check_stopped(session: Session, names: Sequence[str], result: Result) -> None:
    still = [x for x in unit_states(session, result) if x.name in names and x.active]
    if still:
        state = f"{still[0].active_state} ({still[0].sub_state})"
        raise CommandFailed(
            f"{session.host}: {still[0].name} is {state} after it was told to stop",
            remedy=f"see `systemctl status {still[0].name}` and its journal on the host",
            result=result,
        )


def _stopped(
    units: Sequence[UnitState], result: Result, triggers: Sequence[str]
) -> list[StoppedUnit]:
    states = systemd.parse_show(result.section("triggers")) if triggers else []
    live = {state.name for state in states if state.active}
    return [
        StoppedUnit(unit=x.name, triggered_by=[t for t in x.triggered_by if t in live])
        for x in units
    ]


def proxmox_exec_kill(session: Session, policy: ReclaimPolicy) -> Outcome:
    """End holders and the policy's matches inside the guest, through its hypervisor.

    Without a hypervisor, or with `via="ssh"`, there is nothing to do.

    Raises:
        GuestRefused: The guest is another one, locked or stopped; nothing was touched.
        TransportError: As `Transport.run`.
    """
    if not session.links.has_hypervisor():
        note = "no way through a hypervisor is configured or allowed"
        return Outcome(step=Step(name="proxmox_exec_kill"), note=note)
    try:
        return release(session, policy, "proxmox_exec_kill", session.links.through_hypervisor)
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
    started = session.clock()
    partly = bool(policy.gpus)
    seen = look(
        session,
        name,
        run=run,
        gpus=partly,
        apps=partly,
        units=False,
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
    result = (run or session.links.run)(script)
    owners = {victim.pid: str(owner(victim.cgroups)) for victim in victims}
    return signals.parse_end(result, result.section("end"), victims, owners, result.where)


def describe(process: Process) -> str:
    """For example `sglang::scheduler_TP0 (pid 412, unit sglang.service, /dev/nvidia0 (fd))`."""
    parts = [f"pid {process.pid}", str(owner(process.cgroups)), *process.devices[:3]]
    return f"{process.name} ({', '.join(parts)})"
