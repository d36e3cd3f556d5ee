"""Free the GPUs of one host, and prove it."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from prefect import flow

from gpu_reclaim import causes
from gpu_reclaim.causes import Finding
from gpu_reclaim.errors import BadInput, GpusNotReclaimed
from gpu_reclaim.guarded import put_back_unless_good
from gpu_reclaim.models import ReclaimPolicy, ReclaimReport
from gpu_reclaim.reclaim import (
    accept,
    conclude,
    plan,
    refuse_hopeless,
    verdicts,
)
from gpu_reclaim.record import Record
from gpu_reclaim.steps import check_policy
from gpu_reclaim.tasks import (
    fuser_release,
    prove_hold,
    proxmox_exec_kill,
    settle,
    stop_systemd,
    survey,
    take_hold,
    verify_nvidia_smi,
)
from gpu_reclaim.tasks.artifacts import show_report
from gpu_reclaim.tasks.host import DEFAULT_HOST, DEFAULT_POLICY, open_host, with_defaults
from gpu_reclaim.tasks.restoring import put_back_after
from gpu_reclaim.tasks.slots import host_slot

CUT_SHORT = causes.CUT_SHORT.finding("the run was cut short; what is listed was done before")

log = logging.getLogger(__name__)


@flow(
    name="reclaim-gpus",
    flow_run_name="reclaim-{host}",
    persist_result=False,
    on_cancellation=[put_back_after()],
    on_crashed=[put_back_after()],
)
def reclaim_gpus(host: str = DEFAULT_HOST, policy: ReclaimPolicy = DEFAULT_POLICY) -> ReclaimReport:
    """Free the GPUs of a host: stop its units, end who is left, wait, and prove it.

    One run at a time works on a host: the next one waits for the policy's `wait_minutes`, then
    fails and says who has it. With the policy's `hold_minutes`, what was stopped cannot be started
    for that long; then the host puts it back by itself, and `restore_services` does so at any time.
    Whatever else ends the run, a bad verdict, an error or a cancel, puts it back at once.

    Args:
        host: Name of the GpuHost block document; by default that of GPU_RECLAIM_HOST.
        policy: What may be done, and how long it may take; what it leaves unset is as the
            settings have it (GPU_RECLAIM_POLICY__...).

    Returns:
        The report, with verdict clean, residue or planned.

    Raises:
        BadInput: What was asked makes no sense; nothing was touched.
        GpusNotReclaimed: For every other verdict; it carries the report.
    """
    policy = with_defaults(policy)
    check_policy(policy)
    with open_host(host, policy.via) as session:
        record = Record(session, policy)
        try:
            # Who has the host is a verdict too, and what was stopped is back before the next run.
            with (
                verdicts(record),
                _alone(session.host, policy),
                put_back_unless_good(record),
                verdicts(record),
            ):
                report = accept(_reclaim(host, policy, record))
        except GpusNotReclaimed as refused:
            show_report(refused.report)
            log.error("%s", refused)
            raise
        except BadInput:
            raise
        except BaseException:
            # Cancelled, or a fault of ours: what was done so far is told all the same.
            show_report(record.report(_cut_short(record)))
            raise
        show_report(report)
        return report


def _alone(host: str, policy: ReclaimPolicy) -> AbstractContextManager[None]:
    """A plan touches nothing, and keeps nobody waiting."""
    return nullcontext() if policy.mode == "plan" else host_slot(host, policy.wait_minutes)


def _cut_short(record: Record) -> Finding:
    if record.back is None or not record.back.complete:
        return CUT_SHORT
    return replace(CUT_SHORT, remedy="what was stopped is back; look at the host, and run it again")


def _reclaim(host: str, policy: ReclaimPolicy, record: Record) -> ReclaimReport:
    before = survey(host, policy)
    record.surveyed(before)
    refuse_hopeless(record)
    if policy.mode == "plan":
        return plan(record)
    if record.inside:
        record.acting = True
    elif record.took(take_hold(host, policy, before)):
        before = survey(host, policy)
        record.surveyed(before)
        refuse_hopeless(record)
    record.did(stop_systemd(host, policy, before.units))
    record.did(proxmox_exec_kill(host, policy))
    record.did(fuser_release(host, policy))
    record.did(settle(host, policy))
    record.verified(verify_nvidia_smi(host, policy))
    if policy.hold_minutes and not record.inside and accept(conclude(record)):
        record.held_until = prove_hold(host, policy)
    return conclude(record)
