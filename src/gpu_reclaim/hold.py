"""A host that was taken: keep, prove, restore, read; see `claiming` for taking it."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from gpu_reclaim import causes, holding
from gpu_reclaim.commands import Result, Script, Section
from gpu_reclaim.errors import BadAnswer, HoldBroken, HoldLost
from gpu_reclaim.holding import Answer, Claim
from gpu_reclaim.models import RestoredUnit, RestoreReport
from gpu_reclaim.restoring import parse_units
from gpu_reclaim.session import Session
from gpu_reclaim.taking import LOST

log = logging.getLogger(__name__)

SCRIPT_S = 120
"""Limit of a script of the hold that waits for no unit, in seconds."""

UNITS_S = 900
"""Limit of one that starts units, each for a limited time."""

BUSY = "another script has been working at it for a while"


def keep(session: Session) -> None:
    """Prolong the lease when half of it has passed; nothing to do where nothing is locked.

    Raises:
        HoldLost: It is no longer ours.
        TransportError: As `Transport.run`.
    """
    if session.locked and session.clock() - session.signed_s > session.lease_s / 2:
        renew(session, session.lease_s)


def renew(session: Session, hold_s: float, limit_s: float = SCRIPT_S) -> None:
    """Prolong the lease by so many seconds from now; the script ends within `limit_s`.

    Raises:
        HoldLost: It is no longer ours.
        TransportError: As `Transport.run`.
    """
    body = holding.renew(claim(session, ttl_s=hold_s), places=session.places)
    _sign(session, "keep the hold", body, limit_s)


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
    body = holding.prove(claim(session, ttl_s=hold_s), places=session.places)
    answer = _sign(session, "prove the hold", body, UNITS_S)
    session.lease_s = hold_s
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
    if failed and failed[0] == "(record)":
        remedy = "read it on the host, start what ran before, and remove it"
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
        ours=status in ("done", "failed"),
    )


def claim(session: Session, *, ttl_s: float = 0) -> Claim:
    """A session's claim on its host."""
    return Claim(session.token, ttl_s=math.ceil(ttl_s or session.lease_s))


def ask(session: Session, name: str, body: str, limit_s: float) -> tuple[Result, Answer]:
    """Run a script of the hold.

    Raises:
        TransportError: As `Transport.run`.
    """
    script = Script(name, {"hold": body}, timeout_s=limit_s, writes=True)
    result = session.links.run(script)
    return result, holding.parse(result.section("hold"))


def _sign(session: Session, name: str, body: str, limit_s: float) -> Answer:
    started = session.clock()
    result, answer = ask(session, name, body, limit_s)
    need(session, answer, result)
    session.signed_s = started
    return answer


def need(session: Session, answer: Answer, result: Result) -> None:
    """Look whether the host is ours.

    Raises:
        HoldLost: It is not any more.
        HoldBroken: The hold cannot be set, or a held unit could be started.
        BadAnswer: The answer makes no sense, or the host is busy with it.
    """
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


def _unclear(session: Session, status: str, result: Result) -> BadAnswer:
    why = BUSY if status == "busy" else "the host's answer makes no sense"
    return BadAnswer(
        f"{session.host}: the hold: {why}",
        remedy="look at `cat /run/gpu-reclaim/lease` and `ls -l /run/gpu-reclaim-lock` there, "
        "then try again",
        result=result,
    )
