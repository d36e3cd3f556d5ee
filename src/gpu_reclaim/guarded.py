"""However a run ends that holds a host: held on with a proof, or put back."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from gpu_reclaim import hold
from gpu_reclaim.errors import GpuReclaimError, GpusNotReclaimed
from gpu_reclaim.models import RestoreReport
from gpu_reclaim.record import Record

log = logging.getLogger(__name__)


@contextmanager
def put_back_unless_good(record: Record) -> Iterator[None]:
    """Whatever error ends the block, what was stopped under a hold is put back, and reported.

    That includes a bad verdict, as `GpusNotReclaimed`, and a cancelled run.
    """
    try:
        yield
    except BaseException as error:
        if record.session.held is not None:
            record.back = _put_back(record)
            if isinstance(error, GpusNotReclaimed):
                error.report.restored = record.back.restored
                error.report.restore = record.back.summary
        raise


def _put_back(record: Record) -> RestoreReport:
    """Put back; where that cannot be done now, say who will do it."""
    session = record.session
    log.warning("%s: putting back what was stopped", session.host)
    try:
        return hold.restore(session)
    except GpuReclaimError as error:
        log.error("%s: could not be put back now: %s", session.host, error)
        return RestoreReport(
            host=session.host,
            summary=f"could not be put back now ({error.message}); the host does so by itself "
            f"within {session.lease_s:.0f} s",
            remedy="restore again once the host can be reached",
            complete=False,
        )
