"""The arithmetic of a tuning: what a visit scores, and how sure a difference between two arms is.

Scores are natural logarithms of tokens per second, so a difference of scores is a ratio of speeds.
An arm is compared with another one in the same round only, which takes out slow drift. The spread
comes from all arms together, because a handful of visits of one arm says too little about it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist, fmean, median

from gpu_reclaim.plans import TrialPlan
from gpu_reclaim.tuning import Measurement, Visit

NOISE_FLOOR = 0.005
"""Least standard deviation of a visit's score: half a percent. A new start of the same server
moves by about so much (memory layout, clocks), whatever a few lucky visits say."""

SLOPE = 0.3
"""Rise of the boundary in `needed_z`. 0 is O'Brien and Fleming's, which stops late; larger ones
stop sooner for a large gain and need more rounds for a small one. With 1, 3 % of noise needed more
than 20 rounds (benchmarks/decisions.py)."""

UNSTEADY = 1.5
"""An arm is judged by its own variance when that is so much more than all arms' together. At 1,
every arm's chance excess would count and a better one be found less often."""

MAD_TO_SIGMA = 1.4826
"""Makes the median absolute deviation of normal noise its standard deviation."""


@dataclass(frozen=True)
class Reading:
    """A visit that can be counted: logarithms of its tokens per second.

    Attributes:
        score: Weighted mean over the concurrencies.
        levels: For each concurrency of the plan.
        measured: The measurements themselves, in the plan's order.
    """

    score: float
    levels: tuple[float, ...]
    measured: tuple[Measurement, ...]


def problem(visit: Visit, plan: TrialPlan) -> str:
    """Why a visit cannot be counted, for people; empty when it can."""
    if visit.failure:
        return visit.failure
    for level in plan.levels:
        found = [row for row in visit.levels if row.level == level]
        if len(found) != 1:
            return f"concurrency {level} was measured {len(found)} times"
        fault = _fault(found[0], plan)
        if fault:
            return f"concurrency {level}: {fault}"
    return ""


def _fault(row: Measurement, plan: TrialPlan) -> str:
    if row.requests < 1 or row.completed != row.requests:
        return f"{row.completed} of {row.requests} requests completed"
    if not (math.isfinite(row.output_tok_s) and row.output_tok_s > 0):
        return f"{row.output_tok_s} tokens per second"
    times = (row.ttft_ms, row.ttft_p99_ms, row.tpot_ms, row.tpot_p99_ms)
    if not all(math.isfinite(time) and time >= 0 for time in times):
        return "a latency is missing"
    limits = ((plan.max_ttft_ms, row.ttft_p99_ms), (plan.max_tpot_ms, row.tpot_p99_ms))
    # A time of exactly nothing was not measured; it must not pass a limit.
    if any(limit and not value for limit, value in limits):
        return "a latency with a limit is missing"
    return ""


def reading(visit: Visit, plan: TrialPlan) -> Reading:
    """What a visit without a `problem` says."""
    rows = {row.level: row for row in visit.levels}
    measured = tuple(rows[level] for level in plan.levels)
    logs = tuple(math.log(row.output_tok_s) for row in measured)
    weights = plan.weights or [1.0] * len(logs)
    # Scaled by the largest first: weights near the largest float must not add up to infinity.
    top = max(weights)
    parts = [weight / top for weight in weights]
    score = math.fsum(p * x for p, x in zip(parts, logs, strict=True)) / math.fsum(parts)
    return Reading(score, logs, measured)


@dataclass(frozen=True)
class Spread:
    """How much visits of the same setting differ, from all arms together.

    Attributes:
        squares: Sum of squares.
        freedom: Its degrees of freedom.
    """

    squares: float = 0
    freedom: int = 0

    def after(self, deviations: Sequence[float], rounds: int) -> Spread:
        """The spread with one more round.

        Args:
            deviations: Each arm's score in the new round less its mean in all earlier ones.
            rounds: Number of the new round, at least 2.

        With the round's own mean taken out, each has the variance s2 x rounds / (rounds - 1) and
        is independent of what the earlier rounds gave (Helmert contrasts), so dropping arms by
        their means does not bias the spread.
        """
        middle = fmean(deviations)
        squares = math.fsum((value - middle) ** 2 for value in deviations)
        share = (rounds - 1) / rounds
        return Spread(self.squares + share * squares, self.freedom + len(deviations) - 1)

    @property
    def variance(self) -> float:
        """Of one visit's score, never below the floor."""
        known = self.squares / self.freedom if self.freedom else 0.0
        return max(known, NOISE_FLOOR**2)


@dataclass(frozen=True)
class Comparison:
    """One arm against another one, over the rounds of both.

    Attributes:
        gain: Mean difference of the scores.
        error: Its standard error.
        freedom: Degrees of freedom of the error; 0: it says nothing.
        rounds: In so many rounds.
    """

    gain: float
    error: float
    freedom: int
    rounds: int

    @property
    def z(self) -> float:
        """How sure the gain is, as standard deviations of a normal variable."""
        return z_of_t(self.gain / self.error, self.freedom)

    def upper(self, z: float) -> float:
        """The gain is hardly above that: z standard deviations up, Student's way."""
        return self.gain + t_of_z(z, self.freedom) * self.error


def compare(ones: Sequence[float], others: Sequence[float], spread: Spread) -> Comparison:
    """Compare two arms by their scores of rounds 1, 2, ...; only rounds of both count.

    An arm that is less steady than the rest is judged by its own spread.
    """
    gains = [one - other for one, other in zip(ones, others, strict=False)]
    if not gains:
        return Comparison(0.0, 1.0, 0, 0)
    own = _variance(gains) if len(gains) > 1 else 0.0
    shared = 2 * spread.variance
    error = math.sqrt((own if own > UNSTEADY * shared else shared) / len(gains))
    return Comparison(fmean(gains), error, spread.freedom, len(gains))


def _variance(values: Sequence[float]) -> float:
    """As statistics.variance, which computes with fractions and is a hundred times slower."""
    middle = fmean(values)
    return math.fsum((value - middle) ** 2 for value in values) / (len(values) - 1)


def loss_bounds(gains: Sequence[float], spread: Spread, z: float) -> tuple[float, float]:
    """Between which values one concurrency's change lies, from its changes in each round.

    A single concurrency is never steadier than the mean over all of them, so the spread of the
    scores is a floor. Below two rounds nothing is known.
    """
    if len(gains) < 2:  # noqa: PLR2004 - a spread needs two
        return -math.inf, math.inf
    error = math.sqrt(max(_variance(gains), 2 * spread.variance) / len(gains))
    margin = t_of_z(z, len(gains) - 1) * error
    return fmean(gains) - margin, fmean(gains) + margin


def z_of_t(t: float, freedom: int) -> float:
    """The normal deviate with the same tail as Student's t.

    Wallace 1959, "Bounds on normal approximations to Student's", formula with (8n+1)/(8n+3): good
    to 0.1 from 2 degrees of freedom on, errs to the safe side in the far tail.
    """
    if freedom < 1:
        return 0.0
    shrink = (8 * freedom + 1) / (8 * freedom + 3)
    return math.copysign(shrink * math.sqrt(freedom * math.log1p(t * t / freedom)), t)


def t_of_z(z: float, freedom: int) -> float:
    """The inverse of `z_of_t` for z above 0; infinite where nothing is known."""
    if freedom < 1:
        return math.inf
    shrink = (8 * freedom + 1) / (8 * freedom + 3)
    exponent = (z / shrink) ** 2 / freedom
    return math.sqrt(freedom * math.expm1(exponent)) if exponent < 700 else math.inf  # noqa: PLR2004 - exp overflows beyond


def needed_z(rounds: int, of: int, risk: float) -> float:
    """How sure a gain must be after some of the rounds, so that looking each time does no harm.

    Args:
        rounds: Complete ones.
        of: At most so many are planned.
        risk: Chance that an equal arm ever gets there, over all looks together.

    Sums of independent differences behave as Brownian motion W(t), t = rounds / of. The chance
    that W ever gets above a + b t up to t = 1 is known (`_crossing`), so a is chosen to make it
    the risk. At time t, W / sqrt(t) is the z value.
    """
    time = rounds / of
    return (_start(risk) + SLOPE * time) / math.sqrt(time)


@lru_cache
def _start(risk: float) -> float:
    low, high = 0.0, 40.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _crossing(middle) > risk else (low, middle)
    return high


def _crossing(start: float) -> float:
    """P(W(t) > start + SLOPE t for some t <= 1): Siegmund 1985, "Sequential Analysis", (3.15)."""
    phi = NormalDist().cdf
    reflected = math.exp(-2 * start * SLOPE) * phi(SLOPE - start)
    return phi(-start - SLOPE) + reflected


def percent(gain: float) -> float:
    """A difference of scores as percent of the slower one's speed: 0.0198 is 2 %."""
    return math.expm1(min(gain, 700.0)) * 100


def robust_spread_pct(values: Sequence[float]) -> float:
    """1.4826 times the median absolute deviation, in percent of the median (not zero)."""
    middle = median(values)
    return MAD_TO_SIGMA * median(abs(value - middle) for value in values) / middle * 100
