"""The final look, and more of it where GPUs are not free: the verdict shall name who and why."""

from __future__ import annotations

import logging

from gpu_reclaim import nvidia_smi, processes, systemd
from gpu_reclaim.again import running_again
from gpu_reclaim.commands import Script
from gpu_reclaim.errors import GpuReclaimError
from gpu_reclaim.models import Process, ReclaimPolicy, Survey
from gpu_reclaim.owners import owner
from gpu_reclaim.protected import ZERO_MEMORY
from gpu_reclaim.session import Session, look
from gpu_reclaim.settling import holding
from gpu_reclaim.victims import program

log = logging.getLogger(__name__)

NAME = "verify_nvidia_smi"


def verify(session: Session, policy: ReclaimPolicy) -> Survey:
    """The final look; where a GPU is not free, also at who starts holders, the node, the driver.

    Raises:
        TransportError: As `Transport.run`.
    """
    survey = look(session, NAME, apps=bool(policy.gpus))
    rest = any(gpu.memory_used_mib for gpu in survey.reading.gpus)
    if rest or holding(session, policy, survey):
        started = survey.step
        survey = look(session, NAME, apps=True, everybody=True)
        survey.step.seconds += started.seconds
        _explain(session, policy, survey)
    survey.restarting = restarting(session)
    down = [state for state in survey.units if state.name in session.stopped]
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
    states = systemd.parse_show(result.section("units"))
    return [x.name for x in states if x.sub_state == "auto-restart"]


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
    script = Script("look at the node", {"processes": processes.scan(session.devices)})
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
    parts = {
        "driver": nvidia_smi.query("driver_version"),
        "mig": nvidia_smi.query("mig.mode.current"),
    }
    script = Script("ask the driver", parts, timeout_s=session.script_timeout_s, together=True)
    result = session.links.run(script)
    # A driver that knows no MIG refuses the field.
    driver, mig = (result.section(name) for name in ("driver", "mig"))
    survey.driver = driver.value("gpu").strip() if driver.code == 0 else ""
    survey.mig = mig.code == 0 and any(x.strip() == "Enabled" for x in mig.lines("gpu"))
