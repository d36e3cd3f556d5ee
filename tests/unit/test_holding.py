"""Scripts of the hold, under dash and busybox, with a systemctl that only keeps states."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from gpu_reclaim.commands import Section
from gpu_reclaim.holding import parse, restore_order
from gpu_reclaim.models import Lease, UnitState
from gpu_reclaim.restoring import parse_units
from unit.actors import IGNORE_TERM, Stage, alive, identity
from unit.held_host import HeldHost
from unit.shells import stub

A, B = "a.service", r"b@qwen\x2d72b.service"


@pytest.fixture
def host(tools: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HeldHost:
    made = HeldHost(tmp_path)
    monkeypatch.setenv("PATH", f"{made.tools}:{os.environ['PATH']}")
    return made


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_a_hold_leaves_on_the_host(host: HeldHost) -> None:
    host.unit(A, triggers="a.socket a.timer a.path")
    host.unit(B)
    host.unit("idle.service", "inactive")
    host.unit("a.socket")
    host.unit("a.timer")
    host.unit("a.path", "inactive")
    answer = host.take(B, A, "idle.service", owner="it's $(me)\nhere")
    held = sorted([A, B, "a.path", "a.socket", "a.timer", "idle.service"])

    assert answer.status == "taken"
    assert answer.lease is not None
    assert (answer.lease.token, answer.lease.url) == ("t1", "http://run")
    assert answer.lease.owner == "it's $(me)\\nhere"
    assert (mode(host.lease), mode(host.record), mode(host.record.parent)) == (0o644, 0o600, 0o700)
    lines = [line.split() for line in host.record.read_text().splitlines()]
    assert [(x[1], x[2]) for x in lines if x[0] == "unit"] == [
        ("a.socket", "restore"),
        (B, "restore"),
        (A, "restore"),
        ("idle.service", "hold"),
        ("a.timer", "restore"),
        ("a.path", "hold"),
    ]
    folders = sorted(x.name.removesuffix(".d") for x in host.places_of("systemd/system").iterdir())
    assert folders == held
    for name in held:
        text = host.places_of(f"systemd/system/{name}.d/50-gpu-reclaim-hold.conf").read_text()
        assert text == f"[Unit]\nAssertPathExists=!{host.places_of('gpu-reclaim/hold')}\n"
    assert host.state("gpu-reclaim-deadman.timer") == "active"


def test_held_proven_and_put_back(host: HeldHost) -> None:
    host.unit(A, triggers="a.socket a.timer")
    host.unit(B)
    host.unit("a.socket")
    host.unit("a.timer")
    host.take(B, A)
    host.stop(A, B, "a.socket", "a.timer")
    proven = host.prove()
    assert (proven.status, sorted(proven.units)) == ("taken", sorted([A, B, "a.socket", "a.timer"]))
    tried = len(host.started)
    order = ["a.socket", B, A, "a.timer"]
    assert host.restore() == ("done", dict.fromkeys(order, "started"))
    assert host.started[tried:] == order
    assert host.traces == []
    assert host.state("gpu-reclaim-deadman.timer") == "inactive"
    assert host.restore() == ("nothing", {})


def test_another_is_refused_and_sees_who_holds(host: HeldHost) -> None:
    host.unit(A)
    host.take(A, owner="the first")
    before = host.record.read_text(), host.lease.read_text()
    answer = host.take(A, token="t2", owner="the second")
    assert answer.status == "held"
    assert answer.lease is not None
    assert answer.lease.owner == "the first"
    assert answer.lease.since
    assert answer.lease.expires > answer.lease.since
    assert (host.record.read_text(), host.lease.read_text()) == before
    assert host.restore("t2") == ("other", {})
    assert host.renew("t2").status == "lost"
    assert host.prove("t2").status == "lost"


def test_the_same_claim_again_changes_no_record(host: HeldHost) -> None:
    """After a lost answer: by now the unit is down, and the record must still know it."""
    host.unit(A)
    host.take(A)
    before = host.record.read_text()
    host.stop(A)
    again = host.take(A)
    assert (again.status, again.found, again.left_by) == ("taken", [], "")
    assert host.record.read_text() == before


def test_a_broken_off_take_is_begun_anew(host: HeldHost) -> None:
    host.unit(A)
    host.take(A)
    host.places_of("gpu-reclaim/hold").unlink()
    again = host.take(A)
    assert (again.status, again.left_by) == ("taken", "")
    assert host.places_of("gpu-reclaim/hold").exists()


def test_what_a_dead_run_left_comes_back_first(host: HeldHost) -> None:
    host.unit(A)
    host.take(A, owner="the dead")
    host.stop(A)
    host.expire()
    answer = host.take(A, token="t2")
    assert (answer.status, answer.left_by) == ("taken", "the dead")
    assert [(x.unit, x.outcome) for x in answer.found] == [(A, "started")]
    assert answer.lease is not None
    assert answer.lease.token == "t2"
    assert f"unit {A} restore" in host.record.read_text()


def test_a_lease_of_another_boot_holds_nobody_up(host: HeldHost) -> None:
    host.unit(A)
    host.take(A)
    host.lease.write_text(host.lease.read_text().replace("\nboot ", "\nboot another-"))
    assert host.take(A, token="t2").status == "taken"


def test_only_what_we_stopped_is_started(host: HeldHost) -> None:
    """One failed before, one was just stopping, one runs again, one was edited, one is gone."""
    for name in ("runs.service", "edited.service", "gone.service", A):
        host.unit(name)
    host.unit("failed.service", "failed")
    host.unit("stopping.service", "deactivating")
    names = ["runs", "edited", "gone", "failed", "stopping"]
    host.take(*(f"{name}.service" for name in names), A)
    host.stop("edited.service", "gone.service", "stopping.service", A)
    (host.home / "edited.service.file").write_text("another")
    (host.home / "gone.service.file").unlink()
    assert host.restore() == (
        "done",
        {
            "runs.service": "running",
            "edited.service": "edited",
            "gone.service": "gone",
            A: "started",
        },
    )
    assert host.started == [A]
    assert host.state("failed.service") == "failed"
    assert host.traces == []


def test_what_does_not_start_stays_on_the_record_and_is_tried_later(host: HeldHost) -> None:
    host.unit(A)
    host.unit(B)
    host.take(A, B)
    host.stop(A, B)
    (host.home / f"{B}.broken").touch()
    assert host.restore("t1") == ("failed", {A: "started", B: "failed"})
    *_, unit, end = host.record.read_text().splitlines()
    assert (unit.split()[1], end) == (B, "end")
    assert A not in host.record.read_text()
    assert not host.places_of("gpu-reclaim/hold").exists()
    tried = len(host.started)
    assert host.dead_man() == ""
    assert len(host.started) == tried
    host.places_of("gpu-reclaim/retry").write_text("wait 30\nat 1\n")
    assert f"<4>gpu-reclaim: unit {B} failed" in host.dead_man()
    assert "wait 60" in host.places_of("gpu-reclaim/retry").read_text()
    # A new holder takes it over, and its end tries again.
    answer = host.take(A, token="t2")
    assert (answer.status, answer.left_by) == ("taken", "me")
    host.stop(A)
    (host.home / f"{B}.broken").unlink()
    assert host.restore("t2") == ("done", {A: "started", B: "started"})
    assert host.traces == []


def test_the_dead_man_waits_for_the_lease(host: HeldHost) -> None:
    host.unit(A)
    host.take(A)
    host.stop(A)
    assert host.dead_man() == ""
    assert host.state(A) == "inactive"
    host.expire()
    assert f"<4>gpu-reclaim: unit {A} started" in host.dead_man()
    assert host.state(A) == "active"
    assert host.traces == []


def test_a_renewed_lease_is_longer(host: HeldHost) -> None:
    host.unit(A)
    host.take(A, ttl_s=5)
    since = host.read().lease
    assert host.renew().status == "taken"
    now = host.read().lease
    assert since is not None
    assert now is not None
    assert now.expires > since.expires
    assert (now.owner, now.url, now.since) == (since.owner, since.url, since.since)


def test_a_lease_that_is_over_cannot_be_renewed(host: HeldHost) -> None:
    host.unit(A)
    host.take(A)
    host.expire()
    assert host.renew().status == "lost"


def test_a_held_unit_that_starts_is_stopped_again(host: HeldHost) -> None:
    host.unit(A)
    host.take(A)
    host.stop(A)
    host.places_of(f"systemd/system/{A}.d/50-gpu-reclaim-hold.conf").unlink()
    host.places_of(f"systemd/system/{A}.d").rmdir()
    answer = host.prove()
    assert (answer.status, answer.broken) == ("broken", [f"{A} active"])
    assert host.state(A) == "inactive"


@pytest.mark.parametrize("tool", ["systemd-run", "ln"])
def test_nothing_stays_of_a_hold_that_cannot_be_set(host: HeldHost, tool: str) -> None:
    host.unit(A)
    text = (
        "exit 1"
        if tool == "systemd-run"
        else 'case "$*" in *lease*) exit 1;; esac; exec /bin/ln "$@"'
    )
    stub(host.tools, tool, text)
    assert host.take(A).status == "unset"
    assert host.traces == []
    assert host.started == []
    assert host.state(A) == "active"


def test_a_record_that_was_cut_is_kept_and_told(host: HeldHost) -> None:
    """What can be read comes back; what else ran nobody knows, and nobody calls that done."""
    host.unit(A)
    host.unit(B)
    host.take(A, B)
    host.stop(A, B)
    lines = host.record.read_text().splitlines()
    cut = next(number for number, line in enumerate(lines) if line.startswith(f"unit {B}"))
    host.record.write_text("\n".join([*lines[:cut], "unit lab-", ""]))
    status, rows = host.restore()
    assert (status, rows[A], rows["(record)"]) == ("failed", "started", "failed")
    assert host.record.exists()


def test_a_disk_that_is_full_sets_no_hold_and_loses_no_record(host: HeldHost) -> None:
    """Whatever the tools say: what is not there to its last line is not written."""
    host.unit(A)
    stub(host.tools, "tail", "exit 0")
    assert host.take(A).status == "unset"
    assert host.started == []
    (host.tools / "tail").unlink()
    host.take(A)
    host.stop(A)
    (host.home / f"{A}.broken").touch()
    whole = host.record.read_text()
    stub(host.tools, "tail", 'case $* in *.new) ;; *) exec /usr/bin/tail "$@";; esac')
    assert host.restore()[0] == "failed"
    assert host.record.read_text() == whole


def test_two_restores_at_once_start_once(
    tools: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = HeldHost(tmp_path, slow="1")
    monkeypatch.setenv("PATH", f"{host.tools}:{os.environ['PATH']}")
    host.unit(A)
    host.take(A)
    host.stop(A)
    found: list[str] = []
    both = [threading.Thread(target=lambda: found.append(host.restore()[0])) for _ in range(2)]
    for each in both:
        each.start()
    for each in both:
        each.join()
    assert sorted(found) == ["done", "nothing"]
    assert host.started == [A]
    assert host.traces == []


def test_who_outlived_the_stop_is_ended_before_the_start(host: HeldHost, stage: Stage) -> None:
    """By identity alone: pid and start time, as they were chosen before the stop."""
    worker, deaf, other = stage.start(), stage.start(IGNORE_TERM), stage.start()
    rest = [(A, worker, identity(worker).start_time), (A, deaf, identity(deaf).start_time)]
    rest += [(A, other, identity(other).start_time + 1), (A, 999_999_999, 5)]
    host.unit(A)
    host.take(A, rest=rest)
    assert host.restore("t1") == ("done", {A: "running"})
    assert alive(worker)
    host.take(A, rest=rest)
    host.stop(A)
    assert host.restore("t1") == ("done", {A: "started"})
    assert [alive(x) for x in (worker, deaf, other)] == [False, False, True]


def test_the_lock_of_a_dead_script_is_no_obstacle(host: HeldHost) -> None:
    """Its pid may be another's by now: the start time tells."""
    host.unit(A)
    for holder in ("999999999:1", f"{os.getpid()}:1"):
        host.places_of("gpu-reclaim-lock").symlink_to(holder)
        assert host.take(A).status == "taken"
        assert host.restore()[0] == "done"
    assert host.traces == []


def test_reading_an_idle_host(host: HeldHost) -> None:
    answer = host.read()
    assert (answer.status, answer.lease, answer.record) == ("", None, [])
    assert host.traces == []


# A lock alone: no unit is held.


def test_a_lock_alone_writes_no_record_and_holds_nothing(host: HeldHost) -> None:
    host.unit(A)
    answer = host.take()
    assert answer.status == "taken"
    assert answer.lease is not None
    assert (host.record.exists(), host.record.parent.exists()) == (False, False)
    assert [x for x in host.traces if x.startswith("systemd/system/")] == []
    assert host.renew().status == "taken"
    # A host without systemd can be locked too.
    assert not (host.home / "calls").exists()


def test_a_lock_alone_keeps_others_off(host: HeldHost) -> None:
    host.unit(A)
    host.take(owner="the first")
    for names in ((), (A,)):
        answer = host.take(*names, token="t2")
        assert answer.status == "held"
        assert answer.lease is not None
        assert answer.lease.owner == "the first"
    assert host.release("t2").status == "taken"
    assert host.renew().status == "taken"


def test_a_lock_that_is_given_up_leaves_no_trace(host: HeldHost) -> None:
    host.unit(A)
    host.take()
    assert host.release().status == "taken"
    assert host.traces == []
    assert host.renew().status == "lost"
    assert host.release().status == "taken"
    assert host.take(token="t2").status == "taken"


def test_the_dead_man_ends_a_lock_whose_run_is_dead(host: HeldHost) -> None:
    host.unit(A, "inactive")
    host.take()
    assert host.dead_man() == ""
    assert host.lease.exists()
    host.expire()
    host.dead_man()
    assert host.traces == []
    assert host.started == []


def test_the_lock_of_a_dead_run_is_no_obstacle_and_nothing_was_left(host: HeldHost) -> None:
    host.take(owner="the dead")
    host.expire()
    answer = host.take(token="t2")
    assert (answer.status, answer.found) == ("taken", [])


def test_what_could_not_be_started_stays_on_the_record_beyond_a_lock(host: HeldHost) -> None:
    host.unit(A)
    host.take(A, owner="the dead")
    host.stop(A)
    (host.home / f"{A}.broken").touch()
    host.expire()
    answer = host.take(token="t2")
    assert [(x.unit, x.outcome) for x in answer.found] == [(A, "failed")]
    tried = len(host.started)
    assert host.release("t2").status == "taken"
    assert f"unit {A} restore" in host.record.read_text()
    assert host.who() is None
    assert not host.places_of("gpu-reclaim/hold").exists()
    assert [x for x in host.traces if x.startswith("systemd/system/")] == []
    # Not at once: it has just failed. The timer tries again, and is done once it starts.
    assert len(host.started) == tried
    assert host.dead_man() == ""
    (host.home / f"{A}.broken").unlink()
    host.places_of("gpu-reclaim/retry").write_text("wait 30\nat 1\n")
    assert f"unit {A} started" in host.dead_man()
    assert host.traces == []


# Whose hold it is.


def test_a_run_puts_back_only_what_it_took(host: HeldHost) -> None:
    """Its own id, or that of a run around it; no part of one, and no pattern."""
    host.unit(A)
    host.take(A, runs=["run-child", "run-parent"])
    host.stop(A)
    for other in ("run:run-other", "run:run", "run:", "run:*"):
        assert host.restore(other)[0] == "other", other
    assert host.state(A) == "inactive"
    assert host.restore("run:run-parent") == ("done", {A: "started"})
    assert host.traces == []
    assert host.restore("run:run-parent") == ("nothing", {})


def test_a_hold_outside_of_any_run_is_no_runs(host: HeldHost) -> None:
    host.unit(A)
    host.take(A)
    assert host.restore("run:run-1")[0] == "other"
    assert host.renew().status == "taken"


def test_runs_are_on_lease_and_record_and_stay_there(host: HeldHost) -> None:
    host.unit(A)
    host.take(A, runs=["r1", "r2"])
    host.renew()
    assert "\nruns r1 r2\n" in host.lease.read_text()
    assert "\nruns r1 r2\n" in host.record.read_text()
    host.stop(A)
    # After a restart of the host there is no lease any more.
    host.lease.unlink()
    assert host.restore("run:r3")[0] == "other"
    assert host.restore("run:r2") == ("done", {A: "started"})


def test_who_holds_is_told_as_long_as_somebody_does(host: HeldHost) -> None:
    host.unit(A)
    assert host.who() is None
    host.take(A, owner="the first", runs=["r1"])
    lease = host.who()
    assert lease is not None
    assert (lease.owner, lease.url, lease.runs) == ("the first", "http://run", "r1")
    host.expire()
    assert host.who() is None
    assert host.state(A) == "active"


# What the stage started.

STAGE = "gpureclaim.slice"


def slice_calls(host: HeldHost) -> list[str]:
    return [x for x in host.calls if STAGE in x and " show " not in f" {x} "]


@pytest.mark.parametrize("state", ["active", "deactivating"])
def test_what_the_stage_started_is_ended_before_anything_is_started(
    host: HeldHost, state: str
) -> None:
    host.unit(A)
    host.take(A)
    host.stop(A)
    host.unit(STAGE, state)
    assert host.restore("t1")[0] == "done"
    stop = f"--no-ask-password stop -- {STAGE}"
    assert slice_calls(host) == [stop]
    starts = [x for x in host.calls if " start " in x]
    assert host.calls.index(stop) < host.calls.index(starts[-1])
    assert host.state(STAGE) == "inactive"


def test_a_stage_that_does_not_end_is_killed(host: HeldHost) -> None:
    host.unit(A)
    host.take(A)
    host.unit(STAGE)
    (host.home / f"{STAGE}.deaf").touch()
    assert host.restore("t1")[0] == "done"
    stop = f"--no-ask-password stop -- {STAGE}"
    assert slice_calls(host) == [stop, f"kill -s KILL -- {STAGE}", stop]
    assert host.state(STAGE) == "inactive"


def test_without_a_stage_nothing_is_stopped_for_it(host: HeldHost) -> None:
    host.unit(A)
    host.take(A)
    host.restore("t1")
    assert slice_calls(host) == []


def test_the_stage_of_a_dead_run_is_ended_by_the_dead_man_too(host: HeldHost) -> None:
    host.unit(A)
    host.take(A)
    host.stop(A)
    host.unit(STAGE)
    host.expire()
    assert f"unit {A} started" in host.dead_man()
    assert host.state(STAGE) == "inactive"


# Parsers and order.


def test_lines_of_an_answer() -> None:
    answer = parse(
        Section(
            "lease token t\nlease owner me and you\nlease url \nlease since x\nlease junk y\n"
            "owner the dead\nunit a.service started it is still activating (start)\n"
            "unit b.service exploded\nunit\nrefused a.timer\nstatus taken\n",
            0,
        )
    )
    assert answer.status == "taken"
    assert answer.lease == Lease(token="t", owner="me and you", since="x")
    assert [str(x) for x in answer.found] == ["a.service: started (it is still activating (start))"]
    assert (answer.left_by, answer.units) == ("the dead", ["a.timer"])


def test_no_answer_is_no_status() -> None:
    assert parse(Section("", 1)).status == ""
    assert parse_units(Section("sh: 1: systemctl: not found\n", 127)) == []


def unit(name: str, *, after: str = "", required_by: str = "") -> UnitState:
    return UnitState(
        name=name,
        load_state="loaded",
        active_state="active",
        after=after.split(),
        required_by=required_by.split(),
    )


def test_units_come_back_in_the_reverse_of_their_stop() -> None:
    assert restore_order([unit("a"), unit("b"), unit("c")], ["a", "b"]) == ["b", "a", "c"]


def test_whoever_needs_another_comes_after_it() -> None:
    states = [
        unit("a", required_by="gateway"),
        unit("b", after="a basic.target"),
        unit("gateway", required_by="front"),
        unit("front"),
    ]
    assert restore_order(states, ["a", "b"]) == ["a", "b", "gateway", "front"]


def test_a_circle_still_has_an_order() -> None:
    states = [unit("a", required_by="b"), unit("b", required_by="a")]
    assert sorted(restore_order(states, ["a", "b"])) == ["a", "b"]
