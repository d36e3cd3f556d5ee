"""What became of each setting, and which one to use, in words and tables for people."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from gpu_reclaim.comparing import Reading, percent, problem, reading, robust_spread_pct
from gpu_reclaim.deciding import replay
from gpu_reclaim.plans import TrialPlan
from gpu_reclaim.racing import DOUBT_Z, Race
from gpu_reclaim.tuning import ArmResult, ArmState, LevelResult, Visit

CLEAR_Z = 3.0
"""An arm is called worse, not just no better, when it is three standard deviations behind."""


@dataclass(frozen=True)
class Decision:
    """Which setting to use.

    Attributes:
        arm: Its name; the present one's unless another is clearly better.
        summary: One sentence.
        final: Nothing is left to measure.
        broken: Why nothing can be compared at all; empty where it can.
    """

    arm: str
    summary: str
    final: bool
    broken: str = ""


def decision(arms: Sequence[str], visits: Sequence[Visit], plan: TrialPlan) -> Decision:
    """Which setting to use, by what is known so far.

    Args:
        arms: Names of the settings in order of preference, the present one first.
        visits: All so far.
        plan: How it is decided.
    """
    race = replay(arms, visits, plan)
    if not race.arms:
        return Decision("", "There is nothing to compare.", final=True)
    best = _best(race)
    return Decision(best, _summary(race, best), final=not race.pending, broken=race.broken)


def results(arms: Sequence[str], visits: Sequence[Visit], plan: TrialPlan) -> list[ArmResult]:
    """What became of each setting, in the order of `arms`.

    Args:
        arms: Names of the settings in order of preference, the present one first.
        visits: All so far.
        plan: How it is decided.
    """
    race = replay(arms, visits, plan)
    if not race.arms:
        return []
    table = {arm: _readings(arm, visits, plan) for arm in race.arms}
    base, best = table[race.present], _best(race)
    return [_result(race, arm, best, table[arm], base) for arm in race.arms]


def _best(race: Race) -> str:
    return race.present if race.broken else race.leader()


def _summary(race: Race, best: str) -> str:
    if race.broken:
        return f"Nothing can be compared, {race.present} stays: {race.broken}."
    rounds = _times(race.rounds)
    if best != race.present:
        gain = percent(race.against(best, race.present).gain)
        return f"{best} is clearly better than the present {race.present}: {gain:+.1f} % {rounds}."
    if race.pending:
        return f"Not decided yet {rounds}; until then the present setting {race.present} stays."
    failed = [arm for arm, left in race.out.items() if left.reason == "failed"]
    if len(race.arms) == 1 or len(failed) == len(race.arms) - 1:
        return f"No other setting could be measured: the present setting {race.present} stays."
    if all(_worse(race, arm) for arm in race.arms[1:] if arm not in failed):
        return f"All others are slower: the present setting {race.present} stays."
    return (
        f"No setting is clearly better and allowed: the present setting {race.present} stays "
        f"({rounds})."
    )


def _times(rounds: int) -> str:
    return f"after {rounds} round" + ("" if rounds == 1 else "s")


def _readings(arm: str, visits: Sequence[Visit], plan: TrialPlan) -> dict[int, Reading]:
    """The arm's visits that can be counted, by round."""
    found: dict[int, Reading] = {}
    for visit in visits:
        if visit.arm == arm and not problem(visit, plan):
            found.setdefault(visit.round, reading(visit, plan))
    return found


def _result(
    race: Race, arm: str, best: str, mine: dict[int, Reading], base: dict[int, Reading]
) -> ArmResult:
    both = sorted(mine.keys() & base.keys())
    gain = percent(fmean(mine[turn].score - base[turn].score for turn in both)) if both else None
    state, why = _state(race, arm, best)
    return ArmResult(
        arm=arm,
        state=state,
        why=why,
        gain_pct=0.0 if gain is not None and arm == race.present else gain,
        rounds=len(mine),
        levels=[_level(race.plan, i, mine, base) for i in range(len(race.plan.levels)) if mine],
    )


def _level(
    plan: TrialPlan, index: int, mine: dict[int, Reading], base: dict[int, Reading]
) -> LevelResult:
    rows = [one.measured[index] for one in mine.values()]
    both = sorted(mine.keys() & base.keys())
    changes = [percent(mine[turn].levels[index] - base[turn].levels[index]) for turn in both]
    accepted = [row.accept_length for row in rows if row.accept_length is not None]
    speeds = [row.output_tok_s for row in rows]
    return LevelResult(
        level=plan.levels[index],
        output_tok_s=median(speeds),
        spread_pct=robust_spread_pct(speeds),
        change_pct=median(changes) if changes else None,
        ttft_ms=median(row.ttft_ms for row in rows),
        ttft_p99_ms=median(row.ttft_p99_ms for row in rows),
        tpot_ms=median(row.tpot_ms for row in rows),
        tpot_p99_ms=median(row.tpot_p99_ms for row in rows),
        accept_length=median(accepted) if accepted else None,
    )


def _state(race: Race, arm: str, best: str) -> tuple[ArmState, str]:
    if arm == race.present:
        return ("failed", _sentence(race.broken)) if race.broken else ("current", "In force now.")
    left = race.out.get(arm)
    if left and left.reason in ("failed", "rejected"):
        outcome: ArmState = "failed" if left.reason == "failed" else "rejected"
        return outcome, _sentence(left.why)
    if arm == best:
        return "winner", _sentence(f"clearly better than the present setting{_measured(race, arm)}")
    if left and left.reason == "worse":
        return "worse", _sentence(left.why)
    if best != race.present and race.beats(arm, race.present) and not race.obstacle(arm):
        return _second(race, arm, best)
    if race.beats(arm, race.present) and race.obstacle(arm):
        return "rejected", _sentence(f"faster{_measured(race, arm)}, but {race.obstacle(arm)}")
    return _no_better(race, arm, best)


def _second(race: Race, arm: str, best: str) -> tuple[ArmState, str]:
    """Better than the present setting, and yet not the one to use."""
    better = f"better than the present setting{_measured(race, arm)}"
    if race.against(arm, best).upper(DOUBT_Z) < 0:
        return "worse", _sentence(f"{better}, but clearly slower than {best}")
    return "equal", _sentence(f"{better}, but not clearly better than {best}, which comes first")


def _no_better(race: Race, arm: str, best: str) -> tuple[ArmState, str]:
    if not race.readings.get(arm):
        return "equal", _sentence(race.broken or "not measured yet")
    if _worse(race, arm):
        return "worse", _sentence(f"clearly slower than the present setting{_measured(race, arm)}")
    if best != race.present and race.against(arm, best).upper(DOUBT_Z) < 0:
        return "worse", _sentence(f"clearly slower than {best}{_measured(race, arm)}")
    least = f"a gain of {race.plan.min_gain_pct:g} %"
    if arm in race.out:
        found = f"not clearly different, and {least} can hardly be shown any more"
    elif race.pending or race.broken:
        found = "not decided"
    else:
        found = f"{least} was not shown"
    return "equal", _sentence(found + _measured(race, arm))


def _worse(race: Race, arm: str) -> bool:
    left = race.out.get(arm)
    found = race.against(arm, race.present)
    return bool(left and left.reason == "worse") or found.upper(CLEAR_Z) < 0


def _measured(race: Race, arm: str) -> str:
    found = race.against(arm, race.present)
    middle, margin = percent(found.gain), found.upper(DOUBT_Z) - found.gain
    range_ = f", give or take {percent(margin):.1f}" if math.isfinite(margin) else ""
    return f" ({middle:+.1f} %{range_}, {_times(found.rounds)})"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."
