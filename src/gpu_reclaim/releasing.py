"""Ending who holds the GPUs: through the hypervisor, and directly.

Each step looks first and does only what is still needed, so calling it again after a lost
connection is safe; none repeats a write by itself.
"""

from __future__ import annotations

import logging

from gpu_reclaim import hold, mps, signals, systemd
from gpu_reclaim.commands import Script
from gpu_reclaim.errors import AccessRefused, HostKeyRefused, Unreachable
from gpu_reclaim.models import (
    Ended,
    Outcome,
    Process,
    ProcessTable,
    ReclaimPolicy,
    Spared,
    Step,
)
from gpu_reclaim.owners import owner
from gpu_reclaim.processes import scan
from gpu_reclaim.session import Run, Session, look, seen_processes
from gpu_reclaim.steps import check_may_act, describe
from gpu_reclaim.victims import Choice, choose

log = logging.getLogger(__name__)

LIVING = ("R", "S", "D", "T", "t", "I")
"""State letters of a process that is there after KILL, other than the dead (proc(5))."""

ROUNDS = 3
"""How often a step ends who is there: workers that start others outrun a single round. Who is still
there after three is brought back by somebody else, and that is a verdict."""


def proxmox_exec_kill(session: Session, policy: ReclaimPolicy) -> Outcome:
    """End holders and the policy's matches inside the guest, through its hypervisor.

    Without a hypervisor, or with `via="ssh"`, there is nothing to do.

    Raises:
        GuestRefused: The guest is another one, locked or stopped; nothing was touched.
        TransportError: As `Transport.run`.
    """
    check_may_act(session, policy)
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
    """Look, choose, end; look again, and end who is new, a few times; then ask MPS to quit."""
    check_may_act(session, policy)
    hold.keep(session)
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
        wide=with_fuser,
    )
    units = () if policy.gpus else session.units
    outcome = Outcome(step=Step(name=name, via=seen.step.via))
    table, tried = seen.table, set[tuple[int, int]]()
    spared: dict[tuple[int, str], Spared] = {}
    # The list of who uses which GPU is as old as the look: it serves one round.
    for _ in range(1 if partly else ROUNDS):
        choice = choose(table, seen.reading, policy, units=units, protect=session.protect)
        spared |= {(row.pid, row.name): row for row in choice.spared}
        fresh = [x for x in choice.victims if (x.pid, x.start_time) not in tried]
        if not fresh:
            break
        ended, table = end_and_look(session, fresh, table.pid_namespace, policy, run=run)
        outcome.ended += ended
        tried |= {(x.pid, x.start_time) for x in fresh}
    outcome.spared = list(spared.values())
    outcome.ended += _quit_mps(session, outcome.spared, table, run)
    outcome.step.seconds = session.clock() - started
    return outcome


def _quit_mps(session: Session, spared: list[Spared], table: ProcessTable, run: Run) -> list[Ended]:
    """Ask MPS to quit, if its server holds a GPU and no client is left."""
    servers = [row for row in spared if row.by_command and row.devices]
    if not servers:
        return []
    log.info("%s: asking MPS to quit", session.host)
    script = Script(
        "ask MPS to quit",
        {"mps": mps.quit_servers(servers)},
        timeout_s=mps.time_limit_s(servers),
        writes=True,
    )
    result = run(script)
    starts = {process.pid: process.start_time for process in table.processes}
    ended, left = mps.parse_quit(result.section("mps"), servers, starts, result.where)
    session.mps_left |= left
    gone = {row.pid for row in ended}
    spared[:] = [row for row in spared if row.pid not in gone]
    return ended


def end(session: Session, choice: Choice, namespace: str, policy: ReclaimPolicy) -> list[Ended]:
    """End the chosen victims, and say what became of each.

    Raises:
        BadAnswer: They were seen in another PID namespace; nothing was signalled.
        TransportError: As `Transport.run`.
    """
    if not choice.victims:
        return []
    return end_and_look(session, choice.victims, namespace, policy, run=session.links.run)[0]


def end_and_look(
    session: Session,
    victims: list[Process],
    namespace: str,
    policy: ReclaimPolicy,
    *,
    run: Run,
) -> tuple[list[Ended], ProcessTable]:
    """End victims, say what became of each, and look again in the same round trip.

    Raises:
        BadAnswer: They were seen in another PID namespace; nothing was signalled.
        TransportError: As `Transport.run`.
    """
    for victim in victims:
        log.info("%s: ending %s", session.host, describe(victim))
    belongs = {victim.pid: owner(victim.cgroups) for victim in victims}
    units = {of.name for of in belongs.values() if of.kind == "unit"}
    others = sorted(units - set(session.units) - set(session.owners))
    script = Script(
        f"end {len(victims)} processes",
        ({"owners": systemd.show(others)} if others else {})
        | {
            "end": hold.only_ours(
                session, signals.end(victims, namespace, grace_s=policy.term_grace_s)
            ),
            "processes": scan(session.devices, units=session.units, everybody=bool(policy.match)),
        },
        timeout_s=signals.time_limit_s(policy.term_grace_s) + session.script_timeout_s,
        writes=True,
    )
    # Should the answer be lost, they are known as units that may run anew.
    session.owners |= dict.fromkeys(others, "")
    result = run(script)
    hold.check_ours(session, result.section("end"), result)
    if others:
        states = systemd.parse_show(result.section("owners"))
        session.owners |= {x.name: x.invocation for x in states if x.name in others}
    owners = {pid: str(of) for pid, of in belongs.items()}
    ended = signals.parse_end(result, result.section("end"), victims, owners, result.where)
    session.left |= {(x.pid, x.start_time) for x in ended if x.outcome in LIVING}
    return ended, seen_processes(session, result)
