"""A tuning on its way: what was measured so far, what comes next, and the report of it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from statistics import fmean

from gpu_reclaim.deciding import next_visit
from gpu_reclaim.errors import GpuReclaimError
from gpu_reclaim.models import ReclaimPolicy
from gpu_reclaim.plans import TrialPlan
from gpu_reclaim.preflight import Preflight, ladder_s
from gpu_reclaim.standings import decision, results
from gpu_reclaim.tuning import TuningOutcome, TuningReport, Visit

RECLAIM_S = 30
"""A reclaim between two trials is guessed to take so long, in seconds: a server that drains, and
memory that settles."""

GO_ON = "run it again: what was measured is on record, and it goes on from there"

SEE_WHY = (
    "see its failures below and the folder with the records; then run it again, with fresh = true "
    "where a failure on record would be taken for the last word"
)


@dataclass
class Tuning:
    """A tuning on its way.

    Attributes:
        server: Name of the LlmServer block.
        host: Name of the GpuHost block.
        plan: What is tried, and how it is decided.
        policy: For the reclaims.
        before: From `preflight`.
        visits: All so far, an earlier run's first.
        answers: The present setting's greedy answers; none yet: empty.
        resumed: So many visits are an earlier run's.
        applied: The winner's drop-in is in place.
        began: When, in seconds, by a clock that never goes back.
        reserve_s: So long before its time is over the last visit must end, in seconds.
    """

    server: str
    host: str
    plan: TrialPlan
    policy: ReclaimPolicy
    before: Preflight
    visits: list[Visit] = field(default_factory=list)
    answers: list[list[str]] = field(default_factory=list)
    resumed: int = 0
    applied: bool = False
    began: float = field(default_factory=time.monotonic)
    reserve_s: float = 0

    @property
    def arms(self) -> list[str]:
        """Names of the settings, the present one first."""
        return list(self.before.arms)

    @property
    def turn(self) -> tuple[str, int] | None:
        """What to measure next; None when it is decided, or its time is over."""
        most = self.plan.limit_minutes or math.inf
        in_time = self._minutes + (self.visit_s + self.reserve_s) / 60 <= most
        return next_visit(self.arms, self.visits, self.plan) if in_time else None

    @property
    def winner(self) -> str:
        """The setting to use: the present one until it is decided."""
        found = decision(self.arms, self.visits, self.plan)
        return found.arm if found.final else self.before.current

    @property
    def to_apply(self) -> bool:
        """There is a winner, and the plan wants it to be kept."""
        return self.winner != self.before.current and self.plan.apply == "if_better"

    @property
    def unfinished(self) -> bool:
        """Something is left to measure or to apply."""
        return self.turn is not None or self.to_apply

    @property
    def in_force(self) -> str:
        """The setting that should be in force after the tuning."""
        return self.winner if self.applied else self.before.current

    @property
    def _minutes(self) -> float:
        return (time.monotonic() - self.began) / 60

    @property
    def most_visits(self) -> int:
        """Visits, where no setting leaves early."""
        return len(self.arms) * self.plan.rounds

    @property
    def most_minutes(self) -> float:
        """How long all of those take, in minutes."""
        return self.most_visits * self.visit_s / 60

    @property
    def visit_s(self) -> float:
        """Seconds of a visit: as measured, else guessed."""
        took = [x.ready_s + sum(row.seconds for row in x.levels) for x in self.visits if x.levels]
        guess = self.before.found.start_s + ladder_s(self.plan)
        return RECLAIM_S + (fmean(took) if took else guess)

    def resume(self, visits: list[Visit], answers: list[list[str]]) -> None:
        """Go on from what an earlier run has put on record, unless that came to nothing."""
        if decision(self.arms, visits, self.plan).broken:
            visits, answers = [], []
        self.visits, self.answers, self.resumed = visits, answers, len(visits)

    def progress(self, turn: tuple[str, int]) -> tuple[int, int, str, float]:
        """Visits done and at most, what comes now, and the most minutes that are left."""
        done, most = len(self.visits), self.most_visits
        words = f"round {turn[1]} of {self.plan.rounds}, {turn[0]}"
        return done, most, words, max(0, most - done) * self.visit_s / 60

    def planned(self) -> TuningReport:
        """The report where nothing was touched."""
        return self._report(
            "planned",
            f"{len(self.arms)} settings would be tried, in {self.most_minutes:.0f} min at most",
        )

    def report(self, *, not_kept: str, proof: str) -> TuningReport:
        """The report of a tuning that ran to its end.

        Args:
            not_kept: Why it is not, although it should be.
            proof: What shows which setting is in force.
        """
        found = decision(self.arms, self.visits, self.plan)
        said = found.summary
        if not found.final:
            said = f"Its time was over before it was decided. So far: {said}"
            return self._report("unfinished", said, proof=proof, remedy=GO_ON)
        if found.broken:
            return self._report("unfinished", said, proof=proof, remedy=SEE_WHY)
        if self.winner == self.before.current:
            return self._report("kept", said, proof=proof)
        if self.applied:
            return self._report("replaced", said, proof=proof, drop_in=self._place)
        remedy = f"run it again with apply = if_better to use {self.winner}"
        if not_kept:
            said = f"{said} It was not kept, for at its last start: {not_kept}"
            remedy = "see why it starts at one time and not at another, before it is used"
        return self._report("found", said, proof=proof, remedy=remedy)

    def broken(self, error: BaseException) -> TuningReport:
        """The report of one that an error ended: what was measured until then."""
        said, remedy = f"It was ended by an error: {error_words(error)}", GO_ON
        if not self.applied:
            return self._report("unfinished", said, remedy=remedy)
        unit, place = self.before.server.unit, self._place
        remedy = (
            f"{self.winner} is the setting of {unit} now. See why it does not serve with it; or "
        )
        remedy += f"undo it: rm {place}; systemctl daemon-reload; systemctl restart {unit}"
        return self._report("unfinished", said, remedy=remedy, drop_in=place)

    @property
    def _place(self) -> str:
        return self.before.tuned_file(lasting=self.plan.persist)

    def _report(self, outcome: TuningOutcome, summary: str, **more: str) -> TuningReport:
        return TuningReport.model_validate(
            {
                "server": self.server,
                "outcome": outcome,
                "summary": summary,
                "current": self.before.current,
                "winner": self.winner,
                "minutes": self._minutes,
                "estimated_minutes": self.most_minutes,
                "resumed": self.resumed,
                "arms": results(self.arms, self.visits, self.plan) if self.visits else [],
                "visits": self.visits,
                "refused": dict(self.before.refused),
                "raw": self.before.place,
                **more,
            }
        )


def error_words(error: BaseException) -> str:
    """An error for people; only of our own ones it is known that they tell no secret."""
    ours = f": {error.message}" if isinstance(error, GpuReclaimError) else ""
    return f"{type(error).__name__}{ours}"
