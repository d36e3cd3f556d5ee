"""A tuning on its way: how far it is, how long it takes, and how it is reported."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from gpu_reclaim.course import GO_ON, RECLAIM_S, Tuning
from gpu_reclaim.errors import NotInForce
from gpu_reclaim.finding import requests_at
from gpu_reclaim.models import ReclaimPolicy
from gpu_reclaim.plans import SpecDecodePlan
from gpu_reclaim.preflight import ladder_s
from gpu_reclaim.tuning import Visit
from unit.tuned import PLAN, before, visit

PRESENT, OFF, TWO = before().settings


def tuning(*visits: Visit, plan: SpecDecodePlan = PLAN, **more: Any) -> Tuning:
    return Tuning("glm", "llm", plan, ReclaimPolicy(), before(), visits=list(visits), **more)


def played(factor: float = 1, **more: Any) -> Tuning:
    """A whole tuning in which one setting is that much faster."""
    made = tuning(**more)
    while turn := made.turn:
        arm, number = turn
        wobble = 1 + 0.001 * number
        times = wobble * (factor if arm == TWO else 1)
        made.visits.append(visit(arm, number, 100 * times, 1000 * times))
    return made


def test_the_present_setting_is_first() -> None:
    made = tuning()

    assert made.arms == [PRESENT, OFF, TWO]
    assert (made.turn, made.winner) == ((PRESENT, 1), PRESENT)


def test_what_comes_next_follows_from_what_was_measured() -> None:
    assert tuning(visit(PRESENT, 1)).turn == (OFF, 1)
    assert played().turn is None


@pytest.mark.parametrize(
    ("limit", "reserve_s", "goes_on"),
    [(0, 1e9, True), (2, 0, True), (2, 50, True), (2, 70, False), (1, 0, True), (0.5, 0, False)],
)
def test_a_visit_ends_with_so_much_time_left(
    limit: float, reserve_s: float, goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is put back at last needs some time too."""
    monkeypatch.setattr(Tuning, "visit_s", 59)
    plan = PLAN.model_copy(update={"max_minutes": limit})

    assert bool(tuning(plan=plan, reserve_s=reserve_s).turn) == goes_on


def test_the_most_minutes_are_guessed_at_first() -> None:
    made = tuning()

    assert made.most_visits == 18
    assert made.most_minutes == pytest.approx(18 * (RECLAIM_S + 60 + ladder_s(PLAN)) / 60)


def test_the_guess_of_a_ladder() -> None:
    """122 tokens per second at one request and 1566 at 64, as was measured once."""
    plan = PLAN.model_copy(update={"levels": [1, 64]})

    assert ladder_s(plan) == pytest.approx(16 * 220 / 122 + 512 * 220 / 1566, rel=0.02)
    assert [requests_at(plan, level) for level in (1, 2, 3, 64)] == [16, 16, 24, 512]


def test_then_they_follow_from_visits_that_were_measured() -> None:
    """A failure says nothing about how long a measurement takes."""
    one = visit(PRESENT, 1, seconds=100).model_copy(update={"ready_s": 40})
    other = visit(OFF, 1, seconds=50).model_copy(update={"ready_s": 60})
    failed = Visit(arm=TWO, round=1, failure="x", ready_s=9999)
    made = tuning(one, other, failed)

    assert made.most_minutes == pytest.approx(18 * (RECLAIM_S + (240 + 160) / 2) / 60)
    done, most, words, minutes = made.progress((TWO, 2))
    assert (done, most, words) == (3, 18, f"round 2 of 6, {TWO}")
    assert minutes == pytest.approx(15 * (RECLAIM_S + 200) / 60)


def test_no_minutes_are_left_however_many_visits_there_were() -> None:
    made = tuning(*(visit(PRESENT, 1) for _ in range(20)))

    assert made.progress((OFF, 6))[3] == 0


def test_a_plan_touches_nothing_and_says_how_long() -> None:
    found = tuning().planned()

    assert (found.outcome, found.server, found.winner) == ("planned", "glm", PRESENT)
    assert (
        found.summary == f"3 settings would be tried, in {found.estimated_minutes:.0f} min at most"
    )
    assert (found.arms, found.visits, found.raw) == ([], [], before().place)
    assert found.refused == before().refused
    assert found.minutes < 1


def test_the_present_setting_is_kept() -> None:
    found = played().report(not_kept="", proof="it says so")

    assert (found.outcome, found.winner, found.current) == ("kept", PRESENT, PRESENT)
    assert (found.remedy, found.drop_in, found.proof) == ("", "", "it says so")
    assert f"the present setting {PRESENT} stays" in found.summary
    assert [one.arm for one in found.arms] == [PRESENT, OFF, TWO]


@pytest.mark.parametrize(("persist", "root"), [(True, "/etc"), (False, "/run")])
def test_a_better_one_replaces_it(persist: bool, root: str) -> None:
    made = played(1.4, plan=PLAN.model_copy(update={"persist": persist}), resumed=3)
    made.applied = True
    found = made.report(not_kept="", proof="it says so")

    assert (found.outcome, found.winner, found.remedy) == ("replaced", TWO, "")
    assert found.drop_in == f"{root}/systemd/system/sglang.service.d/zz-gpu-reclaim.conf"
    assert f"{TWO} is clearly better" in found.summary
    assert (found.resumed, found.visits) == (3, made.visits)


def test_a_better_one_is_found_and_not_used() -> None:
    found = played(1.4).report(not_kept="", proof="it says so")

    assert (found.outcome, found.winner, found.drop_in) == ("found", TWO, "")
    assert found.remedy == f"run it again with apply = if_better to use {TWO}"


def test_a_better_one_that_does_not_start_again_is_not_kept() -> None:
    found = played(1.4).report(not_kept="out of memory at start", proof="x")

    assert (found.outcome, found.winner, found.drop_in) == ("found", TWO, "")
    assert found.summary.endswith(" It was not kept, for at its last start: out of memory at start")
    assert "before it is used" in found.remedy


def test_a_present_setting_that_cannot_be_measured() -> None:
    failed = [visit(PRESENT, 1, failure="out of memory") for _ in range(2)]
    made = tuning(*failed)
    found = made.report(not_kept="", proof="x")

    assert made.turn is None
    assert (found.outcome, found.winner) == ("unfinished", PRESENT)
    assert "out of memory" in found.summary
    assert "see its failures" in found.remedy


def test_what_came_to_nothing_is_not_gone_on_with() -> None:
    """Its cause may be mended since; the record would end the next run before it began."""
    made = tuning()
    made.resume([visit(PRESENT, 1, failure="out of memory") for _ in range(2)], [["text"]])
    assert (made.visits, made.answers, made.resumed) == ([], [], 0)
    assert made.turn == (PRESENT, 1)


def test_an_error_after_the_keep_says_what_is_in_force() -> None:
    made = played(1.4)
    found = made.broken(NotInForce("it does not serve"))
    assert (found.outcome, found.drop_in, found.remedy) == ("unfinished", "", GO_ON)
    assert "NotInForce: it does not serve" in found.summary

    made.applied = True
    found = made.broken(RuntimeError("sk-secret"))
    file = "/etc/systemd/system/sglang.service.d/zz-gpu-reclaim.conf"
    assert (found.outcome, found.drop_in) == ("unfinished", file)
    assert found.remedy.startswith(f"{TWO} is the setting of sglang.service now.")
    assert f"rm {file}; systemctl daemon-reload; systemctl restart sglang.service" in found.remedy
    assert "sk-secret" not in found.summary


def test_nothing_of_it_is_logged_with_a_key(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        text = repr(played(1.4).report(not_kept="", proof="x"))

    assert "sk-secret" not in text + repr(tuning()) + caplog.text
