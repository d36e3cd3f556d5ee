"""The state of a tuning: which arms are still in the race, which one leads, what stands in its way.

An arm wins when it is clearly faster (`comparing.needed_z`), by the plan's least gain, and within
all limits; between two such arms the earlier one stays unless the later is clearly faster than it
by the same measure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from gpu_reclaim.comparing import (
    Comparison,
    Reading,
    Spread,
    compare,
    loss_bounds,
    needed_z,
    percent,
)
from gpu_reclaim.plans import TrialPlan

RISK = 0.01
"""Chance to replace the present setting though all are equal, over all arms and all looks."""

DOUBT_Z = 2.0
"""A limit counts as kept, or as broken, when it is two standard deviations off: 1 in 44."""

HOPE_Z = 1.7
"""How much better than measured an arm may be hoped to be, in standard deviations: 1 in 22. With 2,
equal arms stay a round or two longer, and no more good ones were found."""

Reason = Literal["failed", "rejected", "worse", "equal", "beaten"]


@dataclass(frozen=True)
class Out:
    """Why an arm left the race, and in which round; `beaten` is by another arm, itself in order."""

    reason: Reason
    why: str
    round: int


@dataclass
class Race:
    """How far a tuning has come.

    Attributes:
        arms: Names, the present setting first, then simpler before more complicated.
        rounds: Complete ones.
        readings: Of each arm, of rounds 1, 2, ... without a gap.
        compared: Arms whose outputs were compared at least once.
        spread: Of a visit's score.
        out: Arms that left.
        own_pct: So many of the present setting's outputs differed from its first ones, in percent,
            at most.
        pending: What is still to be measured in the round that is under way, in order.
        broken: Why nothing can be compared; empty while it can.
    """

    arms: tuple[str, ...]
    plan: TrialPlan
    rounds: int = 0
    readings: dict[str, list[Reading]] = field(default_factory=dict)
    compared: set[str] = field(default_factory=set)
    spread: Spread = field(default_factory=Spread)
    out: dict[str, Out] = field(default_factory=dict)
    own_pct: float = 0
    pending: list[tuple[str, int]] = field(default_factory=list)
    broken: str = ""

    @property
    def present(self) -> str:
        """The setting in force before."""
        return self.arms[0]

    @property
    def running(self) -> list[str]:
        """The arms still in the race, the present one included."""
        return [arm for arm in self.arms if arm not in self.out]

    @property
    def undecided(self) -> list[str]:
        """The arms whose further visits could still change the decision."""
        leader = self.leader()
        return [arm for arm in self.running if arm not in (self.present, leader)]

    def against(self, arm: str, other: str) -> Comparison:
        """How the arm compares with another one."""
        ones, others = self.readings.get(arm, []), self.readings.get(other, [])
        return compare([one.score for one in ones], [one.score for one in others], self.spread)

    def beats(self, arm: str, other: str) -> bool:
        """Clearly faster, by the least gain at least; limits are `obstacle`'s."""
        found = self.against(arm, other)
        enough = found.gain >= math.log1p(self.plan.min_gain_pct / 100)
        return enough and bool(found.rounds) and found.z >= self._needed(found.rounds)

    def _needed(self, rounds: int) -> float:
        return needed_z(rounds, self.plan.rounds, RISK / max(1, len(self.arms) - 1))

    def hopeless(self, arm: str, other: str) -> bool:
        """Even at the best that can be hoped, it would not beat the other in the last round."""
        found = self.against(arm, other)
        last = found.error * math.sqrt(found.rounds / self.plan.rounds)
        reach = self._needed(self.plan.rounds) * last
        return found.upper(HOPE_Z) < max(math.log1p(self.plan.min_gain_pct / 100), reach)

    def leader(self) -> str:
        """The setting to use by what is known."""
        best = self.present
        for arm in self.arms[1:]:
            left = self.out.get(arm)
            if left and left.reason != "beaten":
                continue
            ahead = self.beats(arm, self.present) and (
                best == self.present or self.beats(arm, best)
            )
            if ahead and not self.obstacle(arm):
                best = arm
        return best

    def level_gains(self, arm: str) -> list[list[float]]:
        """For each concurrency, its changes against the present setting, round by round."""
        pairs = list(
            zip(self.readings.get(arm, []), self.readings.get(self.present, []), strict=False)
        )
        return [
            [one.levels[i] - other.levels[i] for one, other in pairs]
            for i in range(len(self.plan.levels))
        ]

    def obstacle(self, arm: str) -> str:
        """Why a fast arm may not be used, as far as is known; empty when it may.

        A loss must be ruled out, not just unproven: of arms that truly lose more than the limit at
        a concurrency, 1 in 44 or fewer get through a look.
        """
        if arm not in self.compared:
            return "its outputs were not compared with the present setting's"
        limit = self._loss_limit()
        for level, gains in zip(self.plan.levels, self.level_gains(arm), strict=True):
            low = loss_bounds(gains, self.spread, DOUBT_Z)[0]
            if min(low, median(gains)) < limit:
                return (
                    f"a loss of more than {self.plan.max_loss_pct:g} % at concurrency {level} "
                    f"cannot be ruled out (measured {percent(median(gains)):+.1f} %)"
                )
        return self.too_slow(arm)

    def _loss_limit(self) -> float:
        kept = 1 - self.plan.max_loss_pct / 100
        return math.log(kept) if kept > 0 else -math.inf

    def loss(self, arm: str) -> str:
        """A concurrency that surely loses too much; empty when there is none."""
        for level, gains in zip(self.plan.levels, self.level_gains(arm), strict=True):
            if loss_bounds(gains, self.spread, DOUBT_Z)[1] < self._loss_limit():
                change = percent(median(gains))
                limit = f"more than {self.plan.max_loss_pct:g} % less is not allowed"
                return f"concurrency {level} loses: {change:+.1f} %; {limit}"
        return ""

    def too_slow(self, arm: str) -> str:
        """A limit on latency that the median of its visits breaks; empty when none is."""
        plan = self.plan
        for i, level in enumerate(plan.levels):
            rows = [one.measured[i] for one in self.readings.get(arm, [])]
            for name, limit, values in (
                ("TTFT", plan.max_ttft_ms, [row.ttft_p99_ms for row in rows]),
                ("TPOT", plan.max_tpot_ms, [row.tpot_p99_ms for row in rows]),
            ):
                if limit and values and median(values) > limit:
                    return (
                        f"p99 {name} at concurrency {level} is {median(values):.0f} ms, "
                        f"over the limit of {limit:g} ms"
                    )
        return ""
