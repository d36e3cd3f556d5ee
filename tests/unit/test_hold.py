"""A reclaim that holds, over a host in memory: what is asked, and what the report says."""

from __future__ import annotations

import logging

import pytest

from gpu_reclaim import claiming, hold
from gpu_reclaim.claiming import Holder
from gpu_reclaim.commands import Script, Section
from gpu_reclaim.errors import (
    BadAnswer,
    BadInput,
    GpusNotReclaimed,
    LinkLost,
    Unreachable,
)
from gpu_reclaim.guarded import PUT_BACK_S, put_back, put_back_unless_good
from gpu_reclaim.models import ReclaimPolicy, ReclaimReport, RestoredUnit, Verdict
from gpu_reclaim.reclaim import reclaim
from gpu_reclaim.record import Record
from gpu_reclaim.steps import survey
from gpu_reclaim.stopping import stop_systemd
from gpu_reclaim.taking import LOST
from unit.scenery import LEASE, LOCKS, Host, Scene, Unit, scene
from unit.values import process, said

SGLANG = "sglang.service"
TAKE, KEEP, PROVE = "take the host", "keep the hold", "prove the hold"
BACK = "put back what was stopped"
POLICY = ReclaimPolicy(hold_minutes=60)


def serving(lease_s: float = 900) -> Scene:
    host = Host(
        used=[20_000, 10_000],
        processes=[process(50, unit=SGLANG), process(60, name="train.py")],
        units={SGLANG: Unit(), "gateway.service": Unit(required_by="")},
        memory={50: (0, 20_000), 60: (1, 10_000)},
    )
    return scene(host, units=["sglang"], expected_gpus=2, lease_s=lease_s)


def refused(stage: Scene, policy: ReclaimPolicy = POLICY) -> ReclaimReport:
    with pytest.raises(GpusNotReclaimed) as caught:
        reclaim(stage.session, policy)
    return caught.value.report


def script(stage: Scene, name: str) -> str:
    """The shell text of the one script of that name."""
    return next(x.sections["hold"] for x in stage.direct.asked if x.name == name)


def test_without_a_hold_only_other_runs_are_kept_off() -> None:
    stage = serving()
    report = reclaim(stage.session, ReclaimPolicy())
    assert stage.writes == [f"stop {SGLANG}", "end 1 processes"]
    asked = [x.name for x in stage.direct.asked]
    assert [x.name for x in stage.direct.asked if "hold" in x.sections] == list(LOCKS)
    assert asked.index(LOCKS[0]) < asked.index(f"stop {SGLANG}")
    assert asked[-1] == LOCKS[1]
    assert "OWN='' ORDER='' REST=''" in script(stage, LOCKS[0])
    assert (report.held_until, report.restored, report.restore) == ("", [], "")


def test_held_before_the_stop_and_proven_after_the_last_look() -> None:
    stage = serving()
    report = reclaim(stage.session, POLICY)
    assert stage.writes == [TAKE, f"stop {SGLANG}", "end 1 processes", PROVE]
    assert stage.asked[-2:] == ["verify_nvidia_smi", PROVE]
    assert (report.verdict, report.held_until, report.restored) == (Verdict.CLEAN, "11:00", [])
    assert "TTL=3600\n" in script(stage, PROVE)


def test_while_it_works_the_lease_is_short() -> None:
    stage = serving(lease_s=100)
    reclaim(stage.session, ReclaimPolicy(hold_minutes=600, settle_timeout_s=30, term_grace_s=5))
    text = script(stage, TAKE)
    assert "TTL=135\n" in text
    assert f"OWN={SGLANG} ORDER={SGLANG}" in text
    # Who is of the unit is written down by identity; the script by hand is not its business.
    assert f"REST='rest {SGLANG} 50:500'" in text


def test_what_an_earlier_run_left_is_reported_and_looked_at_anew() -> None:
    stage = serving()
    left = f"owner the dead\nunit {SGLANG} started\n"
    stage.host.holds[TAKE] = f"{left}{LEASE}status taken\n"
    report = reclaim(stage.session, POLICY)
    assert report.leftovers == [RestoredUnit(unit=SGLANG, outcome="started")]
    assert stage.asked[:3] == ["survey", TAKE, "survey"]
    assert f"put back first, of an earlier run: {SGLANG}: started" in str(report)


def test_held_by_another_is_told_and_nothing_is_touched() -> None:
    stage = serving()
    stage.host.holds[TAKE] = f"{LEASE}status held\n"
    report = refused(stage)
    assert report.verdict == Verdict.UNKNOWN
    assert report.summary == "llm: held by me since 10:00 until 11:00; nothing was touched"
    assert "wait until 11:00" in report.remedy
    assert stage.writes == [TAKE]
    assert report.restored == []


@pytest.mark.parametrize(
    ("answer", "summary"),
    [
        ("status unset\n", "the hold cannot be set"),
        ("why systemctl does not show x\nstatus unshown\n", "systemctl does not show x"),
        ("", "makes no sense"),
    ],
)
def test_a_hold_that_cannot_be_had_stops_nothing(answer: str, summary: str) -> None:
    stage = serving()
    stage.host.holds[TAKE] = answer
    report = refused(stage)
    assert summary in report.summary
    assert report.remedy
    assert stage.writes == [TAKE, BACK]
    assert stage.host.units[SGLANG].active == "active"


def test_a_lost_answer_of_the_taking_is_put_back() -> None:
    stage = serving()

    def lose(asked: Script) -> None:
        if asked.name == TAKE:
            raise LinkLost("the link is lost")

    stage.host.hook = lose
    report = refused(stage)
    assert report.summary == "the link is lost"
    assert stage.writes == [TAKE, BACK]
    assert report.restored == [RestoredUnit(unit=SGLANG, outcome="started")]


def test_a_bad_verdict_is_put_back_and_told() -> None:
    stage = serving()
    stage.host.immortal = {60}
    report = refused(stage)
    assert report.verdict == Verdict.UNKILLABLE
    assert stage.writes[-1] == BACK
    assert report.restored == [RestoredUnit(unit=SGLANG, outcome="started")]
    assert f"put back: {SGLANG}: started" in str(report)
    assert report.held_until == ""


def test_what_cannot_be_put_back_now_is_left_to_the_host() -> None:
    stage = serving(lease_s=100)
    stage.host.immortal = {60}

    def cut(asked: Script) -> None:
        if asked.name == BACK:
            raise Unreachable("no answer")

    stage.host.hook = cut
    report = refused(stage)
    assert report.verdict == Verdict.UNKILLABLE
    assert "no answer" in report.restore
    assert "the host does so by itself within" in report.restore


def test_a_start_that_is_not_refused_is_no_hold() -> None:
    stage = serving()
    stage.host.holds[PROVE] = f"broken {SGLANG} active\nstatus broken\n"
    report = refused(stage)
    assert report.verdict == Verdict.UNKNOWN
    assert f"could be started although held: {SGLANG} active" in report.summary
    assert stage.writes[-1] == BACK


def test_a_long_reclaim_keeps_its_lease() -> None:
    stage = serving(lease_s=10)

    def slow(asked: Script) -> None:
        if asked.name == f"stop {SGLANG}":
            stage.clock.now += 60

    stage.host.hook = slow
    policy = ReclaimPolicy(hold_minutes=60, settle_timeout_s=60, term_grace_s=5)
    assert reclaim(stage.session, policy).held_until == "11:00"
    assert stage.writes == [TAKE, f"stop {SGLANG}", KEEP, "end 1 processes", PROVE]


def test_a_lease_that_is_lost_ends_the_run() -> None:
    stage = serving(lease_s=10)
    stage.host.holds[KEEP] = "status lost\n"

    def slow(asked: Script) -> None:
        if asked.name == f"stop {SGLANG}":
            stage.clock.now += 60

    stage.host.hook = slow
    report = refused(stage, ReclaimPolicy(hold_minutes=60, settle_timeout_s=60))
    assert report.verdict == Verdict.UNKNOWN
    assert "no longer ours" in report.summary


def test_no_step_acts_before_the_hold_it_is_asked_for() -> None:
    stage = serving()
    with pytest.raises(BadInput, match="has not taken it"):
        stop_systemd(stage.session, POLICY)
    assert stage.writes == []


def test_a_unit_that_is_not_held_is_not_stopped() -> None:
    stage = serving()
    stage.session.held, stage.session.signed_s = [], stage.clock.now
    outcome = stop_systemd(stage.session, POLICY)
    assert (outcome.stopped, stage.writes) == ([], [])


def test_a_restore_tells_whose_hold_it_ended() -> None:
    stage = serving()
    report = hold.restore(stage.session, everybody=True)
    assert (report.owner, report.complete) == ("me", True)
    assert str(report) == f"llm: put back: 1 of 1 units; no hold is left\n  {SGLANG}: started"


@pytest.mark.parametrize(
    ("answer", "complete", "summary", "advised"),
    [
        ("status nothing\n", True, "nothing to put back", ""),
        ("status other\n", True, "another run holds the host", ""),
        (
            "unit a failed it is failed (failed)\nstatus failed\n",
            False,
            "did not start",
            "journalctl -u a",
        ),
        ("unit a edited\nunit b started\nstatus done\n", True, "left alone", "systemctl start a"),
    ],
)
def test_what_a_restore_says(answer: str, complete: bool, summary: str, advised: str) -> None:
    stage = serving()
    stage.host.holds[BACK] = answer
    report = hold.restore(stage.session)
    assert report.complete is complete
    assert summary in report.summary
    assert advised in report.remedy


# Another run has the host.

LOOK = "look at the hold"
OTHERS = LEASE.replace("owner me", "owner the nightly run")


def busy_until(stage: Scene, at: float, name: str = LOCKS[0]) -> None:
    """Another run has the host until then, by the clock of the scene."""

    def hook(_: Script) -> None:
        busy = stage.clock.now < at
        stage.host.holds[name] = f"{OTHERS}status held\n" if busy else f"{LEASE}status taken\n"
        stage.host.holds[LOOK] = f"{OTHERS}status taken\n" if busy else ""
        stage.host.lease = OTHERS if busy else ""

    stage.host.hook = hook


def waiting(minutes: float, **more: object) -> ReclaimPolicy:
    return ReclaimPolicy.model_validate({"wait_minutes": minutes, **more})


@pytest.mark.parametrize(("minutes", "name"), [(0, LOCKS[0]), (60, TAKE)], ids=["lock", "hold"])
def test_a_host_is_taken_as_soon_as_it_is_free(minutes: float, name: str) -> None:
    stage = serving()
    busy_until(stage, 1061, name)
    report = reclaim(stage.session, waiting(10, hold_minutes=minutes))

    assert report.verdict == Verdict.CLEAN
    asked = [x.name for x in stage.direct.asked]
    assert asked.count(LOOK) == 31
    # Once for the taking, once for the reclaim: what was seen before the wait is of no use.
    free = len(asked) - asked[::-1].index(LOOK)
    assert asked[free : free + 3] == ["survey", name, "survey"]
    assert sum(x for x in stage.clock.sleeps if x == 2) == 62


def test_what_changed_during_the_wait_is_seen() -> None:
    stage = serving()
    busy_until(stage, 1061)
    before = stage.host.hook

    def hook(script: Script) -> None:
        before(script)
        if script.name == LOOK and all(x.pid != 61 for x in stage.host.processes):
            stage.host.processes.append(process(61, name="late.py"))

    stage.host.hook = hook
    report = reclaim(stage.session, waiting(10))

    assert 61 in [row.pid for row in report.ended]


def test_what_became_hopeless_during_the_wait_is_refused_untouched() -> None:
    stage = serving()
    busy_until(stage, 1061)
    before = stage.host.hook

    def hook(script: Script) -> None:
        before(script)
        if script.name == LOOK:
            stage.host.smi_code = 9

    stage.host.hook = hook
    report = refused(stage, waiting(10))

    assert report.verdict == Verdict.DRIVER_FAULT
    assert report.summary.endswith("nothing was touched")
    assert stage.writes == []
    # The lock was had by then, and is given up.
    assert stage.direct.asked[-1].name == LOCKS[1]


def test_what_looks_hopeless_while_another_works_is_waited_for() -> None:
    """Its stage holds memory that nobody is seen to hold; once it is over all is well."""
    stage = serving()
    busy_until(stage, 1061)
    before = stage.host.hook

    def hook(script: Script) -> None:
        before(script)
        stage.host.smi_code = 9 if stage.clock.now < 1061 else 0

    stage.host.hook = hook

    assert reclaim(stage.session, waiting(10)).verdict == Verdict.CLEAN


def test_at_the_end_of_the_wait_it_is_told_who_has_it() -> None:
    stage = serving()
    busy_until(stage, 10_000)
    report = refused(stage, waiting(1))

    assert report.verdict == Verdict.UNKNOWN
    assert report.summary == (
        "llm: held by the nightly run since 10:00 until 11:00; nothing was touched"
    )
    assert "wait until 11:00" in report.remedy
    assert stage.writes == []
    assert stage.clock.now == pytest.approx(1060)
    # What is another's is neither put back nor given up.
    assert LOCKS[1] not in [x.name for x in stage.direct.asked]


def test_somebody_quicker_is_waited_for_too() -> None:
    stage = serving()
    turns = ["held", "held", "taken"]

    def hook(script: Script) -> None:
        if script.name == LOCKS[0]:
            stage.host.holds[LOCKS[0]] = f"{OTHERS}status {turns.pop(0)}\n"

    stage.host.hook = hook

    assert reclaim(stage.session, waiting(1)).verdict == Verdict.CLEAN
    assert turns == []


def test_a_plan_tells_who_has_the_host_and_waits_for_nobody() -> None:
    stage = serving()
    stage.host.lease = OTHERS
    report = reclaim(stage.session, ReclaimPolicy(mode="plan", wait_minutes=10))

    assert report.verdict == Verdict.PLANNED
    assert report.summary.endswith(
        "it would have to wait, for the host is held by the nightly run since 10:00 until 11:00"
    )
    assert (stage.clock.sleeps, stage.writes) == ([], [])
    assert [x.name for x in stage.direct.asked] == ["survey"]


# The lock is given up.


def cut_at(stage: Scene, *names: str) -> None:
    def hook(asked: Script) -> None:
        if asked.name in names:
            raise Unreachable("no answer")

    stage.host.hook = hook


@pytest.mark.parametrize("trouble", ["settle", "stop sglang.service", "immortal", "cancel"])
def test_a_lock_is_given_up_however_the_run_ends(trouble: str) -> None:
    stage = serving()
    cut_at(stage, trouble)
    stage.host.immortal = {60} if trouble == "immortal" else set()

    def cancel(seconds: float) -> None:
        raise KeyboardInterrupt

    if trouble == "cancel":
        stage.session.sleep = cancel
        with pytest.raises(KeyboardInterrupt):
            reclaim(stage.session, ReclaimPolicy())
    else:
        refused(stage, ReclaimPolicy(settle_timeout_s=1))

    assert stage.direct.asked[-1].name == LOCKS[1]
    assert BACK not in stage.asked
    assert not stage.session.locked


def test_a_lock_that_cannot_be_given_up_is_only_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stage = serving(lease_s=100)
    cut_at(stage, LOCKS[1])
    with caplog.at_level(logging.WARNING, "gpu_reclaim"):
        report = reclaim(stage.session, ReclaimPolicy())

    assert report.verdict == Verdict.CLEAN
    assert [x for x in said(caplog) if "lock could not be given up" in x] == [
        "llm: the lock could not be given up (no answer); it is over in 165 s"
    ]


def test_a_host_that_was_never_taken_is_not_given_up() -> None:
    stage = serving()
    stage.host.smi_code = 9
    refused(stage, ReclaimPolicy())

    assert not set(LOCKS) & {x.name for x in stage.direct.asked}


@pytest.mark.parametrize("minutes", [0, 60])
def test_inside_of_another_runs_hold_nothing_is_put_back_or_given_up(minutes: float) -> None:
    """The session has the host already: whoever took it ends that."""
    stage = serving()
    stage.session.locked, stage.session.held = True, [SGLANG]
    stage.session.signed_s = stage.clock.now
    record = Record(stage.session, ReclaimPolicy(hold_minutes=minutes))
    with pytest.raises(LinkLost), put_back_unless_good(record):
        raise LinkLost("gone")
    with put_back_unless_good(record):
        pass

    assert stage.direct.asked == []
    assert (stage.session.locked, stage.session.held) == (True, [SGLANG])


# Putting back over a broken connection.


@pytest.mark.parametrize("times", [1, 3, 7])
def test_putting_back_is_tried_again_over_a_broken_connection(times: int) -> None:
    stage = serving()
    stage.host.immortal = {60}
    left = [Unreachable("no answer")] * times

    def cut(asked: Script) -> None:
        if asked.name == BACK and left:
            raise left.pop()

    stage.host.hook = cut
    report = refused(stage)

    assert report.restored == [RestoredUnit(unit=SGLANG, outcome="started")]
    assert stage.writes.count(BACK) == times + 1
    assert stage.clock.sleeps[-times:] == [1, 2, 4, 8, 15, 15, 15][:times]


def test_after_two_minutes_it_is_left_to_the_host() -> None:
    stage = serving(lease_s=100)
    stage.host.immortal = {60}
    cut_at(stage, BACK)
    report = refused(stage)

    waits = [1, 2, 4, 8, *[15] * 7]
    assert stage.writes.count(BACK) == len(waits) + 1
    assert stage.clock.sleeps[-len(waits) :] == waits
    assert sum(waits) <= PUT_BACK_S < sum(waits) + 15
    assert "could not be put back now (no answer)" in report.restore


def test_who_cancels_waits_for_a_quarter_of_a_minute_alone() -> None:
    stage = serving()
    cut_at(stage, BACK)
    stage.session.held, stage.session.locked = [SGLANG], True
    report = put_back(stage.session, tries=False)

    assert (report.complete, stage.writes) == (False, [BACK] * 5)
    assert stage.clock.sleeps == [1, 2, 4, 8]


def test_an_answer_that_makes_no_sense_is_not_asked_for_again() -> None:
    stage = serving()
    stage.host.holds[BACK] = ""
    report = put_back(stage.session)

    assert (report.complete, stage.writes, stage.clock.sleeps) == (False, [BACK], [])
    assert report.remedy


@pytest.mark.parametrize(
    ("run", "token", "everybody"), [("", "", False), ("", "any", True), ("r1", "run:r1", False)]
)
def test_whose_hold_is_put_back(run: str, token: str, everybody: bool) -> None:
    stage = serving()
    hold.restore(stage.session, everybody=everybody, run=run)

    assert script(stage, BACK).endswith(f"\nrestore {token or stage.session.token}")


def test_who_takes_a_host_is_written_down() -> None:
    stage = serving()
    seen = survey(stage.session, POLICY)
    claiming.take(stage.session, POLICY, seen, Holder("Prefect run x", "http://ui/1", ["r1", "r2"]))
    text = script(stage, TAKE)

    assert "OWNER='Prefect run x'\n" in text
    assert "URL=http://ui/1\n" in text
    assert "RUNS='r1 r2'" in text


@pytest.mark.parametrize("answer", ["", "status busy\n", "unit a started\n"])
def test_a_restore_whose_end_is_not_known_is_an_error(answer: str) -> None:
    stage = serving()
    stage.host.holds[BACK] = answer
    with pytest.raises(BadAnswer):
        hold.restore(stage.session)


@pytest.mark.parametrize("act", [f"stop {SGLANG}", "end 1 processes"])
def test_who_was_held_up_longer_than_its_lease_does_not_act(act: str) -> None:
    """The script itself looks whether the host is still ours."""
    stage = serving()
    carried_out = stage.host.carry_out

    def held_up(script: Script) -> dict[str, str | Section]:
        if script.name != act:
            return carried_out(script)
        (part,) = {"stop", "end"} & set(script.sections)
        assert script.sections[part].index(stage.session.token) < 3000
        rest = {name: body for name, body in script.sections.items() if name != part}
        return {**carried_out(Script(act, rest)), part: Section("lease lost\n", LOST)}

    stage.host.carry_out = held_up  # type: ignore[method-assign]
    report = refused(stage)
    assert "no longer ours" in report.summary


def test_what_a_lost_attempt_put_back_is_told() -> None:
    stage = serving()
    tries: list[str] = []

    def lossy(script: Script) -> None:
        if script.name == "verify_nvidia_smi":
            stage.host.used[0] = 5000
        if script.name == BACK:
            tries.append(script.name)
            stage.host.holds[BACK] = "status nothing\n"
            if len(tries) == 1:
                stage.host.units[SGLANG].active = "active"
                raise LinkLost("ssh: gone")

    stage.host.hook = lossy
    report = refused(stage)
    assert len(tries) == 2
    assert [(x.unit, x.outcome) for x in report.restored] == [(SGLANG, "running")]
    assert f"answer was lost; active again: {SGLANG}" in report.restore


def test_a_host_that_is_busy_is_waited_for_like_one_that_is_held() -> None:
    stage = serving()
    stage.host.holds[TAKE] = "status busy\n"
    report = refused(stage)
    assert "another script has been working at it" in report.summary
    assert stage.writes == [TAKE]
    stage = serving()
    stage.host.holds[TAKE] = "status busy\n"

    def free(script: Script) -> None:
        if stage.clock.now > 1100:
            stage.host.holds.pop(TAKE, None)
        elif script.name == TAKE:
            stage.clock.now += 22

    stage.host.hook = free
    stage.host.holds["look at the hold"] = ""
    report = reclaim(stage.session, POLICY.model_copy(update={"wait_minutes": 5}))
    assert report.verdict == Verdict.CLEAN


def test_a_record_that_was_cut_is_no_success() -> None:
    stage = serving()
    row = "unit (record) failed /var/lib/gpu-reclaim/record was cut\nstatus failed\n"
    stage.host.holds[BACK] = row
    back = hold.restore(stage.session, everybody=True)
    assert not back.complete
    assert back.remedy == "read it on the host, start what ran before, and remove it"
