"""Stopping units: triggers first, then the units, then what is left in their control groups."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from gpu_reclaim import processes, systemd
from gpu_reclaim.commands import Result, Script
from gpu_reclaim.errors import CommandFailed
from gpu_reclaim.models import (
    GpuReading,
    Outcome,
    ProcessTable,
    ReclaimPolicy,
    Step,
    StoppedUnit,
    Survey,
    UnitState,
)
from gpu_reclaim.owners import in_unit
from gpu_reclaim.session import Session, look, seen_processes, unit_states
from gpu_reclaim.steps import check_may_act, end
from gpu_reclaim.victims import choose, protected_name

log = logging.getLogger(__name__)


def stop_systemd(
    session: Session, policy: ReclaimPolicy, before: Sequence[UnitState] = ()
) -> Outcome:
    """Stop the host's units, triggers first, then end what is left in their control groups.

    The script that stops looks first, and looks again afterwards, so one round trip does it all.

    Args:
        session: The host.
        policy: What may be done.
        before: The units' states when the run began, so that a repeated attempt still reports
            what the first one stopped.

    Raises:
        CommandFailed: A unit did not stop; its own words are in the result.
        UnknownUnit: systemd does not know one of them; nothing was stopped.
        TransportError: As `Transport.run`.
    """
    check_may_act(policy)
    started = session.clock()
    seen = look(session, "look at GPUs", apps=True) if policy.gpus else None
    names = _names_to_stop(session, policy, seen)
    outcome = Outcome(step=Step(name="stop_systemd"))
    if names:
        result = _stop(session, names)
        states = _stopped_states(session, names, result)
        outcome.step.via = result.where
        outcome.stopped = _rows(states, result)
        table = _members(session, names, states, result)
        reading = seen.reading if seen else GpuReading()
        units = [state.name for state in states]
        choice = choose(table, reading, policy, units=units, protect=session.protect)
        outcome.ended = end(session, choice, table.pid_namespace, policy)
        outcome.spared = choice.spared
    outcome.stopped += _earlier(before, names, outcome.stopped, seen)
    outcome.step.seconds = session.clock() - started
    return outcome


def units_to_stop(session: Session, policy: ReclaimPolicy, seen: Survey) -> list[UnitState]:
    """The host's units that no protection names; with only some GPUs wanted, those on them."""
    names = _names_to_stop(session, policy, seen)
    return [state for state in seen.units if state.name in names]


def _names_to_stop(session: Session, policy: ReclaimPolicy, seen: Survey | None) -> list[str]:
    patterns = [*session.protect, *policy.protect]
    units = [unit for unit in session.units if not protected_name(patterns, unit)]
    if not policy.gpus or seen is None:
        return units
    choice = choose(seen.table, seen.reading, policy, protect=session.protect)
    return [x for x in units if any(in_unit(p.cgroups, x) for p in choice.victims)]


def _stop(session: Session, names: Sequence[str]) -> Result:
    """Stop units; those that refuse to be stopped by hand are left out if they do not run."""
    log.info("%s: stopping %s", session.host, ", ".join(names))
    script = Script(
        f"stop {', '.join(names)}",
        {
            "stop": systemd.stop(names),
            "units": systemd.show(names),
            "processes": processes.scan(session.devices, units=names),
        },
        timeout_s=systemd.MAX_STOP_S + session.script_timeout_s,
        writes=True,
    )
    result = session.links.run(script)
    if result.section("stop").code != systemd.REFUSED:
        return result
    states = unit_states(session, result, names)
    refusing = [state for state in states if not state.can_stop]
    running = [state.name for state in refusing if state.active]
    if running or not refusing:
        raise CommandFailed(
            f"{session.host}: {', '.join(running or names)} refuses to be stopped by hand "
            "(RefuseManualStop); nothing was touched",
            remedy="stop what it belongs to, and name that in the GpuHost block",
            result=result,
        )
    rest = [name for name, state in zip(names, states, strict=True) if state.can_stop]
    return _stop(session, rest) if rest else result


def _stopped_states(session: Session, names: Sequence[str], result: Result) -> list[UnitState]:
    """The units' states before, once it is certain that none runs any more."""
    before = unit_states(session, result, names, part="stop")
    still = [x for x in unit_states(session, result, names) if x.active]
    if still:
        state = f"{still[0].active_state} ({still[0].sub_state})"
        raise CommandFailed(
            f"{session.host}: {still[0].name} is {state} after it was told to stop",
            remedy=f"see `systemctl status {still[0].name}` and its journal on the host",
            result=result,
        )
    return before


def _rows(states: Sequence[UnitState], result: Result) -> list[StoppedUnit]:
    live = {x.name for x in systemd.parse_show(result.section("stop")) if x.active}
    rows = [
        StoppedUnit(
            unit=x.name, active=x.active, triggered_by=[t for t in x.triggered_by if t in live]
        )
        for x in states
    ]
    return [row for row in rows if row.active or row.triggered_by]


def _earlier(
    before: Sequence[UnitState],
    names: Sequence[str],
    rows: Sequence[StoppedUnit],
    seen: Survey | None,
) -> list[StoppedUnit]:
    """What a former attempt of this step stopped."""
    known = {row.unit for row in rows if row.active}
    # With some GPUs wanted, nothing tells any more that a unit stopped by now was among them.
    gone = {state.name for state in seen.units if not state.active} if seen else set()
    return [
        StoppedUnit(unit=x.name, triggered_by=x.triggered_by)
        for x in before
        if x.active and x.name not in known and x.name in gone.union(names)
    ]


def _members(
    session: Session, names: Sequence[str], states: Sequence[UnitState], result: Result
) -> ProcessTable:
    """What is left in the control groups of the stopped units."""
    table = seen_processes(session, result)
    units = [state.name for state in states]
    if units != list(names):
        # Aliases: control groups carry the units' own names.
        table = look(session, "look at units", gpus=False).table
    inside = [x for x in table.processes if any(in_unit(x.cgroups, unit) for unit in units)]
    return table.model_copy(update={"processes": inside, "uninspected": []})
