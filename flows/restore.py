"""Put back what was stopped on one host, and end its hold."""

from __future__ import annotations

import logging

from prefect import flow

from gpu_reclaim.errors import NotRestored
from gpu_reclaim.models import RestoreReport
from gpu_reclaim.tasks import restore
from gpu_reclaim.tasks.artifacts import show_restore
from gpu_reclaim.tasks.host import DEFAULT_HOST, open_host

log = logging.getLogger(__name__)


@flow(name="restore-services", flow_run_name="restore-{host}", persist_result=False)
def restore_services(host: str = DEFAULT_HOST) -> RestoreReport:
    """Put back what a reclaim stopped under a hold, whoever holds the host; end the hold.

    It goes by the record on the host alone, so a person, an automation or a hook may call it, at
    any time and more than once.

    Args:
        host: Name of the GpuHost block document; by default that of GPU_RECLAIM_HOST.

    Returns:
        What was put back; nothing, where nothing was stopped.

    Raises:
        NotRestored: A unit did not start; it carries the report, and the record stays.
        TransportError: The host could not be reached.
    """
    with open_host(host):
        report = restore(host)
    show_restore(report)
    if not report.complete:
        log.error("%s: %s", host, report.summary)
        raise NotRestored(report)
    return report
