"""How often the rules of a tuning decide rightly, and what they cost: simulated tunings.

    python benchmarks/decisions.py [--tunings 20] [--rounds N] [--only WORD]

The real rules are asked what to measure next and what to use; only the servers are made up. Speeds
have noise that a whole visit shares (a server start), noise of each concurrency, or both, drift
over the run, and sometimes a visit disturbed by something else. Seeded: the same table each time.
Bounds are one-sided, 95 % (Clopper and Pearson).
"""

from __future__ import annotations

import argparse
import math
import os
import random
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

from gpu_reclaim.deciding import replay
from gpu_reclaim.plans import SpecDecodePlan
from gpu_reclaim.standings import decision
from gpu_reclaim.tuning import Measurement, Visit

LEVELS = SpecDecodePlan().levels
ARMS = ("present", "off", "one", "two", "three")
DRIFT_VISITS = 60
"""Drift goes from one end to the other in so many visits, a long tuning."""


@dataclass(frozen=True)
class Case:
    """Made-up servers: true gains in percent, noise as standard deviations of logarithms.

    The percent in a name is the noise of one measurement: one concurrency of one visit. What a
    visit's measurements share (a warm GPU, another start) does not average out among them.
    """

    name: str
    right: str
    gains: tuple[float, ...] = (0, 0, 0, 0, 0)
    shared: float = 0
    each: float = 0
    drift: float = 0
    disturbed: float = 0
    unsteady: float = 1


@dataclass
class Tally:
    """What came of a case's tunings."""

    tunings: int = 0
    right: int = 0
    replaced: int = 0
    visits: int = 0
    rounds: int = 0
    most: int = 0
    last_arm: int = 0


def cases() -> list[Case]:
    """Every kind of noise with equal settings, with a better one, and with a worse one."""
    found = []
    for percent in (1, 2, 3):
        sigma = percent / 100
        # Of the variance.
        half = sigma / math.sqrt(2)
        kinds = {
            "all shared": Case("", "", shared=sigma),
            "half shared": Case("", "", shared=half, each=half),
            "half shared, drift": Case("", "", shared=half, each=half, drift=0.05),
        }
        for kind, case in kinds.items():
            name = f"{percent} % {kind}"
            worse = -200 * math.hypot(case.shared, case.each / 2)
            found += [
                replace(case, name=f"{name}, equal", right="present"),
                replace(case, name=f"{name}, last +5", right="three", gains=(0, 0, 0, 0, 5)),
                replace(
                    case, name=f"{name}, last -2 s.d.", right="present", gains=(0, 0, 0, 0, worse)
                ),
            ]
        base = kinds["all shared"]
        found += [
            replace(base, name=f"{percent} % unsteady, equal", right="present", unsteady=3),
            replace(base, name=f"{percent} % disturbed, equal", right="present", disturbed=0.05),
            replace(
                base,
                name=f"{percent} % disturbed, last +5",
                right="three",
                disturbed=0.05,
                gains=(0, 0, 0, 0, 5),
            ),
            replace(base, name=f"{percent} % two +5", right="two", gains=(0, 0, 0, 5, 5)),
        ]
    return found


def visit(case: Case, at: tuple[str, int], count: int, way: int, dice: random.Random) -> Visit:
    """One made-up visit: the count-th of its tuning."""
    arm, turn = at
    unsteady = case.unsteady if arm == ARMS[-1] else 1
    base = math.log1p(case.gains[ARMS.index(arm)] / 100)
    base += dice.gauss(0, case.shared * unsteady)
    base += way * case.drift * (2 * count / DRIFT_VISITS - 1)
    if dice.random() < case.disturbed:
        base += math.log(0.85)
    rows = [
        Measurement.model_construct(
            level=level, requests=16, completed=16, seconds=60, ttft_ms=100, ttft_p99_ms=300,
            output_tok_s=100 * level**0.7 * math.exp(base + dice.gauss(0, case.each * unsteady)),
            tpot_ms=10, tpot_p99_ms=20,
        )
        for level in LEVELS
    ]  # fmt: skip
    return Visit.model_construct(arm=arm, round=turn, failure="", levels=rows, differing_pct=0.0)


def tuning(case: Case, plan: SpecDecodePlan, dice: random.Random) -> tuple[str, list[Visit]]:
    """One made-up tuning: the setting it decides for, and its visits.

    A round is asked for as a whole, which is what asking visit by visit gives when none fails.
    """
    visits: list[Visit] = []
    way = dice.choice((-1, 1))
    while pending := replay(ARMS, visits, plan).pending:
        for at in pending:
            visits.append(visit(case, at, len(visits), way, dice))
    return decision(ARMS, visits, plan).arm, visits


def simulate(case: Case, plan: SpecDecodePlan, tunings: int, seed: int) -> Tally:
    """Many tunings of one case."""
    dice, tally = random.Random(f"{seed} {case.name}"), Tally()
    for _ in range(tunings):
        arm, visits = tuning(case, plan, dice)
        tally.tunings += 1
        tally.right += arm == case.right
        tally.replaced += arm != ARMS[0]
        tally.visits += len(visits)
        tally.rounds += max(one.round for one in visits)
        tally.most = max(tally.most, len(visits))
        tally.last_arm += sum(one.arm == ARMS[-1] for one in visits)
    return tally


def highest_share(hits: int, of: int, risk: float = 0.05) -> float:
    """Clopper and Pearson's upper bound of a probability, by bisection."""
    low, high = hits / of, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if _at_most(hits, of, middle) > risk else (low, middle)
    return high


def _at_most(hits: int, of: int, share: float) -> float:
    """P(a binomial variable is at most hits)."""
    if share >= 1:
        return float(hits >= of)
    logs = (
        math.lgamma(of + 1) - math.lgamma(k + 1) - math.lgamma(of - k + 1)
        + k * math.log(share) + (of - k) * math.log1p(-share)
        for k in range(hits + 1)
    )  # fmt: skip
    return math.fsum(map(math.exp, logs))


def row(case: Case, tally: Tally, minutes: float) -> str:
    """One line of the table."""
    n = tally.tunings
    if case.right == ARMS[0]:
        share, bound = tally.replaced / n, highest_share(tally.replaced, n)
        verdict = f"replaced {share:6.2%} (at most  {bound:6.2%})"
    else:
        share, bound = tally.right / n, 1 - highest_share(n - tally.right, n)
        verdict = f"right    {share:6.2%} (at least {bound:6.2%})"
    mean = tally.visits / n
    hours = mean * minutes / 60
    return (
        f"{case.name:34} {verdict}  rounds {tally.rounds / n:5.1f}  visits {mean:5.1f} "
        f"(most {tally.most:3})  last arm {tally.last_arm / n:5.1f}  hours {hours:5.1f}"
    )


def _work(job: tuple[Case, SpecDecodePlan, int, int]) -> Tally:
    return simulate(*job)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tunings", type=int, default=20, help="of each case")
    parser.add_argument("--rounds", type=int, default=0, help="0: the plan's own")
    parser.add_argument(
        "--only", default="", help="cases whose name has one of these, divided by |"
    )
    parser.add_argument("--start-minutes", type=float, default=4, help="until a server serves")
    parser.add_argument("--ladder-minutes", type=float, default=6, help="all concurrencies")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(argv)
    plan = SpecDecodePlan(**({"rounds": given.rounds} if given.rounds else {}))
    print(f"{given.tunings} tunings each, {plan.rounds} rounds at most, {len(ARMS)} settings")
    words = given.only.split("|")
    chosen = [case for case in cases() if any(word in case.name for word in words)]
    jobs = [(case, plan, given.tunings, given.seed) for case in chosen]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for case, tally in zip(chosen, pool.map(_work, jobs), strict=True):
            print(row(case, tally, given.start_minutes + given.ladder_minutes), flush=True)


if __name__ == "__main__":
    main()
