"""The record of a reclaim and its report, and the whole reclaim without Prefect.

For an emergency, when no Prefect server can be reached:

```python
from gpu_reclaim.models import ReclaimPolicy
from gpu_reclaim.reclaim import reclaim
from gpu_reclaim.session import Session, look
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from gpu_reclaim import settling, steps, stopping, verdict
from gpu_reclaim.errors import BadInput, GpuReclaimError, GpusNotReclaimed
from gpu_reclaim.models import (
    GOOD_VERDICTS,
    Ended,
    Outcome,
    Process,
    ReclaimPolicy,
    ReclaimReport,
    Settled,
    Spared,
    Step,
    StoppedUnit,
    Survey,
    Verdict,
)
from gpu_reclaim.owners import in_unit, owner
from gpu_reclaim.session import Session, look
from gpu_reclaim.verdict import Evidence, Finding
from gpu_reclaim.victims import Choice, choose

log = logging.getLogger(__name__)


@dataclass
class Record:
    """What happened so far, whatever happens next; the report is made from it."""

    session: Session
    policy: ReclaimPolicy
    before: Survey | None = None
    acting: bool = False
    settled: Settled | None = None
    after: Survey | None = None
    outcomes: list[Outcome] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Start the clock."""
        self._started = self.session.clock()

    def surveyed(self, survey: Survey) -> None:
        """Keep the first look."""
        self.before = survey
        self.steps.append(survey.step)

    def did(self, outcome: Outcome | Settled) -> None:
        """Keep what a step did."""
        if isinstance(outcome, Outcome):
            self.outcomes.append(outcome)
        else:
            self.settled = outcome
        self.steps.append(outcome.step)

    def verified(self, survey: Survey) -> None:
        """Keep the last look."""
        self.after = survey
        self.steps.append(survey.step)

    @property
    def stopped(self) -> list[StoppedUnit]:
        """Units stopped by any step, also by one whose answer was lost."""
        rows = [row for outcome in self.outcomes for row in outcome.stopped]
        known = {row.unit for row in rows}
        late = self.after.units if self.after else []
        down = {state.name for state in late if not state.active}
        for state in self.before.units if self.before and self.acting else []:
            if state.active and state.name in down and state.name not in known:
                rows.append(StoppedUnit(unit=state.name, triggered_by=state.triggered_by))
        return rows

    def blind(self, survey: Survey) -> bool:
        """Other users' holders cannot be seen; on a test machine all processes are one user's."""
        return not survey.table.root and not self.session.devices.path_prefixes

    def failed(self, finding: Finding) -> ReclaimReport:
        """The report of a run that an error ended: what was done is looked up, if it can be."""
        if not self.acting:
            return self.report(finding)
        try:
            self.after = self.after or look(self.session, "look after the error")
            unknown = ""
        except GpuReclaimError:
            unknown = "; what became of its units and processes is not known"
        if not unknown and not self.stopped and not self.ended:
            return self.report(finding)
        before = finding.summary.replace("; nothing was touched", "")
        done = f"{before}; earlier steps did what is listed{unknown}"
        return self.report(replace(finding, summary=done))

    @property
    def ended(self) -> list[Ended]:
        """Every process signalled, and whoever else was there before and is gone."""
        signalled = [row for outcome in self.outcomes for row in outcome.ended]
        rows = {(row.pid, row.start_time): row for row in signalled}
        if self.before is None or self.after is None:
            return signalled
        still = {(process.pid, process.start_time) for process in self.after.table.processes}
        victims = {process.pid for process in self.choice(self.before).victims if process.devices}
        for process in self.before.table.processes:
            key = (process.pid, process.start_time)
            if key not in rows and key not in still:
                row = self._went(process, process.pid in victims)
                rows |= {key: row} if row else {}
        return list(rows.values())

    def _went(self, process: Process, victim: bool) -> Ended | None:
        """The row of a process that is gone though no answer of ours tells of a signal to it."""
        via = self.outcomes[0].step.via if self.outcomes else ""
        if any(in_unit(process.cgroups, row.unit) for row in self.stopped):
            return ended_row(process, "systemctl stop", via)
        if not victim:
            return None
        if any(step.attempts > 1 for step in self.steps):
            # A broken connection took the answer with it.
            return ended_row(process, "TERM or KILL", via)
        return ended_row(process, "", "", "gone")

    @property
    def spared(self) -> list[Spared]:
        """Everybody left alone, each once, latest reason first."""
        early = self.choice(self.before).spared if self.before else []
        late = self.choice(self.after).spared if self.after else []
        between = [row for outcome in self.outcomes for row in outcome.spared]
        # Rows that count what was not inspected have no pid; the last count stands for all.
        rows = [*early, *between, *late]
        return list({(row.pid, row.name if row.pid else row.reason): row for row in rows}.values())

    def choice(self, survey: Survey, units: Sequence[str] | None = None) -> Choice:
        """Who would be ended now, and who spared; `units` are those being stopped."""
        whole = () if self.policy.gpus else self.session.units
        return choose(
            survey.table,
            survey.reading,
            self.policy,
            units=whole if units is None else units,
            protect=self.session.protect,
        )

    def report(self, finding: Finding) -> ReclaimReport:
        """The report, with a verdict."""
        return ReclaimReport(
            host=self.session.host,
            verdict=finding.verdict,
            summary=finding.summary,
            remedy=finding.remedy,
            gpus_before=self.before.reading.gpus if self.before else [],
            gpus_after=self.after.reading.gpus if self.after else [],
            stopped=self.stopped,
            ended=self.ended,
            spared=self.spared,
            steps=self.steps,
            seconds=round(self.session.clock() - self._started, 3),
        )


def ended_row(process: Process, signal: str, via: str, outcome: str = "ended") -> Ended:
    """The report's line about a process that no signal of ours reached."""
    return Ended(
        pid=process.pid,
        start_time=process.start_time,
        name=process.name,
        owner=str(owner(process.cgroups)),
        signal=signal,
        via=via,
        outcome=outcome,
        devices=process.devices,
    )


def refuse_unprovable(record: Record) -> None:
    """Refuse before anything is touched when the GPUs cannot be read: nothing could be proven.

    Raises:
        GpusNotReclaimed: With the verdict that the end would have had.
    """
    before = record.before
    if before is None:
        raise BadInput("nothing was surveyed yet", remedy="survey first")
    expected = record.session.expected_gpus
    evidence = Evidence(
        record.policy,
        before.reading,
        before.reading,
        expected_gpus=expected,
        blind=record.blind(before),
    )
    finding = verdict.unprovable(evidence)
    if finding is not None:
        summary = f"{finding.summary}; nothing was touched"
        raise GpusNotReclaimed(record.report(replace(finding, summary=summary)))
    record.acting = record.policy.mode == "reclaim"


def plan(record: Record) -> ReclaimReport:
    """The report of a plan: who would be ended (outcome `planned`), which units stopped."""
    before = record.before
    if before is None:
        raise BadInput("nothing was surveyed yet", remedy="survey first")
    units = stopping.units_to_stop(record.session, record.policy, before)
    victims = record.choice(before, [state.name for state in units]).victims
    active = [state for state in units if state.active]
    names = [state.name for state in active]
    summary = _plan_summary(victims, names)
    if not victims and not names and Evidence(record.policy, before.reading, before.reading).in_use:
        summary += "; memory is in use and nobody is seen to hold it, so it would not become free"
    report = record.report(Finding(Verdict.PLANNED, summary))
    report.stopped = [StoppedUnit(unit=x.name, triggered_by=x.triggered_by) for x in active]
    report.ended = [ended_row(x, "", before.step.via, "planned") for x in victims]
    return report


def _plan_summary(victims: list[Process], units: list[str]) -> str:
    stop = f"stop {', '.join(units)}" if units else "stop no unit"
    return f"nothing was touched; a reclaim would {stop} and end {len(victims)} processes"


def conclude(record: Record) -> ReclaimReport:
    """The report of a finished run.

    Raises:
        BadInput: There was no final look.
    """
    if record.before is None or record.after is None:
        raise BadInput("there was no final look", remedy="verify first")
    after = record.after
    choice = record.choice(after)
    evidence = Evidence(
        policy=record.policy,
        before=record.before.reading,
        after=after.reading,
        settled=record.settled,
        expected_gpus=record.session.expected_gpus,
        holders=[process for process in choice.victims if process.devices],
        spared=choice.spared,
        ended=record.ended,
        restarting=after.restarting,
        blind=record.blind(after),
        unlisted=[] if not record.policy.gpus else unlisted(record, after),
        uninspected=len(after.table.uninspected),
        other_guests=after.other_guests,
    )
    return record.report(verdict.decide(evidence))


def unlisted(record: Record, survey: Survey) -> list[str]:
    """Unprotected holders that are not known to use a wanted GPU."""
    everything = record.policy.model_copy(update={"gpus": []})
    choice = choose(survey.table, survey.reading, everything, protect=record.session.protect)
    listed = {app.pid for app in survey.reading.apps}
    return [steps.describe(x) for x in choice.victims if x.devices and x.pid not in listed]


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
        with verdicts(record):
            record.surveyed(steps.survey(session, policy))
            refuse_unprovable(record)
            if policy.mode == "plan":
                return accept(plan(record))
            units = record.before.units if record.before else []
            record.did(stopping.stop_systemd(session, policy, units))
            record.did(steps.proxmox_exec_kill(session, policy))
            record.did(steps.fuser_release(session, policy))
            record.did(settling.settle(session, policy))
            record.verified(settling.verify(session, policy))
            return accept(conclude(record))
    finally:
        session.links.close()
