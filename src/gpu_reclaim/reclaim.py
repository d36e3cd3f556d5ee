"""From the record to the verdict, and the whole reclaim without Prefect.

For an emergency, when no Prefect server can be reached:

```python
from gpu_reclaim.models import ReclaimPolicy
from gpu_reclaim.reclaim import reclaim
from gpu_reclaim.session import Session
from gpu_reclaim.transport.links import Links
from gpu_reclaim.transport.local import LocalTransport

session = Session("this machine", Links(direct=LocalTransport()), units=["sglang.service"])
print(reclaim(session, ReclaimPolicy(mode="plan")))  # then without the mode
```

Over SSH, in the place of `LocalTransport()`:

```python
from gpu_reclaim.transport.ssh import SshOptions, SshTransport

SshTransport(SshOptions("10.0.0.9", private_key_path="~/.ssh/id_ed25519"))
```
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace

from gpu_reclaim import (
    causes,
    claiming,
    hold,
    releasing,
    settling,
    steps,
    stopping,
    verdict,
    verifying,
)
from gpu_reclaim.again import stopped_along
from gpu_reclaim.errors import BadInput, GpuReclaimError, GpusNotReclaimed
from gpu_reclaim.evidence import Evidence
from gpu_reclaim.guarded import put_back_unless_good
from gpu_reclaim.models import (
    GOOD_VERDICTS,
    Process,
    ReclaimPolicy,
    ReclaimReport,
    StoppedUnit,
    Survey,
)
from gpu_reclaim.record import Record, ended_row
from gpu_reclaim.session import Session
from gpu_reclaim.systemd import dependents
from gpu_reclaim.victims import MANAGED, Choice, choose, is_gpu_node, trusted

log = logging.getLogger(__name__)


def refuse_hopeless(record: Record) -> None:
    """Refuse before anything is touched when the GPUs could not be freed, or not be proven free.

    Raises:
        GpusNotReclaimed: With the verdict that the end would have had.
    """
    before, plans = _surveyed(record), record.policy.mode == "plan"
    if before.lease and not record.session.locked and not plans:
        # Another run is at work; how the host looks once that is over, nobody knows yet.
        return
    finding = verdict.hopeless(_evidence(record, before, _stays(record, before)))
    if finding is not None:
        summary = f"{finding.summary}; nothing was touched"
        raise GpusNotReclaimed(record.report(replace(finding, summary=summary)))


def _surveyed(record: Record) -> Survey:
    if record.before is None:
        raise BadInput("nothing was surveyed yet", remedy="survey first")
    return record.before


def _stays(record: Record, before: Survey) -> Choice:
    """Whom a reclaim would leave: what goes with a unit that is stopped is not among them."""
    going = steps.units_to_stop(record.session, record.policy, before)
    choice = record.choice(before, [state.name for state in going])
    stopped = {f"unit {state.name}" for state in going if state.active}
    # A unit may have started its work in a container, which then stops with it.
    managed = tuple(f"{kind} " for kind in MANAGED) if stopped else ()
    choice.spared[:] = [
        row
        for row in choice.spared
        if row.owner not in stopped and not row.owner.startswith(managed)
    ]
    return choice


def plan(record: Record) -> ReclaimReport:
    """The report of a plan: who would be ended (outcome `planned`), which units stopped."""
    before = _surveyed(record)
    units = steps.units_to_stop(record.session, record.policy, before)
    victims = record.choice(before, [state.name for state in units]).victims
    going = [state for state in units if state.active or state.triggered_by]
    names = [state.name for state in going]
    summary = _plan_summary(victims, names, record.policy.hold_minutes)
    if not victims and not names and record.policy.in_use(before.reading.gpus):
        summary += "; memory is in use and nobody is seen to hold it, so it would not become free"
    if before.lease:
        summary += f"; it would have to wait, for the host is held by {before.lease}"
    report = record.report(causes.PLANNED.finding(summary))
    along = dependents([*before.units, *before.dependents], names)
    report.stopped = [
        StoppedUnit(unit=x.name, active=x.active, triggered_by=x.triggered_by) for x in going
    ]
    report.stopped += [
        stopped_along(x, along[x.name]) for x in before.dependents if x.active and x.name in along
    ]
    report.ended = [ended_row(x, "", before.step.via, "planned") for x in victims]
    return report


def _plan_summary(victims: list[Process], units: list[str], minutes: float) -> str:
    held = f", and hold the host for {minutes:g} minutes" if minutes else ""
    stop = f"stop {', '.join(units)}" if units else "stop no unit"
    processes = "1 process" if len(victims) == 1 else f"{len(victims)} processes"
    return f"nothing was touched; a reclaim would {stop} and end {processes}{held}"


def conclude(record: Record) -> ReclaimReport:
    """The report of a finished run.

    Raises:
        BadInput: There was no final look.
    """
    if record.before is None or record.after is None:
        raise BadInput("there was no final look", remedy="verify first")
    choice = record.choice(record.after)
    return record.report(verdict.decide(_evidence(record, record.after, choice)))


def _evidence(record: Record, survey: Survey, choice: Choice) -> Evidence:
    """All that is known, with one look as the present state."""
    before = _surveyed(record)
    listed = {app.pid for app in survey.reading.apps}
    held = {(process.pid, process.start_time) for process in before.table.holders}
    spared = {row.pid for row in choice.spared}
    undead = [
        x
        for x in survey.undead
        if x.pid not in spared and (x.pid in listed or (x.pid, x.start_time) in held)
    ]
    left = record.session.left
    return Evidence(
        policy=record.policy,
        before=before.reading,
        after=survey.reading,
        settled=record.settled,
        expected_gpus=record.session.expected_gpus,
        holders=[process for process in choice.victims if process.devices],
        known={(x.pid, x.start_time) for x in before.table.processes},
        survivors=[x for x in survey.table.processes if (x.pid, x.start_time) in left],
        starters=survey.starters,
        spared=choice.spared,
        ended=record.ended,
        undead=undead,
        running_again=survey.running_again,
        restarting=survey.restarting,
        blind=record.blind(survey),
        unlisted=unlisted(record, survey, {x.pid for x in choice.victims}),
        trusted=trusted(survey.table, survey.reading),
        strangers=strangers(survey),
        uninspected=len(survey.table.uninspected),
        other_guests=survey.other_guests,
        inside=survey.inside,
        driver=survey.driver,
        mig=survey.mig,
    )


def strangers(survey: Survey) -> list[str]:
    """Pids that nvidia-smi lists and that hold nothing here, each with what is known of it."""
    here = {process.pid: process for process in survey.table.processes}
    found = {}
    for app in survey.reading.apps:
        process = here.get(app.pid)
        if process is None:
            found[app.pid] = f"pid {app.pid}, which is not here (dead, or of another PID namespace)"
        elif not process.devices and process.state not in ("Z", "D"):
            found[app.pid] = f"pid {app.pid}, which is {process.name} here and holds no GPU"
    return list(found.values())


def unlisted(record: Record, survey: Survey, victims: Collection[int] = ()) -> list[str]:
    """Unprotected holders, not to be ended, of which nothing tells which GPUs they use."""
    if not record.policy.gpus:
        return []
    everything = record.policy.model_copy(update={"gpus": []})
    choice = choose(survey.table, survey.reading, everything, protect=record.session.protect)
    known = {app.pid for app in survey.reading.apps}
    known = known.union(victims) if trusted(survey.table, survey.reading) else set(victims)
    return [
        steps.describe(x)
        for x in choice.victims
        if x.pid not in known and any(is_gpu_node(device) for device in x.devices)
    ]


def accept(report: ReclaimReport) -> ReclaimReport:
    """The report, if its verdict is a good one.

    Raises:
        GpusNotReclaimed: It is not.
    """
    if report.verdict not in GOOD_VERDICTS:
        raise GpusNotReclaimed(report)
    return report


@contextmanager
def verdicts(record: Record) -> Iterator[None]:
    """Turn an error of a step into `GpusNotReclaimed` with the report so far.

    Raises:
        BadInput: As it came: nothing was touched.
        GpusNotReclaimed: For every other error of this package.
    """
    try:
        yield
    except GpusNotReclaimed:
        raise
    except GpuReclaimError as error:
        if isinstance(error, BadInput) and not record.acting:
            raise
        log.debug("%s: the cause", record.session.host, exc_info=error)
        # The report says it all; a chain of tracebacks would only bury it.
        raise GpusNotReclaimed(record.failed(verdict.of_error(error))) from None


def reclaim(session: Session, policy: ReclaimPolicy) -> ReclaimReport:
    """Free the GPUs of a host, without Prefect; the connections are closed at the end.

    Raises:
        BadInput: What was asked makes no sense; nothing was touched.
        GpusNotReclaimed: The verdict is not clean, residue or planned; it carries the report.
    """
    steps.check_policy(policy)
    record = Record(session, policy)
    try:
        with put_back_unless_good(record), verdicts(record):
            record.surveyed(steps.survey(session, policy))
            refuse_hopeless(record)
            if policy.mode == "plan":
                return accept(plan(record))
            if record.took(claiming.take(session, policy, _surveyed(record))):
                record.surveyed(steps.survey(session, policy))
                refuse_hopeless(record)
            units = record.before.units if record.before else []
            record.did(stopping.stop_systemd(session, policy, units))
            record.did(releasing.proxmox_exec_kill(session, policy))
            record.did(releasing.fuser_release(session, policy))
            record.did(settling.settle(session, policy))
            record.verified(verifying.verify(session, policy))
            if policy.hold_minutes and accept(conclude(record)):
                record.held_until = hold.prove(session, policy.hold_minutes * 60)
            return accept(conclude(record))
    finally:
        session.links.close()
