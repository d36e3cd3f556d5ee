"""What to measure next: a pure replay of the visits so far.

In each round every arm still in the race is visited once, the present setting among them. After a
complete round an arm leaves the race when it can no longer win; a failure or wrong outputs end its
race at once. What is measured next depends on the visits alone, so a tuning that was interrupted
goes on from its record.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from gpu_reclaim.comparing import percent, problem, reading
from gpu_reclaim.plans import TrialPlan
from gpu_reclaim.racing import DOUBT_Z, Out, Race, Reason
from gpu_reclaim.tuning import Visit

FAR_WORSE = math.log(0.85)
"""Dropped after one round, when nothing is known about the spread: 15 % slower is 3.8 standard
deviations of a difference between two visits with 3 % of noise each."""

WHOLE = 100.0
"""All outputs, in percent."""

ATTEMPTS = 2
"""The present setting is started so often in a round before nothing can be compared."""


def next_visit(
    arms: Sequence[str], visits: Sequence[Visit], plan: TrialPlan
) -> tuple[str, int] | None:
    """The next arm to visit, and in which round; None when it is decided.

    Args:
        arms: Names of the settings in order of preference, the present one first.
        visits: All so far, also of an earlier run that was interrupted.
        plan: How it is decided.
    """
    pending = replay(arms, visits, plan).pending
    return pending[0] if pending else None


def replay(arms: Sequence[str], visits: Sequence[Visit], plan: TrialPlan) -> Race:
    """How far the visits bring a tuning; those that it would not have asked for are passed over."""
    race = Race(tuple(dict.fromkeys(arms)), plan)
    by_round: dict[int, list[Visit]] = {}
    for visit in visits:
        by_round.setdefault(visit.round, []).append(visit)
    for turn in range(1, plan.rounds + 1):
        if not _play(race, turn, by_round.get(turn, [])):
            break
    return race


def _play(race: Race, turn: int, visits: Sequence[Visit]) -> bool:
    """Take in one round's visits; True when the round is complete and the race goes on."""
    if len(race.arms) < 2 or not race.undecided:  # noqa: PLR2004 - one to compare with
        return False
    seen = {arm: [visit for visit in visits if visit.arm == arm] for arm in race.running}
    _leave_at_once(race, turn, seen)
    failures = [problem(visit, race.plan) for visit in seen[race.present]]
    if len(failures) >= ATTEMPTS and all(failures):
        race.broken = f"the present setting failed twice in round {turn}: {failures[-1]}"
        return False
    if not race.undecided:
        return False
    race.pending = _missing(race, turn, seen)
    if race.pending:
        return False
    _count(race, turn, seen)
    _leave_after(race)
    return True


def _leave_at_once(race: Race, turn: int, seen: dict[str, list[Visit]]) -> None:
    own = [visit.differing_pct for visit in seen[race.present]]
    race.own_pct = max([race.own_pct, *(x for x in own if x is not None and 0 <= x <= WHOLE)])
    # Where the present setting hardly ever answers the same, all answers still must not differ.
    most = min(race.plan.output_tolerance_pct + race.own_pct, (WHOLE + race.own_pct) / 2)
    for arm in race.running[1:]:
        for visit in seen[arm]:
            fault = problem(visit, race.plan)
            differing = visit.differing_pct
            if fault:
                race.out[arm] = Out("failed", f"in round {turn}: {fault}", turn)
            # Written so that a value that is no number is refused too.
            elif differing is not None and not 0 <= differing <= most:
                why = f"{differing:.0f} % of its outputs differ, {most:g} % may"
                why += f" ({race.own_pct:.0f} % of the present setting's own do)" * (
                    race.own_pct > 0
                )
                race.out[arm] = Out("rejected", why, turn)


def _missing(race: Race, turn: int, seen: dict[str, list[Visit]]) -> list[tuple[str, int]]:
    """What the round lacks: there and back, so that drift within a round favours nobody."""
    order = race.running if turn % 2 else race.running[::-1]
    failed = bool(seen[race.present]) and not _good(race, seen[race.present])
    again = [race.present] if failed else []
    return [(arm, turn) for arm in [*again, *(arm for arm in order if not seen[arm])]]


def _good(race: Race, visits: Sequence[Visit]) -> list[Visit]:
    return [visit for visit in visits if not problem(visit, race.plan)]


def _count(race: Race, turn: int, seen: dict[str, list[Visit]]) -> None:
    deviations = []
    for arm in race.running:
        new = reading(_good(race, seen[arm])[0], race.plan)
        earlier = race.readings.setdefault(arm, [])
        if earlier:
            deviations.append(new.score - fmean(one.score for one in earlier))
        earlier.append(new)
        if any(visit.differing_pct is not None for visit in seen[arm]):
            race.compared.add(arm)
    if deviations:
        race.spread = race.spread.after(deviations, turn)
    race.rounds = turn


def _leave_after(race: Race) -> None:
    leader = race.leader()
    for arm in race.running[1:]:
        if arm == leader:
            continue
        found = _verdict(race, arm, leader)
        if found:
            race.out[arm] = Out(*found, race.rounds)


def _verdict(race: Race, arm: str, leader: str) -> tuple[Reason, str] | None:
    """Why the arm has no chance any more; None while it has one."""
    found = race.against(arm, race.present)
    if race.rounds == 1:
        why = f"{percent(found.gain):+.1f} % in the first round, too far behind for noise"
        return ("worse", why) if found.gain < FAR_WORSE else None
    limit = race.too_slow(arm) or race.loss(arm)
    if limit:
        return "rejected", limit
    if race.hopeless(arm, race.present):
        return "equal", ""
    if leader == race.present:
        return None
    later = race.arms.index(arm) > race.arms.index(leader)
    behind = race.against(arm, leader).upper(DOUBT_Z) < 0
    if behind or (later and race.hopeless(arm, leader)):
        return "beaten", leader
    return None
