"""Stopping units: triggers first, then the units, then what is left in their control groups."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from gpu_reclaim import hold, processes, systemd
from gpu_reclaim.again import running_again, stopped_along
from gpu_reclaim.commands import Result, Script
from gpu_reclaim.errors import CameBack, CommandFailed
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
from gpu_reclaim.protected import PROTECTED_UNITS, protected_name
from gpu_reclaim.releasing import end
from gpu_reclaim.session import Session, look, seen_processes, unit_states
from gpu_reclaim.steps import check_may_act, name_units, names_to_stop, refuses_stop
from gpu_reclaim.verdict import runs_again
from gpu_reclaim.victims import choose

log = logging.getLogger(__name__)

_WHY_NOT = {
    systemd.UNSAFE: (
        "systemd cannot be told to send no KILL to the driver's own units",
        "see whether /run is full or read-only on the host",
    ),
    systemd.UNSHOWN: (
        "systemctl cannot show what else would stop",
        "see `systemctl status` on the host",
    ),
}

LEFT_STOP_S = 30
"""How long a stop may still take once nobody is left in the unit's control group, in seconds."""


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
        CameBack: A unit stopped, and runs again.
        CommandFailed: A unit did not stop; its own words are in the result.
        UnknownUnit: systemd does not know one of them; nothing was stopped.
        TransportError: As `Transport.run`.
    """
    check_may_act(session, policy)
    hold.keep(session)
    started = session.clock()
    name_units(session, policy)
    seen = look(session, "look at GPUs", apps=True) if policy.gpus else None
    names = [
        unit
        for unit in names_to_stop(session, policy, seen)
        if session.held is None or unit in session.held
    ]
    outcome = Outcome(step=Step(name="stop_systemd"))
    if names:
        _stop_and_end(session, policy, names, seen, outcome)
    earlier = _earlier(before, names, outcome.stopped, seen)
    again = {row.unit for row in earlier}
    outcome.stopped = [row for row in outcome.stopped if row.unit not in again] + earlier
    session.stopped |= {row.unit for row in outcome.stopped}
    outcome.step.seconds = session.clock() - started
    return outcome


def _stop_and_end(
    session: Session,
    policy: ReclaimPolicy,
    names: Sequence[str],
    seen: Survey | None,
    outcome: Outcome,
) -> None:
    """Stop units, and end what is left in their control groups."""
    session.stopped |= set(names)
    result = _stop(session, names)
    states = unit_states(session, result, names, part="stop")
    after = unit_states(session, result, names)
    _refuse_running(session, states, after, result)
    outcome.step.via = result.where
    outcome.stopped = _rows(states, result)
    table = _members(session, names, states, result)
    units = [state.name for state in states]
    reading = seen.reading if seen else GpuReading()
    choice = choose(table, reading, policy, units=units, protect=session.protect)
    outcome.ended = end(session, choice, table.pid_namespace, policy)
    outcome.spared = choice.spared
    # Where one does not die, its unit cannot stop; the verdict will say so, and why.
    if not session.left:
        _finish_stop(session, after)


def _script(session: Session, names: Sequence[str], limit_s: float) -> Script:
    never_kill = [unit for unit in names if protected_name(PROTECTED_UNITS, unit)]
    return Script(
        f"stop {', '.join(names)}",
        {
            "stop": hold.only_ours(
                session, systemd.stop(names, limit_s=limit_s, never_kill=never_kill)
            ),
            "units": systemd.show_tree(names),
            "processes": processes.scan(session.devices, units=names),
        },
        # Triggers, then units, each within the limit.
        timeout_s=2 * limit_s + session.script_timeout_s,
        writes=True,
    )


def _stop(session: Session, names: Sequence[str]) -> Result:
    """Stop units; those that refuse to be stopped by hand are left out if they do not run."""
    log.info("%s: stopping %s", session.host, ", ".join(names))
    result = session.links.run(_script(session, names, systemd.MAX_STOP_S))
    hold.check_ours(session, result.section("stop"), result)
    if result.section("stop").code in _WHY_NOT:
        why, remedy = _WHY_NOT[result.section("stop").code]
        raise CommandFailed(
            f"{session.host}: {why}; nothing was stopped", remedy=remedy, result=result
        )
    if result.section("stop").code != systemd.REFUSED:
        return result
    states = unit_states(session, result, names)
    refusing = [x for x in states if not x.can_stop or x.load_state == "not-found"]
    running = [state.name for state in refusing if state.active]
    if running or not refusing:
        raise refuses_stop(session, running or names, result)
    rest = [name for name, state in zip(names, states, strict=True) if state not in refusing]
    return _stop(session, rest) if rest else result


def _refuse_running(
    session: Session, before: Sequence[UnitState], after: Sequence[UnitState], result: Result
) -> None:
    """A unit that runs after its stop did not stop, or was started; one still stopping may pass."""
    runs = [x for x in after if x.active and x.active_state != "deactivating"]
    same = {x.invocation for x in before}
    _refuse_unstopped(session, [x for x in runs if x.invocation in same], result)
    again = running_again(session, runs)
    if not again:
        return
    finding = runs_again(again)
    raise CameBack(f"{session.host}: {finding.summary}", remedy=finding.remedy, result=result)


def _refuse_unstopped(session: Session, still: Sequence[UnitState], result: Result) -> None:
    if still:
        state = f"{still[0].active_state} ({still[0].sub_state})"
        raise CommandFailed(
            f"{session.host}: {still[0].name} is {state} after it was told to stop",
            remedy=f"see `systemctl status {still[0].name}` and its journal on the host",
            result=result,
        )


def _finish_stop(session: Session, after: Sequence[UnitState]) -> None:
    """A stop that hung ends when nobody is left of its unit, or never.

    Raises:
        CommandFailed: It did not.
    """
    names = [state.name for state in after if state.active_state == "deactivating"]
    if not names:
        return
    log.warning("%s: %s did not stop in time", session.host, ", ".join(names))
    result = session.links.run(_script(session, names, LEFT_STOP_S))
    hold.check_ours(session, result.section("stop"), result)
    still = [x for x in unit_states(session, result, names) if x.active]
    _refuse_unstopped(session, still, result)


def _rows(states: Sequence[UnitState], result: Result) -> list[StoppedUnit]:
    """What ran, or would have been started, and does no more."""
    shown = {x.name: x for x in systemd.live_triggers(systemd.parse_show(result.section("stop")))}
    rows = [StoppedUnit(unit=x.name, active=x.active, triggered_by=x.triggered_by) for x in states]
    running = {x.name for x in systemd.parse_show(result.section("units")) if x.active}
    along = systemd.dependents(list(shown.values()), [state.name for state in states])
    rows += [
        stopped_along(shown[name], because)
        for name, because in along.items()
        if name in shown and shown[name].active and name not in running
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
