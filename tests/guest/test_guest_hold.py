"""A hold on the real guest: nobody starts what is held, and what was stopped comes back."""

from __future__ import annotations

import time

import pytest

from gpu_reclaim import claiming, hold, signals
from gpu_reclaim.commands import Script
from gpu_reclaim.errors import GpusNotReclaimed
from gpu_reclaim.models import ReclaimPolicy, Verdict
from gpu_reclaim.reclaim import reclaim
from guest import holds, units, ways, witness
from guest.ways import UNIT
from lab.lab import Lab
from lab.waiting import wait_until

pytestmark = pytest.mark.lab


def outcomes(report_rows: object) -> dict[str, str]:
    return {row.unit: row.outcome for row in report_rows}  # type: ignore[attr-defined]


def test_what_was_stopped_comes_back_and_nothing_else_changes(lab: Lab) -> None:
    """Socket before service, service before who requires it; the idle, failed and wanted stay."""
    units.add(lab, "lab-idle.service", Service=["ExecStart=/bin/sleep 600"])
    units.add(lab, "lab-broken.service", Service=["ExecStart=/bin/false"])
    units.add(lab, "lab-wanted.service", Service=["ExecStart=/bin/sleep 600"])
    units.drop_in(lab, UNIT, "[Unit]\nWants=lab-wanted.service\n")
    lab.attach("systemctl start lab-broken")
    wait_until("it failed", lambda: holds.is_active(lab, "lab-broken") == ["failed"])
    triggers = holds.add_triggers(lab)
    lab.start_server()
    gateway = holds.add_gateway(lab)
    lab.do("systemctl stop lab-wanted")
    before = holds.running(lab), holds.files(lab)
    names = [UNIT, "lab-idle", "lab-broken"]
    session = ways.session(lab, "hypervisor", units=names)
    report = reclaim(session, holds.policy(via="hypervisor"))
    assert report.verdict == Verdict.CLEAN
    assert report.held_until
    assert f"held until {report.held_until}" in str(report)
    assert set(holds.is_active(lab, UNIT, *triggers, gateway)) == {"inactive"}
    back = hold.restore(ways.session(lab, "hypervisor"), everybody=True)
    assert back.complete
    socket, timer, path = triggers
    came = [row.unit for row in back.restored if row.outcome == "started"]
    assert came[:3] == [socket, UNIT, gateway]
    assert set(came[3:]) == {timer, path}
    lab.wait_ready()
    assert holds.running(lab) == before[0]
    assert holds.files(lab) ^ before[1] == set()
    assert holds.traces(lab) == []
    assert len(lab.server_pids()) == 6


def test_a_second_restore_has_nothing_to_do(lab: Lab) -> None:
    lab.start_server()
    holds.held(lab)
    session = ways.session(lab)
    assert outcomes(hold.restore(session, everybody=True).restored) == {UNIT: "started"}
    pids = lab.server_pids()
    again = hold.restore(session, everybody=True)
    assert (again.restored, again.complete) == ([], True)
    assert "nothing to put back" in again.summary
    assert lab.server_pids() == pids


def test_no_way_leads_to_a_held_unit(lab: Lab) -> None:
    """By hand, by its own triggers, by new ones, and by a unit that needs it."""
    triggers = holds.add_triggers(lab)
    lab.start_server()
    units.add(
        lab,
        "lab-other.service",
        Unit=[f"Requires={UNIT}", f"After={UNIT}"],
        Service=["ExecStart=/bin/sleep 600"],
    )
    units.add(
        lab,
        "lab-weak.service",
        Unit=[f"Wants={UNIT}"],
        Service=["ExecStart=/bin/sleep 600"],
    )
    for kind, rule in (
        ("timer", ["OnActiveSec=0", "AccuracySec=10ms"]),
        ("path", ["PathExists=/run"]),
        ("socket", ["ListenStream=/run/lab-new.sock"]),
    ):
        section = kind.capitalize()
        name = "Service" if kind == "socket" else "Unit"
        units.add(lab, f"lab-new.{kind}", **{section: [*rule, f"{name}={UNIT}"]})
    holds.held(lab)
    for name in [UNIT, *triggers, "lab-other.service"]:
        code, state = holds.start(lab, name)
        assert (code != 0, state) == (True, "inactive"), name
    for name in ("lab-weak.service", "lab-new.timer", "lab-new.path", "lab-new.socket"):
        lab.attach(f"systemctl start {name}")
    lab.attach(f"systemctl restart {UNIT}; systemctl try-restart {UNIT}; touch /run/lab-qwen.start")
    lab.attach(
        'timeout 2 python3 -c "import socket; s = socket.socket(socket.AF_UNIX); '
        "s.connect('/run/lab-new.sock')\""
    )
    time.sleep(1)
    assert lab.server_pids() == {}
    assert witness.memory(lab) == [0, 0, 0, 0]
    lab.do("systemctl stop lab-weak lab-new.timer lab-new.path lab-new.socket")
    lab.do("rm -f /run/lab-qwen.start")
    # So many refused starts make systemd itself refuse the next one; not the restore's.
    assert outcomes(hold.restore(ways.session(lab), everybody=True).restored)[UNIT] == "started"


def test_the_host_puts_everything_back_when_its_client_is_gone(lab: Lab) -> None:
    triggers = holds.add_triggers(lab)
    lab.start_server()
    gateway = holds.add_gateway(lab)
    holds.held(lab, minutes=0.05)
    assert witness.state_of(lab) == "inactive"
    holds.wait_back(lab, UNIT, gateway, *triggers)


def test_a_second_taker_is_told_who_holds(lab: Lab) -> None:
    lab.start_server()
    report = holds.held(lab)
    with pytest.raises(GpusNotReclaimed) as caught:
        holds.held(lab)
    second = caught.value.report
    assert second.verdict == Verdict.UNKNOWN
    assert f"held by {claiming.default_owner()} since " in second.summary
    assert f"until {report.held_until}; nothing was touched" in second.summary
    assert "restore-services" in second.remedy
    assert (second.stopped, second.ended, second.restored) == ([], [], [])
    assert hold.read(ways.session(lab)).status == "taken"
    assert holds.start(lab, UNIT) == (1, "inactive")


def test_a_reclaim_without_a_hold_keeps_off_a_held_host(lab: Lab) -> None:
    lab.start_server()
    holds.held(lab)
    with pytest.raises(GpusNotReclaimed, match=f"held by {claiming.default_owner()} since "):
        reclaim(ways.session(lab), ReclaimPolicy(**holds.QUICK))
    assert hold.read(ways.session(lab)).status == "taken"
    hold.restore(ways.session(lab), everybody=True)
    assert reclaim(ways.session(lab), ReclaimPolicy(**holds.QUICK)).verdict == Verdict.CLEAN
    assert holds.traces(lab) == []


def test_the_next_run_repairs_what_a_dead_one_left(lab: Lab) -> None:
    """The dead-man timer is gone too, as after a restart of the guest."""
    triggers = holds.add_triggers(lab)
    lab.start_server()
    holds.held(lab)
    lab.do("systemctl stop gpu-reclaim-deadman.timer")
    holds.expire(lab)
    report = holds.held(lab)
    assert outcomes(report.leftovers) == dict.fromkeys(
        [triggers[0], UNIT, *triggers[1:]], "started"
    )
    assert report.verdict == Verdict.CLEAN
    assert [row.unit for row in report.stopped] == [UNIT]
    back = hold.restore(ways.session(lab), everybody=True)
    assert set(outcomes(back.restored)) == {UNIT, *triggers}
    assert holds.traces(lab) == []


def test_what_others_did_meanwhile_stays(lab: Lab) -> None:
    """One was started (the hold removed by hand), one edited, one removed, one is transient."""
    names = [f"lab-{word}.service" for word in ("edited", "removed", "plain")]
    for name in names:
        units.add(lab, name, Service=["ExecStart=/bin/sleep 600"])
    lab.do(f"systemctl start {' '.join(names)}")
    lab.do("systemd-run --quiet --unit=lab-transient sleep 600")
    lab.start_server()
    holds.held(lab, units=[UNIT, *names, "lab-transient"])
    lab.do("rm /run/gpu-reclaim/hold")
    lab.start_server()
    pids = lab.server_pids()
    edited = lab.guest.rootfs / units.FOLDER / names[0]
    edited.write_text(edited.read_text() + "Nice=5\n")
    (lab.guest.rootfs / units.FOLDER / names[1]).unlink()
    lab.do("systemctl daemon-reload")
    back = hold.restore(ways.session(lab), everybody=True)
    assert outcomes(back.restored) == {
        UNIT: "running",
        "lab-edited.service": "edited",
        "lab-removed.service": "gone",
        "lab-plain.service": "started",
        "lab-transient.service": "gone",
    }
    assert lab.server_pids() == pids
    assert "systemctl start" in back.remedy
    assert holds.is_active(lab, *names) == ["inactive", "inactive", "active"]
    assert holds.traces(lab) == []


@pytest.mark.exhaustive
def test_a_unit_that_does_not_start_stays_on_the_record(lab: Lab) -> None:
    """The others come back, the host tries again at longer intervals, and the next run too."""
    script = lab.guest.rootfs / "run/lab-fragile"
    script.write_text("#!/bin/sh\n[ ! -e /run/lab-broken ] || exit 1\nexec sleep 600\n")
    units.add(
        lab,
        "lab-fragile.service",
        Service=["ExecStart=/bin/sh /run/lab-fragile", "Restart=no"],
    )
    lab.do("systemctl start lab-fragile")
    lab.start_server()
    holds.held(lab, units=[UNIT, "lab-fragile"])
    lab.do("touch /run/lab-broken")
    back = hold.restore(ways.session(lab), everybody=True)
    assert not back.complete
    assert outcomes(back.restored) == {UNIT: "started", "lab-fragile.service": "failed"}
    assert "journalctl -u lab-fragile.service" in back.remedy
    ran = "systemctl show -p NRestarts,InvocationID --value lab-fragile"
    once = lab.do(ran)
    time.sleep(11)
    assert lab.do(ran) == once
    report = holds.held(lab)
    assert outcomes(report.leftovers) == {"lab-fragile.service": "failed"}
    lab.do("rm /run/lab-broken")
    again = hold.restore(ways.session(lab), everybody=True)
    assert outcomes(again.restored) == {UNIT: "started", "lab-fragile.service": "started"}
    assert holds.traces(lab) == []


def test_a_bad_verdict_puts_back_at_once(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "KILL_WAIT_S", 1)
    lab.start_server()
    pid = lab.hold("--gpus", "0", "--mib", "500", "--ignore-term")
    lab.freeze(pid)
    with pytest.raises(GpusNotReclaimed) as caught:
        holds.held(lab)
    report = caught.value.report
    lab.thaw()
    assert report.verdict == Verdict.UNKILLABLE
    assert outcomes(report.restored) == {UNIT: "started"}
    assert f"put back: {UNIT}: started" in str(report)
    assert holds.traces(lab) == []


class Cancelled(BaseException):
    """As a signal would raise it."""


@pytest.mark.parametrize("step", ["stop sglang-qwen.service", "fuser_release", "prove the hold"])
def test_a_cancelled_run_puts_back_at_once(lab: Lab, step: str) -> None:
    lab.start_server()
    links = ways.links(lab)
    run = links.run

    def cut(script: Script) -> object:
        result = run(script)
        if script.name == step:
            raise Cancelled
        return result

    links.run = cut  # type: ignore[method-assign,assignment]
    with pytest.raises(Cancelled):
        holds.held(lab, ways=links)
    assert witness.state_of(lab) == "active"
    assert holds.traces(lab) == []


@pytest.mark.parametrize("act", [f"stop {UNIT}", "end 5 processes"])
def test_who_is_held_up_for_longer_than_its_lease_does_not_act(lab: Lab, act: str) -> None:
    """As a suspended machine would be: the host has put back everything meanwhile."""
    lab.start_server()
    links = ways.links(lab)
    run = links.run
    back: list[int] = []

    def held_up(script: Script) -> object:
        if script.name == act:
            holds.expire(lab)
            holds.wait_back(lab, UNIT)
            lab.wait_ready()
            back.extend(lab.server_pids().values())
        return run(script)

    links.run = held_up  # type: ignore[method-assign,assignment]
    with pytest.raises(GpusNotReclaimed) as caught:
        holds.held(lab, ways=links)
    assert "no longer ours" in caught.value.report.summary
    assert sorted(lab.server_pids().values()) == sorted(back)
    assert witness.state_of(lab) == "active"
    assert holds.traces(lab) == []


def test_a_held_unit_that_can_be_started_is_no_hold(lab: Lab) -> None:
    """A later drop-in takes the assertion back."""
    lab.start_server()
    units.drop_in(lab, UNIT, "[Unit]\nAssertPathExists=\n")
    folder = lab.guest.rootfs / units.FOLDER / f"{UNIT}.d"
    (folder / "test.conf").rename(folder / "99-later.conf")
    lab.do("systemctl daemon-reload")
    with pytest.raises(GpusNotReclaimed) as caught:
        holds.held(lab)
    report = caught.value.report
    assert report.verdict == Verdict.UNKNOWN
    assert f"could be started although held: {UNIT}" in report.summary
    assert outcomes(report.restored) == {UNIT: "started"}
    assert holds.traces(lab) == []


def test_after_a_restart_the_record_is_still_there(lab: Lab) -> None:
    """As a restart leaves it: /run is empty, the record is of another boot, units are down."""
    triggers = holds.add_triggers(lab)
    lab.start_server()
    holds.held(lab)
    lab.do(
        "systemctl stop gpu-reclaim-deadman.timer; rm -rf /run/gpu-reclaim\n"
        "find /run/systemd/system -name '*gpu-reclaim*' -delete\n"
        "find /run/systemd/system -mindepth 1 -type d -empty -delete\n"
        f"systemctl daemon-reload; sed -i 's/^boot .*/boot another/' {holds.RECORD}"
    )
    assert hold.read(ways.session(lab)).record
    back = hold.restore(ways.session(lab), everybody=True)
    assert outcomes(back.restored) == dict.fromkeys([triggers[0], UNIT, *triggers[1:]], "started")
    assert holds.traces(lab) == []


def test_after_a_real_restart_what_was_not_enabled_comes_back_too(lab: Lab) -> None:
    """A container keeps the machine's boot id; the enabled unit comes back by itself, once."""
    units.add(
        lab,
        "lab-enabled.service",
        Service=["ExecStart=/bin/sleep 600"],
        Install=["WantedBy=multi-user.target"],
    )
    lab.do("systemctl enable --quiet --now lab-enabled")
    triggers = holds.add_triggers(lab)
    lab.start_server()
    holds.held(lab, units=[UNIT, "lab-enabled"])
    lab.guest.restart()
    assert holds.is_active(lab, "lab-enabled", UNIT) == ["active", "inactive"]
    back = hold.restore(ways.session(lab), everybody=True)
    assert outcomes(back.restored) == {
        "lab-enabled.service": "running",
        **dict.fromkeys([triggers[0], UNIT, *triggers[1:]], "started"),
    }
    lab.wait_ready()
    assert holds.traces(lab) == []
    lab.do("systemctl disable --quiet --now lab-enabled")


def test_a_plan_says_that_it_would_hold(lab: Lab) -> None:
    lab.start_server()
    with witness.untouched(lab):
        report = reclaim(ways.session(lab), holds.policy(30, mode="plan"))
    assert "and hold the host for 30 minutes" in report.summary
    assert holds.traces(lab) == []
