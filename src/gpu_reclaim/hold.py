"""Holding a host and putting it back: take, keep, prove, restore, read."""

from __future__ import annotations

import getpass
import logging
import math
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpu_reclaim import causes, holding
from gpu_reclaim.commands import Result, Script, Section
from gpu_reclaim.errors import BadAnswer, HeldByOther, HoldBroken, HoldLost
from gpu_reclaim.holding import Answer, Claim
from gpu_reclaim.models import Lease, ReclaimPolicy, RestoredUnit, RestoreReport, Survey, Taken
from gpu_reclaim.owners import in_unit
from gpu_reclaim.protected import PROTECTED_UNITS, protected_name
from gpu_reclaim.restoring import parse_units
from gpu_reclaim.session import Session
from gpu_reclaim.steps import survey, units_to_stop
from gpu_reclaim.systemd import dependents
from gpu_reclaim.taking import LOST
from gpu_reclaim.victims import choose

log = logging.getLogger(__name__)

SCRIPT_S = 120
"""Limit of a script of the hold that waits for no unit, in seconds."""

UNITS_S = 900
"""Limit of one that starts units, each for a limited time."""

POLL_S = 2
"""How often a host that another run holds is looked at, in seconds."""

BUSY = "another script has been working at it for a while"


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
    session.locked = True
    session.held = own if policy.hold_minutes else None
    session.signed_s = session.clock()
    claim = replace(
        _claim(session), owner=holder.name or default_owner(), url=holder.url, runs=holder.runs
    )
    rest = _rest(session, policy, before, own)
    body = holding.take(claim, own, order, rest, places=session.places)
    what = "take the host" if policy.hold_minutes else "lock the host"
    result, answer = _ask(session, what, body, UNITS_S)
    if answer.status == "held":
        session.locked, session.held = False, None
        raise _held_by_other(session, answer)
    _need(session, answer, result)
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
        body = holding.release(_claim(session), places=session.places)
        _ask(session, "unlock the host", body, SCRIPT_S)
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


def keep(session: Session) -> None:
    """Prolong the lease when half of it has passed; nothing to do where nothing is locked.

    Raises:
        HoldLost: It is no longer ours.
        TransportError: As `Transport.run`.
    """
    if session.locked and session.clock() - session.signed_s > session.lease_s / 2:
        renew(session, session.lease_s)


def renew(session: Session, hold_s: float) -> None:
    """Prolong the lease by so many seconds from now.

    Raises:
        HoldLost: It is no longer ours.
        TransportError: As `Transport.run`.
    """
    body = holding.renew(_claim(session, ttl_s=hold_s), places=session.places)
    _sign(session, "keep the hold", body, SCRIPT_S)


def only_ours(session: Session, body: str) -> str:
    """Shell text of a part that acts, for a host that is locked: it acts only while it is ours."""
    if not session.locked:
        return body
    return holding.only_ours(session.token, body, places=session.places)


def check_ours(session: Session, section: Section, result: Result) -> None:
    """Look whether a part that acts did.

    Raises:
        HoldLost: It did not, for the host was not ours any more.
    """
    if session.locked and section.code == LOST:
        raise _lost(session, result)


def prove(session: Session, hold_s: float) -> str:
    """Try to start every held unit and trigger; if each is refused, hold on for `hold_s` more.

    Returns:
        Until when the host is held, by its own clock.

    Raises:
        HoldBroken: One started; it was stopped again.
        HoldLost: The hold is no longer ours.
        TransportError: As `Transport.run`.
    """
    body = holding.prove(_claim(session, ttl_s=hold_s), places=session.places)
    answer = _sign(session, "prove the hold", body, UNITS_S)
    log.info("%s: a start was refused of %s", session.host, ", ".join(answer.units) or "no unit")
    return answer.lease.expires if answer.lease else ""


def restore(session: Session, *, everybody: bool = False, run: str = "") -> RestoreReport:
    """Put back what is on the host's record, and leave no trace. Doing it twice is safe.

    Args:
        session: The host.
        everybody: Whoever holds the host; else only what this session took.
        run: Id of a Prefect run: only what that run took.

    Raises:
        BadAnswer: The answer makes no sense, or the host is busy with it.
        TransportError: As `Transport.run`.
    """
    token = f"run:{run}" if run else session.token
    body = holding.restore("any" if everybody else token, places=session.places)
    script = Script("put back what was stopped", {"hold": body}, timeout_s=UNITS_S, writes=True)
    result = session.links.run(script)
    section = result.section("hold")
    status = section.value("status")
    if status not in ("done", "failed", "nothing", "other"):
        raise _unclear(session, status, result)
    session.locked, session.held = False, None
    who = " ".join(x for x in (section.value("owner"), section.value("url")) if x)
    report = _report(session.host, status, parse_units(section), who)
    log.info("%s: %s", session.host, report.summary)
    for row in report.restored:
        log.info("%s: %s", session.host, row)
    return report


def read(session: Session) -> Answer:
    """Who holds the host, and what is on its record; touches nothing.

    Raises:
        TransportError: As `Transport.run`.
    """
    body = holding.read(places=session.places)
    script = Script("look at the hold", {"hold": body}, timeout_s=SCRIPT_S)
    return holding.parse(session.links.run(script).section("hold"))


def _report(host: str, status: str, rows: Sequence[RestoredUnit], owner: str) -> RestoreReport:
    failed = [row.unit for row in rows if row.outcome == "failed"]
    alone = [row.unit for row in rows if row.outcome in ("edited", "gone")]
    said = {
        "nothing": "nothing was stopped here, so there is nothing to put back",
        "other": "another run holds the host by now; nothing was touched",
        "done": f"put back: {len(rows) - len(alone)} of {len(rows)} units; no hold is left",
        "failed": f"{', '.join(failed)} did not start; it stays on the record, no hold is left",
    }[status]
    remedy = f"see `journalctl -u {failed[0]}` on the host, then restore again" if failed else ""
    if alone and not failed:
        said = f"{said}; left alone because edited or gone meanwhile: {', '.join(alone)}"
        remedy = f"start it yourself if it shall run: systemctl start {' '.join(alone)}"
    return RestoreReport(
        host=host,
        summary=said,
        remedy=remedy,
        owner=owner,
        restored=list(rows),
        complete=status != "failed",
    )


def _claim(session: Session, *, ttl_s: float = 0) -> Claim:
    return Claim(session.token, ttl_s=math.ceil(ttl_s or session.lease_s))


def _ask(session: Session, name: str, body: str, limit_s: float) -> tuple[Result, Answer]:
    script = Script(name, {"hold": body}, timeout_s=limit_s, writes=True)
    result = session.links.run(script)
    return result, holding.parse(result.section("hold"))


def _sign(session: Session, name: str, body: str, limit_s: float) -> Answer:
    started = session.clock()
    result, answer = _ask(session, name, body, limit_s)
    _need(session, answer, result)
    session.signed_s = started
    return answer


def _need(session: Session, answer: Answer, result: Result) -> None:
    """Raise unless the host is ours."""
    if answer.status == "taken":
        return
    if answer.status == "lost":
        raise _lost(session, result)
    if answer.status in ("broken", "unset", "unshown"):
        what = f"could be started although held: {', '.join(answer.broken)}"
        if not answer.broken:
            what = f"the hold cannot be set{f': {answer.why}' if answer.why else ''}"
        raise HoldBroken(
            f"{session.host}: {what}", remedy=causes.HOLD_BROKEN.advice(), result=result
        )
    raise _unclear(session, answer.status, result)


def _lost(session: Session, result: Result) -> HoldLost:
    text = f"{session.host}: the hold is no longer ours"
    return HoldLost(text, remedy=causes.HOLD_LOST.advice(), result=result)


def _held_by_other(session: Session, answer: Answer) -> HeldByOther:
    lease = answer.lease or Lease()
    return HeldByOther(
        f"{session.host}: held by {lease}; nothing was touched",
        remedy=causes.HELD.advice(until=lease.expires or "it is over"),
    )


def _unclear(session: Session, status: str, result: Result) -> BadAnswer:
    why = BUSY if status == "busy" else "the host's answer makes no sense"
    return BadAnswer(
        f"{session.host}: the hold: {why}",
        remedy="look at `cat /run/gpu-reclaim/lease` and `ls -l /run/gpu-reclaim-lock` there, "
        "then try again",
        result=result,
    )
