"""Taking a host, and giving it up: one run at a time works on it."""

from __future__ import annotations

import getpass
import logging
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpu_reclaim import causes, holding
from gpu_reclaim.errors import HeldByOther
from gpu_reclaim.hold import BUSY, SCRIPT_S, UNITS_S, ask, claim, need, read
from gpu_reclaim.holding import Answer
from gpu_reclaim.models import Lease, ReclaimPolicy, RestoredUnit, Survey, Taken
from gpu_reclaim.owners import in_unit
from gpu_reclaim.protected import PROTECTED_UNITS, protected_name
from gpu_reclaim.session import Session
from gpu_reclaim.steps import survey, units_to_stop
from gpu_reclaim.systemd import dependents
from gpu_reclaim.victims import choose

log = logging.getLogger(__name__)

POLL_S = 2
"""How often a host that another run holds is looked at, in seconds."""


@dataclass(frozen=True)
class Holder:
    """Who takes a host, for people who find it taken.

    Attributes:
        name: For example `root@pve, pid 4711`; empty: this process.
        url: Where to see the run.
        runs: Ids of the Prefect run and of those that it is part of.
    """

    name: str = ""
    url: str = ""
    runs: Sequence[str] = ()


def take(
    session: Session, policy: ReclaimPolicy, before: Survey, holder: Holder | None = None
) -> Taken:
    """Take the host as soon as no other run has it, or not at all.

    The lease keeps other runs off. A policy with `hold_minutes` also writes down what runs, keeps
    it from being started, and sets the timer that puts it back. What an earlier run left is put
    back first. Doing it again after a lost answer is safe.

    Args:
        session: The host.
        policy: Which units will be stopped; how long to wait for another run.
        before: The survey. What runs is read anew in the script that writes it down.
        holder: Who takes it.

    Raises:
        HeldByOther: Somebody else holds the host, `wait_minutes` long; nothing was touched.
        HoldBroken: The hold cannot be set; nothing was stopped.
        TransportError: As `Transport.run`, and what `survey` raises after a wait.
    """
    end = session.clock() + policy.wait_minutes * 60
    taken = Taken()
    while True:
        try:
            taken.leftovers = _take(session, policy, before, holder or Holder())
        except HeldByOther as error:
            _wait(session, end, error)
            taken.waited = True
            before = survey(session, policy)
        else:
            return taken


def _wait(session: Session, end: float, error: HeldByOther) -> None:
    """Until nobody holds the host.

    Raises:
        HeldByOther: Somebody still does, at the end of the time.
    """
    log.info("%s; waiting for it", error.message.partition(";")[0])
    while True:
        left = end - session.clock()
        if left <= 0:
            raise error
        session.sleep(min(POLL_S, left))
        if read(session).status != "taken":
            return


def _take(
    session: Session, policy: ReclaimPolicy, before: Survey, holder: Holder
) -> list[RestoredUnit]:
    states = [*before.units, *before.dependents]
    own = [x.name for x in units_to_stop(session, policy, before)] if policy.hold_minutes else []
    along = dependents(states, own)
    # Targets only group units: nothing stops with them.
    names = [*own, *(unit for unit in along if not unit.endswith(".target"))]
    order = holding.restore_order([x for x in states if x.name in names], own)
    session.lease_s += 0 if session.locked else policy.settle_timeout_s + policy.term_grace_s
    again, session.locked = session.locked, True
    session.held = own if policy.hold_minutes else None
    session.signed_s = session.clock()
    ours = replace(
        claim(session), owner=holder.name or default_owner(), url=holder.url, runs=holder.runs
    )
    rest = _rest(session, policy, before, own)
    body = holding.take(ours, own, order, rest, places=session.places)
    what = "take the host" if policy.hold_minutes else "lock the host"
    result, answer = ask(session, what, body, UNITS_S)
    # An earlier attempt of ours may be the one that is at work: then it is to be put back.
    if answer.status == "held" or (answer.status == "busy" and not again):
        session.locked, session.held = False, None
        raise _held_by_other(session, answer)
    need(session, answer, result)
    if policy.hold_minutes:
        log.info("%s: held; %s cannot be started", session.host, ", ".join(own) or "no unit")
    if answer.left_by and answer.found:
        log.warning("%s: %s had left units stopped; put back first", session.host, answer.left_by)
    return list(answer.found) if answer.left_by else []


def release(session: Session) -> None:
    """Give up the lease of a run without a hold; starts nothing. Where nothing is locked, no more.

    Raises:
        TransportError: As `Transport.run`.
    """
    if session.locked:
        body = holding.release(claim(session), places=session.places)
        ask(session, "unlock the host", body, SCRIPT_S)
        session.locked = False


def _rest(
    session: Session, policy: ReclaimPolicy, before: Survey, own: Sequence[str]
) -> list[tuple[str, int, int]]:
    """Who of the units is to be ended with them; of the driver's own units nobody is."""
    units = [unit for unit in own if not protected_name(PROTECTED_UNITS, unit)]
    choice = choose(before.table, before.reading, policy, units=units, protect=session.protect)
    return [
        (unit, victim.pid, victim.start_time)
        for unit in units
        for victim in choice.victims
        if in_unit(victim.cgroups, unit)
    ]


def default_owner() -> str:
    """For example `root@pve, pid 4711`: this process."""
    return f"{getpass.getuser()}@{platform.node()}, pid {os.getpid()}"


def _held_by_other(session: Session, answer: Answer) -> HeldByOther:
    if answer.status == "busy":
        return HeldByOther(
            f"{session.host}: {BUSY}, as when a slow unit is put back; nothing was touched",
            remedy="wait a little, or let the policy's wait_minutes do so; "
            "`ls -l /run/gpu-reclaim-lock` there shows the script's pid",
        )
    lease = answer.lease or Lease()
    return HeldByOther(
        f"{session.host}: held by {lease}; nothing was touched",
        remedy=causes.HELD.advice(until=lease.expires or "it is over"),
    )
