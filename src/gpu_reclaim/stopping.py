"""Stopping units: triggers first, then the units, then what is left in their control groups."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from gpu_reclaim import processes, systemd
from gpu_reclaim.commands import Result, Script
from gpu_reclaim.errors import CommandFailed
from gpu_reclaim.models import (
    Outcome,
    ProcessTable,
    ReclaimPolicy,
    Step,
    StoppedUnit,
    Survey,
    UnitState,
)
from gpu_reclaim.owners import in_unit
from gpu_reclaim.session import Session, look, unit_states
from gpu_reclaim.steps import end
from gpu_reclaim.victims import choose, protected_name

log = logging.getLogger(__name__)


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
    units = units_to_stop(session, policy, seen)
    names = [state.name for state in units]
    outcome = Outcome(step=Step(name="stop_systemd", via=seen.step.via))
    table = seen.table
    if any(state.active or state.triggered_by for state in units):
        outcome.stopped, table = _stop(session, units)
    known = {row.unit for row in outcome.stopped if row.active}
    earlier = [x for x in before if x.active and x.name in names and x.name not in known]
    outcome.stopped = [row for row in outcome.stopped if row.unit not in {x.name for x in earlier}]
    outcome.stopped += [StoppedUnit(unit=x.name, triggered_by=x.triggered_by) for x in earlier]
    members = _members(table, names)
    choice = choose(members, seen.reading, policy, units=names, protect=session.protect)
    outcome.ended = end(session, choice, table.pid_namespace, policy)
    outcome.spared = choice.spared
    outcome.step.seconds = session.clock() - started
    return outcome


def units_to_stop(session: Session, policy: ReclaimPolicy, seen: Survey) -> list[UnitState]:
    """The host's units that no protection names; with only some GPUs wanted, those on them."""
    names = [*session.protect, *policy.protect]
    units = [state for state in seen.units if not protected_name(names, state.name)]
    if not policy.gpus:
        return units
    choice = choose(seen.table, seen.reading, policy, protect=session.protect)
    return [x for x in units if any(in_unit(p.cgroups, x.name) for p in choice.victims)]


def _members(table: ProcessTable, units: Sequence[str]) -> ProcessTable:
    inside = [x for x in table.processes if any(in_unit(x.cgroups, unit) for unit in units)]
    return table.model_copy(update={"processes": inside, "uninspected": []})


def _stop(session: Session, units: Sequence[UnitState]) -> tuple[list[StoppedUnit], ProcessTable]:
    active = [state.name for state in units if state.active]
    refused = [state.name for state in units if state.active and not state.can_stop]
    if refused:
        raise CommandFailed(
            f"{session.host}: {refused[0]} refuses to be stopped by hand (RefuseManualStop); "
            "nothing was touched",
            remedy="stop what it belongs to, and name that in the GpuHost block",
        )
    triggers = sorted({trigger for state in units for trigger in state.triggered_by})
    log.info("%s: stopping %s", session.host, ", ".join([*triggers, *active]))
    script = Script(
        f"stop {', '.join([*triggers, *active])}",
        _parts(session, triggers, active),
        timeout_s=systemd.stop_limit_s(units) + session.script_timeout_s,
        writes=True,
    )
    result = session.links.run(script)
    _check_stopped(session, active, result)
    table = processes.parse_scan(result, result.section("processes"), session.devices)
    return _stopped(units, result, triggers), table


def _parts(session: Session, triggers: Sequence[str], units: Sequence[str]) -> Mapping[str, str]:
    """Sections in the order in which they run: triggers go first, or they start a unit again."""
    parts = {"triggers": systemd.show(triggers), "stop triggers": systemd.stop(triggers)}
    return (
        (parts if triggers else {})
        | ({"stop": systemd.stop(units)} if units else {})
        | {
            "units": systemd.show(session.units),
            "processes": processes.scan(session.devices, units=session.units),
        }
    )


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
    rows = [
        StoppedUnit(
            unit=x.name, active=x.active, triggered_by=[t for t in x.triggered_by if t in live]
        )
        for x in units
    ]
    return [row for row in rows if row.active or row.triggered_by]
