"""The record of a reclaim: what happened so far, and the report made from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from gpu_reclaim.again import stopped_along
from gpu_reclaim.causes import Finding
from gpu_reclaim.errors import GpuReclaimError
from gpu_reclaim.models import (
    Ended,
    Outcome,
    Process,
    ReclaimPolicy,
    ReclaimReport,
    RestoredUnit,
    RestoreReport,
    Settled,
    Spared,
    Step,
    StoppedUnit,
    Survey,
    Taken,
    UnitState,
)
from gpu_reclaim.owners import in_unit, owner
from gpu_reclaim.session import Session, look
from gpu_reclaim.systemd import dependents
from gpu_reclaim.victims import Choice, choose


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
    leftovers: list[RestoredUnit] = field(default_factory=list)
    held_until: str = ""
    back: RestoreReport | None = None

    def __post_init__(self) -> None:
        """Start the clock, and see whether a run around this one has the host."""
        self.inside = self.session.locked
        self._started = self.session.clock()

    def surveyed(self, survey: Survey) -> None:
        """Keep the first look."""
        self.before = survey
        self._noted(survey.step)

    def took(self, taken: Taken) -> bool:
        """Keep what an earlier run had left; from now on the host is ours, and is acted on.

        Returns:
            The host has changed since the survey.
        """
        self.leftovers = taken.leftovers
        self.acting = True
        return taken.waited or bool(taken.leftovers)

    def did(self, outcome: Outcome | Settled) -> None:
        """Keep what a step did."""
        if isinstance(outcome, Outcome):
            self.outcomes.append(outcome)
        else:
            self.settled = outcome
        self._noted(outcome.step)

    def verified(self, survey: Survey) -> None:
        """Keep the last look."""
        self.after = survey
        self._noted(survey.step)

    def _noted(self, step: Step) -> None:
        began = datetime.now() - timedelta(seconds=step.seconds)
        step.at = f"{began:%H:%M:%S}"
        self.steps.append(step)

    @property
    def stopped(self) -> list[StoppedUnit]:
        """Units stopped by any step, also by one whose answer was lost."""
        rows = [row for outcome in self.outcomes for row in outcome.stopped]
        known = {row.unit for row in rows}
        late = self.after.units if self.after else []
        now = {state.name: state for state in late}
        for state in self.before.units if self.before and self.acting else []:
            if state.name in now and state.name not in known:
                row = _lost(state, now[state.name])
                rows += [row] if row.active or row.triggered_by else []
        return rows + self._stopped_along({row.unit for row in rows})

    def _stopped_along(self, stopped: set[str]) -> list[StoppedUnit]:
        """Dependents that ran before and do no more, though no answer of ours tells of it."""
        if self.before is None or self.after is None:
            return []
        running = {state.name for state in self.after.dependents if state.active}
        because = dependents([*self.before.units, *self.before.dependents], sorted(stopped))
        return [
            stopped_along(state, because[state.name])
            for state in self.before.dependents
            if state.active and state.name in because and state.name not in stopped | running
        ]

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
        gone = {row.pid for row in self.ended if row.outcome == "ended"}
        rows = [row for row in [*early, *between, *late] if row.pid not in gone]
        return list({(row.pid, row.name if row.pid else row.reason): row for row in rows}.values())

    def choice(self, survey: Survey, units: Sequence[str] | None = None) -> Choice:
        """Who would be ended now, and who spared; `units` are those being stopped."""
        whole = () if self.policy.gpus else self.session.units
        choice = choose(
            survey.table,
            survey.reading,
            self.policy,
            units=whole if units is None else units,
            protect=self.session.protect,
        )
        for row in choice.spared:
            if row.pid in self.session.mps_left:
                row.reason = f"{row.reason}; {self.session.mps_left[row.pid]}"
        return choice

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
            held_until=self.held_until,
            leftovers=self.leftovers,
            restored=self.back.restored if self.back else [],
            restore=self.back.summary if self.back else "",
        )


def _lost(before: UnitState, now: UnitState) -> StoppedUnit:
    """What ran of a unit and its triggers, and does no more."""
    return StoppedUnit(
        unit=before.name,
        active=before.active and not now.active,
        triggered_by=[unit for unit in before.triggered_by if unit not in now.triggered_by],
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
