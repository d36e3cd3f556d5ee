"""The final look, and more of it where GPUs are not free: the verdict shall name who and why."""

from __future__ import annotations

import logging

from gpu_reclaim import nvidia_smi, processes, systemd
from gpu_reclaim.again import running_again
from gpu_reclaim.commands import Script
from gpu_reclaim.errors import BadAnswer, GpuReclaimError
from gpu_reclaim.models import Process, ReclaimPolicy, Survey, UnitState
from gpu_reclaim.owners import owner
from gpu_reclaim.protected import ZERO_MEMORY
from gpu_reclaim.session import TOOL_SHARE, Session, look
from gpu_reclaim.settling import holding
from gpu_reclaim.victims import program

log = logging.getLogger(__name__)

NAME = "verify_nvidia_smi"


def verify(session: Session, policy: ReclaimPolicy) -> Survey:
    """The final look; where a GPU is not free, also at who starts holders, the node, the driver.

    Raises:
        TransportError: As `Transport.run`.
    """
    survey = look(session, NAME, apps=bool(policy.gpus), wide=True)
    if policy.in_use(survey.reading.gpus) or session.left or holding(session, policy, survey):
        started = survey.step
        survey = look(session, NAME, apps=True, everybody=True, wide=True)
        survey.step.seconds += started.seconds
        _explain(session, policy, survey)
    survey.restarting = restarting(session)
    shown = [*survey.units, *survey.dependents]
    down = [state for state in shown if state.name in session.stopped]
    survey.running_again = running_again(session, down)
    return survey


def _explain(session: Session, policy: ReclaimPolicy, survey: Survey) -> None:
    """Everything that helps to say why a GPU is not free."""
    holders = holding(session, policy, survey)
    survey.starters = {process.pid: _starter(process, survey) for process in holders}
    if holders:
        return
    survey.undead = [x for x in survey.table.processes if x.state in ("Z", "D")]
    if session.links.node is not None:
        _look_at_node(session, survey)
    _ask_driver(session, survey)


def restarting(session: Session) -> list[str]:
    """Units outside the host's own whose process was ended, and which do not stay down.

    `Restart=` may let seconds pass before it brings a holder back, when nobody looks any more.
    """
    if not session.owners:
        return []
    body = systemd.show(sorted(session.owners))
    result = session.links.run(Script("look at the owners", {"units": body}))
    states = {x.name: x for x in systemd.parse_show(result.section("units"))}
    if set(session.owners) - set(states):
        raise BadAnswer(
            f"{result.where}: systemctl does not show {', '.join(session.owners)}, of which "
            "processes were ended, so whether they come back is unknown",
            remedy="see `systemctl status` on the host",
            result=result,
        )
    return [unit for unit, ran in session.owners.items() if _runs_anew(states[unit], ran)]


def _runs_anew(state: UnitState, ran: str) -> bool:
    """It is about to run again, or does already; as long as its invocation is the same, it did not.

    A daemon whose child was ended goes on in its invocation, and starts another when asked.
    """
    return state.active_state == "activating" or (state.active and state.invocation != ran)


def _starter(process: Process, survey: Survey) -> str:
    """Its parent, for people; empty where that is init, or not to be seen."""
    parent = next((x for x in survey.table.processes if x.pid == process.ppid), None)
    if parent is None or parent.pid == 1:
        return ""
    return f"{parent.name} (pid {parent.pid}, {owner(parent.cgroups)})"


def _look_at_node(session: Session, survey: Survey) -> None:
    """Holders as the node sees them: elsewhere, or in our guest though they are not seen in it."""
    node = session.links.node
    if node is None:
        return
    body = processes.scan(session.devices)
    script = Script("look at the node", {"processes": body}, timeout_s=session.script_timeout_s)
    try:
        result = node.run(script)
        table = processes.parse_scan(result, result.section("processes"), session.devices)
    except GpuReclaimError as error:
        log.warning("the node could not be looked at: %s", error.message)
        return
    for process in table.holders:
        if program(process) in ZERO_MEMORY:
            continue
        of = owner(process.cgroups)
        who = f"{process.name} (pid {process.pid} on the node)"
        if of.kind == "guest" and of.name == str(session.vmid):
            survey.inside.append(who)
        else:
            place = str(of) if of.kind == "guest" else "the node itself"
            survey.other_guests.setdefault(place, []).append(who)


def _ask_driver(session: Session, survey: Survey) -> None:
    """Its version, and whether a GPU is in MIG mode: both change what memory in use means."""
    fields = {"driver": "driver_version", "mig": "mig.mode.current"}
    limit = min(nvidia_smi.TIME_LIMIT_S, session.script_timeout_s * TOOL_SHARE)
    parts = {name: nvidia_smi.query(text, limit) for name, text in fields.items()}
    script = Script("ask the driver", parts, timeout_s=session.script_timeout_s, together=True)
    try:
        result = session.links.run(script)
    except GpuReclaimError as error:
        log.warning("the driver could not be asked: %s", error.message)
        return
    # A driver that knows no MIG refuses the field.
    driver, mig = (result.section(name) for name in ("driver", "mig"))
    survey.driver = driver.value("gpu").strip() if driver.code == 0 else ""
    survey.mig = mig.code == 0 and any(x.strip() == "Enabled" for x in mig.lines("gpu"))
