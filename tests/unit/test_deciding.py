"""What is measured next, and which setting is used."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_reclaim.comparing import needed_z, problem, t_of_z, z_of_t
from gpu_reclaim.deciding import next_visit, replay
from gpu_reclaim.plans import SpecDecodePlan
from gpu_reclaim.standings import decision, results
from gpu_reclaim.tuning import Visit
from unit.tuned import row, visit

Answer = Callable[[str, int], Visit]
"""The visit of a setting in a round."""

ARMS = ["present", "off", "two"]
PLAN = SpecDecodePlan(levels=[1, 16], rounds=6)


def play(answer: Answer, arms: Sequence[str] = ARMS, plan: SpecDecodePlan = PLAN) -> list[Visit]:
    """A whole tuning; answer(arm, round) is the visit."""
    visits: list[Visit] = []
    while at := next_visit(arms, visits, plan):
        visits.append(answer(*at))
        assert len(visits) <= plan.rounds * (len(arms) + 1)
    return visits


def noisy(gains: Mapping[str, float], sigma: float, seed: int) -> Answer:
    dice = random.Random(seed)

    def answer(arm: str, turn: int) -> Visit:
        factor = math.exp(math.log1p(gains.get(arm, 0) / 100) + dice.gauss(0, sigma))
        return visit(arm, turn, 100 * factor, 1000 * factor)

    return answer


def states(
    visits: Sequence[Visit], plan: SpecDecodePlan = PLAN, arms: Sequence[str] = ARMS
) -> dict[str, str]:
    return {one.arm: one.state for one in results(arms, visits, plan)}


def test_a_round_goes_there_and_the_next_one_back() -> None:
    plan = PLAN.model_copy(update={"rounds": 2})
    visits = [visit(arm, 1) for arm in ARMS]
    assert next_visit(ARMS, [], plan) == ("present", 1)
    assert next_visit(ARMS, visits[:1], plan) == ("off", 1)
    assert next_visit(ARMS, visits, plan) == ("two", 2)


def test_equal_settings_change_nothing() -> None:
    visits = play(noisy({}, 0.005, 1))
    found = decision(ARMS, visits, PLAN)
    assert (found.arm, found.final) == ("present", True)
    assert "winner" not in states(visits).values()


def test_a_clear_winner_wins_early() -> None:
    visits = play(noisy({"two": 40}, 0.005, 1))
    assert decision(ARMS, visits, PLAN).arm == "two"
    assert states(visits)["two"] == "winner"
    assert max(one.round for one in visits) < PLAN.rounds


def test_two_equal_winners_the_earlier_one() -> None:
    visits = play(noisy({"off": 30, "two": 30}, 0.005, 1))
    assert decision(ARMS, visits, PLAN).arm == "off"
    assert states(visits)["two"] == "equal"


def test_the_better_of_two_winners() -> None:
    visits = play(noisy({"off": 30, "two": 60}, 0.005, 1))
    assert decision(ARMS, visits, PLAN).arm == "two"
    assert states(visits)["off"] == "worse"


def test_a_gain_below_the_least_one_is_none() -> None:
    plan = SpecDecodePlan(levels=[1, 16], rounds=12, min_gain_pct=10)
    assert decision(ARMS, play(noisy({"two": 7}, 0.002, 1), plan=plan), plan).arm == "present"
    plan = plan.model_copy(update={"min_gain_pct": 2})
    assert decision(ARMS, play(noisy({"two": 7}, 0.002, 1), plan=plan), plan).arm == "two"


def test_just_below_the_least_gain_is_not_enough_however_sure() -> None:
    plan = SpecDecodePlan(levels=[1, 16], rounds=12, min_gain_pct=10)
    visits = play(lambda arm, turn: visit(
        arm, turn, *((109.5, 1095) if arm == "two" else (100, 1000))), plan=plan)  # fmt: skip
    assert decision(ARMS, visits, plan).arm == "present"


def test_far_worse_is_dropped_after_one_round() -> None:
    visits = [visit("present", 1), visit("off", 1, 70, 700), visit("two", 1, 90, 900)]
    race = replay(ARMS, visits, PLAN)
    assert race.out["off"].reason == "worse"
    assert "two" not in race.out


def test_a_loss_at_one_concurrency_is_not_allowed() -> None:
    def answer(arm: str, turn: int) -> Visit:
        wobble = 1 + 0.001 * turn
        speeds = (200 * wobble, 950) if arm == "two" else (100 * wobble, 1000)
        return visit(arm, turn, *speeds)

    visits = play(answer)
    assert decision(ARMS, visits, PLAN).arm == "present"
    assert states(visits)["two"] == "rejected"


@pytest.mark.parametrize(
    ("limits", "state"),
    [({"max_ttft_ms": 299}, "rejected"), ({"max_tpot_ms": 19}, "rejected"), ({}, "winner")],
)
def test_latency_limits(limits: dict[str, float], state: str) -> None:
    plan = PLAN.model_copy(update=limits)
    visits = play(noisy({"two": 40}, 0.005, 1), plan=plan)
    assert states(visits, plan)["two"] == state


@pytest.mark.parametrize(
    ("own", "differing", "state"),
    [
        (0, 25, "winner"),
        (0, 26, "rejected"),
        (10, 35, "winner"),
        (10, 36, "rejected"),
        # However unsteady the present setting is, not all answers may differ.
        (80, 90, "winner"),
        (80, 91, "rejected"),
        (100, 100, "winner"),
    ],
)
def test_outputs_may_differ_beyond_those_of_the_present_setting(
    own: float, differing: float, state: str
) -> None:
    def answer(arm: str, turn: int) -> Visit:
        speed = 2 if arm == "two" else 1
        return visit(
            arm, turn, 100 * speed, 1000 * speed, differing=own if arm == "present" else differing
        )

    found = results(ARMS, play(answer), PLAN)
    assert {one.arm: one.state for one in found}["two"] == state


@pytest.mark.parametrize("differing", [25.5, 100, math.nan, -1])
def test_wrong_outputs_end_it_at_once(differing: float) -> None:
    visits = play(lambda arm, turn: visit(
        arm, turn, *((900, 9000) if arm == "two" else (100, 1000)),
        differing=differing if arm == "two" else 0))  # fmt: skip
    assert states(visits)["two"] == "rejected"
    assert sum(one.arm == "two" for one in visits) == 1


def test_outputs_that_were_never_compared_do_not_win() -> None:
    visits = play(lambda arm, turn: visit(
        arm, turn, *((900, 9000) if arm == "two" else (100, 1000)), differing=None))  # fmt: skip
    assert decision(ARMS, visits, PLAN).arm == "present"
    assert "not compared" in results(ARMS, visits, PLAN)[2].why


def test_a_failure_ends_an_arm_and_is_named() -> None:
    visits = [visit("present", 1), visit("off", 1, failure="out of memory at start")]
    assert next_visit(ARMS, visits, PLAN) == ("two", 1)
    found = results(ARMS, visits, PLAN)[1]
    assert found.state == "failed"
    assert "out of memory at start" in found.why


def test_the_present_setting_gets_a_second_try() -> None:
    failed = visit("present", 1, failure="no answer")
    assert next_visit(ARMS, [failed], PLAN) == ("present", 1)
    assert next_visit(ARMS, [failed, visit("present", 1)], PLAN) == ("off", 1)
    twice = [failed, failed]
    assert next_visit(ARMS, twice, PLAN) is None
    found = decision(ARMS, twice, PLAN)
    assert found.arm == "present"
    assert "no answer" in found.summary
    assert results(ARMS, twice, PLAN)[0].state == "failed"


BAD = [
    visit("two", 1, 0, 1000),
    visit("two", 1, math.nan, 1000),
    visit("two", 1, math.inf, 1000),
    visit("two", 1, -1, 1000),
    visit("two", 1, completed=15),
    visit("two", 1, requests=0, completed=0),
    visit("two", 1, ttft_p99_ms=math.nan),
    Visit(arm="two", round=1),
    Visit(arm="two", round=1, levels=[row(1, 1), row(1, 1), row(16, 1)]),
]


@pytest.mark.parametrize("bad", BAD)
def test_what_cannot_be_counted_is_a_failure(bad: Visit) -> None:
    visits = play(lambda arm, turn: bad if arm == "two" else visit(arm, turn))
    assert problem(bad, PLAN)
    assert states(visits)["two"] == "failed"
    assert decision(ARMS, visits, PLAN).arm == "present"


def test_nothing_to_compare() -> None:
    assert next_visit([], [], PLAN) is None
    assert results([], [], PLAN) == []
    assert next_visit(["present"], [], PLAN) is None
    assert decision(["present"], [], PLAN).arm == "present"


def test_tables_have_medians_and_changes() -> None:
    visits = [visit("present", 1, 100, 1000), visit("off", 1, 110, 1000), visit("two", 1)]
    found = results(ARMS, visits, PLAN)[1]
    assert found.levels[0].output_tok_s == 110
    assert found.levels[0].change_pct == pytest.approx(10)
    assert found.gain_pct == pytest.approx((math.sqrt(1.1) - 1) * 100)


@pytest.mark.parametrize(("freedom", "t"), [(4, 8.610), (8, 5.041), (16, 4.015)])
def test_student_as_in_tables(freedom: int, t: float) -> None:
    """Tables: one-sided 0.0005, z 3.2905."""
    assert z_of_t(t, freedom) == pytest.approx(3.2905, abs=0.06)
    assert t_of_z(z_of_t(t, freedom), freedom) == pytest.approx(t)


def test_the_boundary_holds_over_all_looks() -> None:
    dice, crossed, runs = random.Random(5), 0, 4000
    for _ in range(runs):
        total = 0.0
        for turn in range(1, 19):
            total += dice.gauss(0, 1)
            if total / math.sqrt(turn) >= needed_z(turn, 18, 0.05):
                crossed += 1
                break
    assert 0.02 < crossed / runs < 0.055


speed = st.one_of(st.floats(50, 200), st.sampled_from([0.0, math.nan, math.inf, 1e308, 1e-308]))
any_visit = st.builds(
    lambda arm, turn, a, b, differing, failure: visit(
        arm, turn, a, b, differing=differing, failure=failure
    ),
    st.sampled_from([*ARMS, "unknown"]),
    st.integers(-1, 8),
    speed,
    speed,
    st.sampled_from([None, 0.0, 50.0, math.nan]),
    st.sampled_from(["", "", "", "failed"]),
)


@given(st.lists(any_visit, max_size=30))
@settings(max_examples=150, deadline=None)
def test_any_history_has_an_answer(visits: list[Visit]) -> None:
    next_visit(ARMS, visits, PLAN)
    found = decision(ARMS, visits, PLAN)
    rows = results(ARMS, visits, PLAN)
    winners = [one.arm for one in rows if one.state == "winner"]
    assert winners == ([] if found.arm == "present" else [found.arm])
    for one in rows:
        if one.state == "winner":
            assert one.gain_pct is not None
            assert (
                one.gain_pct >= PLAN.min_gain_pct - 1e-9
                or one.rounds > replay(ARMS, visits, PLAN).rounds
            )


@given(st.integers(0, 10**6), st.sampled_from([0, 5, 30]), st.sampled_from([0.002, 0.02, 0.1]))
@settings(max_examples=60, deadline=None)
def test_resume_and_order_within_a_round_do_not_matter(
    seed: int, gain: float, sigma: float
) -> None:
    visits = play(noisy({"two": gain}, sigma, seed))
    for cut in range(len(visits)):
        following = next_visit(ARMS, visits[:cut], PLAN)
        assert following == (visits[cut].arm, visits[cut].round)
    mixed = random.Random(seed).sample(visits, len(visits))
    assert next_visit(ARMS, mixed, PLAN) is None
    assert decision(ARMS, mixed, PLAN) == decision(ARMS, visits, PLAN)
    assert states(mixed) == states(visits)


def test_equal_settings_are_seldom_replaced() -> None:
    """1 in 100 allowed; 6 of 150 would be seen once in 300 times by chance."""
    plan = SpecDecodePlan(levels=[1, 16], rounds=5)
    wrong = sum(
        decision(ARMS, play(noisy({}, 0.03, seed), plan=plan), plan).arm != "present"
        for seed in range(150)
    )
    assert wrong <= 5
