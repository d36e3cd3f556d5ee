"""However a run ends that took a host: held on with a proof, put back, or given up."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from gpu_reclaim import claiming, hold
from gpu_reclaim.errors import GpuReclaimError, GpusNotReclaimed, TransportError
from gpu_reclaim.models import RestoredUnit, RestoreReport
from gpu_reclaim.record import Record
from gpu_reclaim.session import Session, look

log = logging.getLogger(__name__)

PUT_BACK_S = 120
"""How long putting back is tried again over a broken connection, in seconds: as long as a host
takes to start anew."""

PAUSES_S = (1, 15)
"""First and longest pause between two attempts, in seconds; each is twice the one before."""


@contextmanager
def put_back_unless_good(record: Record) -> Iterator[None]:
    """Whatever error ends the block, what was stopped under a hold is put back, and reported.

    That includes a bad verdict, as `GpusNotReclaimed`, and a cancelled run. A run without a hold
    gives up its lock, however it ends. What another run around this one took is left to that.
    """
    session, ours = record.session, not record.inside
    try:
        yield
    except BaseException as error:
        if ours and session.held is not None:
            record.back = put_back(session, tries=isinstance(error, Exception))
            if isinstance(error, GpusNotReclaimed):
                error.report.restored = record.back.restored
                error.report.restore = record.back.summary
        raise
    finally:
        if ours and session.held is None:
            _give_up(session)


def _give_up(session: Session) -> None:
    try:
        claiming.release(session)
    except GpuReclaimError as error:
        log.warning(
            "%s: the lock could not be given up (%s); it is over in %.0f s",
            session.host,
            error.message,
            session.lease_s,
        )


def put_back(session: Session, *, tries: bool = True) -> RestoreReport:
    """Put back; where that cannot be done now, say who will do it.

    Args:
        session: The host.
        tries: Try again for two minutes while the host cannot be reached.
    """
    log.info("%s: putting back what was stopped", session.host)
    began, pause = session.clock(), PAUSES_S[0]
    held, lost = session.held or [], False
    while True:
        try:
            report = hold.restore(session)
            return _found_back(session, held, report) if lost else report
        except GpuReclaimError as error:
            late = session.clock() - began + pause > (PUT_BACK_S if tries else PAUSES_S[1])
            if late or not isinstance(error, TransportError):
                log.error("%s: could not be put back now: %s", session.host, error)
                return RestoreReport(
                    host=session.host,
                    summary=f"could not be put back now ({error.message}); the host does so by "
                    f"itself within {session.lease_s:.0f} s",
                    remedy="restore again once the host can be reached",
                    complete=False,
                )
            log.warning("%s: %s; again in %d s", session.host, error.message, pause)
            lost = True
            session.links.close()
            session.sleep(pause)
            pause = min(pause * 2, PAUSES_S[1])


def _found_back(session: Session, held: Sequence[str], report: RestoreReport) -> RestoreReport:
    """The report of an attempt that found it done: the answer of the one that did it was lost."""
    if report.restored:
        return report
    try:
        states = look(session, "look at units", gpus=False).units
    except GpuReclaimError as error:
        log.warning("%s: what became of its units is not known: %s", session.host, error.message)
        return report
    active = [state.name for state in states if state.active and state.name in held]
    summary = (
        "put back already, by the host itself or by an attempt whose answer was lost; active "
        f"again: {', '.join(active) or 'no unit of the host'}"
    )
    rows = [RestoredUnit(unit=name, outcome="running") for name in active]
    return report.model_copy(update={"summary": summary, "restored": rows, "ours": True})
