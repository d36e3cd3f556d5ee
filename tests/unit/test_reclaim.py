"""A whole reclaim over a host in memory: the report, whatever happens."""

from __future__ import annotations

import pytest

from gpu_reclaim.commands import Script, Section
from gpu_reclaim.errors import (
    BadInput,
    GpuReclaimError,
    GpusNotReclaimed,
    GuestLocked,
    IdentityMismatch,
    LinkLost,
    Unreachable,
)
from gpu_reclaim.models import ReclaimPolicy, ReclaimReport, StoppedUnit, Verdict
from gpu_reclaim.reclaim import conclude, plan, reclaim
from gpu_reclaim.record import Record
from gpu_reclaim.steps import survey
from gpu_reclaim.stopping import stop_systemd
from gpu_reclaim.transport.links import Links
from gpu_reclaim.transport.scripted import Answer, ScriptedTransport
from gpu_reclaim.verifying import verify
from unit.scenery import Host, Scene, Unit, scan_text, scene
from unit.values import process

POLICY = ReclaimPolicy()
SGLANG = "sglang.service"


def server() -> Scene:
    """A unit with two workers, a script by hand, and somebody protected."""
    host = Host(
        used=[30_000, 10_000],
        processes=[
            process(50, unit=SGLANG),
            process(51, unit=SGLANG),
            process(60, name="train.py", command_line="train.py"),
            process(70, exe="/usr/bin/nvidia-persistenced", comm="nvidia-persiste"),
        ],
        units={SGLANG: Unit()},
        memory={50: (0, 20_000), 51: (0, 10_000), 60: (1, 10_000)},
    )
    return scene(host, units=["sglang"], expected_gpus=2)


def refused(stage: Scene, policy: ReclaimPolicy = POLICY) -> ReclaimReport:
    with pytest.raises(GpusNotReclaimed) as caught:
        reclaim(stage.session, policy)
    assert caught.value.report.remedy
    return caught.value.report


def test_a_reclaim_from_the_first_look_to_the_report() -> None:
    stage = server()
    report = reclaim(stage.session, POLICY)

    assert report.verdict == Verdict.CLEAN
    assert [gpu.memory_used_mib for gpu in report.gpus_before] == [30_000, 10_000]
    assert [gpu.memory_used_mib for gpu in report.gpus_after] == [0, 0]
    assert report.stopped == [StoppedUnit(unit=SGLANG)]
    assert {(row.pid, row.signal, row.outcome) for row in report.ended} == {
        (50, "systemctl stop", "ended"),
        (51, "systemctl stop", "ended"),
        (60, "TERM", "ended"),
    }
    assert [(row.pid, row.name) for row in report.spared] == [(70, "sglang::scheduler")]
    assert [step.name for step in report.steps] == [
        "survey",
        "stop_systemd",
        "proxmox_exec_kill",
        "fuser_release",
        "settle",
        "verify_nvidia_smi",
    ]
    assert report.seconds == pytest.approx(sum(stage.clock.sleeps), abs=0.001)
    assert stage.writes == [f"stop {SGLANG}", "end 1 processes"]


def test_a_reclaim_of_a_free_host_writes_nothing() -> None:
    stage = scene(Host(used=[0, 0]), expected_gpus=2)
    report = reclaim(stage.session, POLICY)

    assert report.verdict == Verdict.CLEAN
    assert stage.writes == []


def test_a_reclaim_of_some_gpus_leaves_the_others_alone() -> None:
    stage = server()
    report = reclaim(stage.session, ReclaimPolicy(gpus=[1]))

    assert report.verdict == Verdict.CLEAN
    assert report.stopped == []
    assert [row.pid for row in report.ended] == [60]
    assert stage.host.units[SGLANG].active == "active"
    assert stage.host.used == [30_000, 0]


def test_a_process_that_matches_is_ended_though_it_holds_no_gpu() -> None:
    stage = server()
    stage.host.processes.append(process(80, holds=False, command_line="agent.py"))
    report = reclaim(stage.session, ReclaimPolicy(match=[r"agent\.py"]))

    assert 80 in [row.pid for row in report.ended]


# Plans.


def test_a_plan_says_what_would_be_done_and_touches_nothing() -> None:
    stage = server()
    report = reclaim(stage.session, ReclaimPolicy(mode="plan"))

    assert report.verdict == Verdict.PLANNED
    assert report.stopped == [StoppedUnit(unit=SGLANG)]
    assert {(row.pid, row.outcome, row.signal) for row in report.ended} == {
        (50, "planned", ""),
        (51, "planned", ""),
        (60, "planned", ""),
    }
    assert [row.pid for row in report.spared] == [70]
    assert f"would stop {SGLANG} and end 3 processes" in report.summary
    assert stage.asked == ["survey"]
    assert stage.writes == []
    assert len(stage.host.processes) == 4


def test_a_plan_for_some_gpus_names_only_their_units() -> None:
    report = reclaim(server().session, ReclaimPolicy(mode="plan", gpus=[1]))

    assert report.stopped == []
    assert [row.pid for row in report.ended] == [60]
    assert "stop no unit" in report.summary


def test_a_plan_on_a_host_whose_nvidia_smi_fails_is_no_plan() -> None:
    stage = server()
    stage.host.smi_code = 9
    report = refused(stage, ReclaimPolicy(mode="plan"))

    assert report.verdict == Verdict.DRIVER_FAULT
    assert stage.writes == []


# What may go wrong.


def test_a_failing_nvidia_smi_at_the_end_is_never_clean() -> None:
    stage = server()

    def hook(script: Script) -> None:
        stage.host.smi_code = 9 if script.name in ("settle", "verify_nvidia_smi") else 0

    stage.host.hook = hook

    assert refused(stage).verdict == Verdict.DRIVER_FAULT


def test_a_gpu_that_vanishes_on_the_way_is_missing() -> None:
    stage = server()

    def hook(script: Script) -> None:
        if script.name == "settle":
            stage.host.used = [0]

    stage.host.hook = hook

    assert refused(stage).verdict == Verdict.GPU_MISSING


def test_fewer_gpus_than_expected_are_missing() -> None:
    assert refused(scene(Host(used=[0]), expected_gpus=2)).verdict == Verdict.GPU_MISSING


def test_a_holder_that_does_not_die_is_unkillable() -> None:
    stage = server()
    stage.host.immortal = {60}
    report = refused(stage, ReclaimPolicy(settle_timeout_s=5))

    assert report.verdict == Verdict.UNKILLABLE
    assert "nvidia_close" in report.summary
    assert next(row for row in report.ended if row.pid == 60).outcome == "D"
    assert report.stopped == [StoppedUnit(unit=SGLANG)]


def test_a_holder_that_comes_back_is_respawned() -> None:
    stage = server()

    def hook(script: Script) -> None:
        if script.name == "settle" and all(x.pid != 61 for x in stage.host.processes):
            stage.host.processes.append(process(61, unit="ollama.service"))

    stage.host.hook = hook
    report = refused(stage)

    assert report.verdict == Verdict.RESPAWNED
    assert "systemctl stop ollama.service" in report.remedy


def test_memory_held_in_another_guest_is_told() -> None:
    host = Host(used=[900])
    node = ScriptedTransport(
        lambda script: {
            "pct": Section("pct status: running\n", 0),
            "processes": scan_text([process(71, cgroups=["/lxc/130/ns"])]),
        }
    )
    links = Links(ScriptedTransport(host.answer), node=node)
    report = refused(scene(host, links=links, vmid=129), ReclaimPolicy(settle_timeout_s=1))

    assert report.verdict == Verdict.HELD_BY_OTHER_GUEST
    assert "guest 130" in report.summary


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (Unreachable("ssh: no route", remedy="check the cable"), Verdict.UNREACHABLE),
        (LinkLost("ssh: lost"), Verdict.UNKNOWN),
        (IdentityMismatch("ssh: another machine"), Verdict.IDENTITY_MISMATCH),
        (GuestLocked("pve: backup"), Verdict.GUEST_LOCKED),
    ],
)
@pytest.mark.parametrize("step", ["survey", "stop", "fuser_release", "end", "settle", "verify"])
def test_an_error_in_any_step_becomes_a_verdict_with_the_report_so_far(
    error: GpuReclaimError, verdict: Verdict, step: str
) -> None:
    stage = server()

    def hook(script: Script) -> None:
        if script.name.startswith(step):
            raise error

    stage.host.hook = hook
    report = refused(stage)

    assert report.verdict == verdict
    assert report.summary.startswith(error.message)
    assert ("earlier steps" in report.summary) is bool(report.stopped or report.ended)
    assert bool(report.gpus_before) is (step != "survey")
    # What was done is looked up afterwards, also where the step's own answer is lost.
    assert bool(report.stopped) is (step in ("fuser_release", "end", "settle", "verify"))
    assert bool(report.gpus_after) is (step != "survey")


def test_the_error_behind_a_verdict_is_kept() -> None:
    stage = server()
    error = LinkLost("ssh: lost")

    def hook(_: Script) -> None:
        raise error

    stage.host.hook = hook
    with pytest.raises(GpusNotReclaimed) as caught:
        reclaim(stage.session, POLICY)

    assert caught.value.__context__ is error


def test_bad_input_comes_as_it_is() -> None:
    stage = server()
    with pytest.raises(BadInput, match="no GPU 7"):
        reclaim(stage.session, ReclaimPolicy(gpus=[7]))

    assert stage.writes == []


@pytest.mark.parametrize("way", ["good", "bad", "refused"])
def test_the_connections_are_closed_however_it_ends(way: str) -> None:
    closed: list[str] = []

    class Closing(ScriptedTransport):
        def close(self) -> None:
            closed.append(self.name)

    host = Host(used=[0] if way != "bad" else [900])

    def answer(script: Script) -> Answer:
        return host.answer(script) if way != "refused" else Unreachable("away")

    made = scene(host, links=Links(Closing(answer, name="direct")))
    if way == "good":
        reclaim(made.session, POLICY)
    else:
        refused(made, ReclaimPolicy(settle_timeout_s=0))

    assert closed == ["direct"]


# The record.


def test_nothing_is_concluded_without_a_last_look() -> None:
    record = Record(server().session, POLICY)
    with pytest.raises(BadInput):
        conclude(record)
    with pytest.raises(BadInput):
        plan(record)


def test_a_report_holds_no_command_line() -> None:
    stage = server()
    stage.host.processes[2] = process(60, name="x.py", command_line="x.py --token=s3cret")
    report = reclaim(stage.session, POLICY)

    assert "s3cret" not in report.model_dump_json()
    assert "s3cret" not in str(report)


# What a hostile reading found.


def reclaimed(stage: Scene, policy: ReclaimPolicy = POLICY) -> ReclaimReport:
    """The report, whatever the verdict."""
    try:
        return reclaim(stage.session, policy)
    except GpusNotReclaimed as error:
        return error.report


def test_one_that_survives_its_kill_is_told_though_it_holds_nothing_any_more() -> None:
    """In state D its descriptors may be gone before it is."""
    host = Host(used=[0], processes=[process(50)], immortal={50})

    def hook(script: Script) -> None:
        if script.name == "settle":
            host.processes = [process(50, holds=False, state="D")]

    host.hook = hook
    report = reclaimed(scene(host))

    assert report.verdict == Verdict.UNKILLABLE
    assert "still there after KILL: sglang::scheduler (pid 50" in report.summary


def test_a_unit_that_holds_this_very_run_is_refused() -> None:
    host = Host(used=[0], units={SGLANG: Unit()})
    host.processes = [process(900, unit=SGLANG, holds=False)]
    stage = scene(host, units=["sglang"])

    with pytest.raises(BadInput, match=r"this run is part of sglang\.service"):
        reclaim(stage.session, POLICY)
    assert stage.writes == []


@pytest.mark.parametrize("mode", ["reclaim", "plan"])
def test_a_protected_unit_that_would_stop_along_is_refused(mode: str) -> None:
    units = {SGLANG: Unit(required_by="worker.service"), "worker.service": Unit()}
    stage = scene(Host(used=[0], units=units), units=["sglang"], protect=["worker*"])

    with pytest.raises(BadInput, match=r"would stop worker\.service along"):
        reclaim(stage.session, ReclaimPolicy.model_validate({"mode": mode}))
    assert stage.writes == []


def test_what_stops_along_is_planned_and_reported() -> None:
    units = {
        SGLANG: Unit(required_by="worker.service", triggers="a.timer b.timer"),
        "worker.service": Unit(),
        "a.timer": Unit(),
        "b.timer": Unit(active="inactive"),
    }
    stage = scene(Host(used=[0], units=units), units=["sglang"])
    planned = reclaim(stage.session, ReclaimPolicy(mode="plan")).stopped
    done = reclaim(stage.session, POLICY).stopped

    assert planned == done
    assert [(x.unit, x.triggered_by, x.because) for x in done] == [
        (SGLANG, ["a.timer"], ""),
        ("worker.service", [], f"systemd stops it along with {SGLANG}"),
    ]


def test_a_protection_by_an_alias_is_one() -> None:
    host = Host(used=[0], units={SGLANG: Unit(names="llm.service")})
    stage = scene(host, units=["sglang"], protect=["llm.service"])
    report = reclaim(stage.session, POLICY)

    assert report.stopped == []
    assert host.units[SGLANG].active == "active"


def test_an_owner_that_systemd_does_not_show_is_unknown() -> None:
    host = Host(used=[900], processes=[process(50, unit="x.service")], memory={50: (0, 900)})
    host.units = {"x.service": Unit()}
    stage = scene(host)
    answer = stage.direct.handler

    def mute(script: Script) -> Answer:
        failed: Answer = {"units": Section("Failed to connect to bus", 1)}
        return failed if script.name == "look at the owners" else answer(script)

    stage.direct.handler = mute
    report = reclaimed(stage)

    assert report.verdict == Verdict.UNKNOWN
    assert "whether they come back is unknown" in report.summary


def test_a_unit_stopped_by_an_attempt_whose_answer_was_lost_must_stay_down() -> None:
    """With some GPUs wanted, nothing tells any more that it was on one of them."""
    host = Host(
        used=[900],
        processes=[process(50, unit=SGLANG)],
        memory={50: (0, 900)},
        units={SGLANG: Unit()},
    )
    stage = scene(host, units=["sglang"])
    policy = ReclaimPolicy(gpus=[0])
    record = Record(stage.session, policy)
    record.surveyed(survey(stage.session, policy))
    before = record.before.units if record.before else []

    def lose(script: Script) -> None:
        if script.writes:
            host.hook = lambda _: None
            host.carry_out(script)
            raise LinkLost("gone")

    host.hook = lose
    with pytest.raises(LinkLost):
        stop_systemd(stage.session, policy, before)
    record.did(stop_systemd(stage.session, policy, before))
    host.units[SGLANG].active = "active"
    record.verified(verify(stage.session, policy))

    assert conclude(record).verdict == Verdict.RESPAWNED


def test_a_container_that_a_stopped_unit_runs_is_no_reason_to_refuse() -> None:
    inside = process(50, cgroups=[f"/system.slice/docker-{'0f' * 32}.scope"])
    host = Host(used=[900], processes=[inside], memory={50: (0, 900)}, units={SGLANG: Unit()})

    def hook(script: Script) -> None:
        if script.name.startswith("stop "):
            host.gone(50)

    host.hook = hook
    stage = scene(host, units=["sglang"])

    assert reclaim(stage.session, POLICY).verdict == Verdict.CLEAN


def test_a_unit_whose_file_is_gone_while_it_runs_is_known() -> None:
    host = Host(used=[0], units={SGLANG: Unit(load="not-found")})
    report = reclaim(scene(host, units=["sglang"]).session, POLICY)

    assert [row.unit for row in report.stopped] == [SGLANG]


def test_mps_that_quit_is_not_spared_too() -> None:
    server = process(60, exe="/usr/bin/nvidia-cuda-mps-server", name="nvidia-cuda-mps-server")
    host = Host(used=[900], processes=[server], memory={60: (0, 900)}, mps="mps ended 60\n")

    def hook(script: Script) -> None:
        if script.name == "ask MPS to quit":
            host.gone(60)

    host.hook = hook
    report = reclaim(scene(host).session, POLICY)

    assert [(row.pid, row.signal) for row in report.ended] == [(60, "quit")]
    assert report.spared == []


def test_a_second_reclaim_starts_anew() -> None:
    host = Host(used=[900], processes=[process(50, unit="x.service")], memory={50: (0, 900)})
    host.units = {"x.service": Unit(), SGLANG: Unit(), "nvidia-dcgm.service": Unit()}
    stage = scene(host, units=["sglang"])
    first = reclaim(stage.session, ReclaimPolicy(match=["nvidia-dcgm.service"]))
    for unit in host.units.values():
        unit.active = "active"
    second = reclaim(stage.session, ReclaimPolicy(mode="plan"))

    assert [row.unit for row in first.stopped] == [SGLANG, "nvidia-dcgm.service"]
    assert [row.unit for row in second.stopped] == [SGLANG]
    assert stage.session.units == [SGLANG]


def test_a_unit_that_was_down_and_is_started_meanwhile_is_no_free_host() -> None:
    host = Host(used=[0], units={SGLANG: Unit(active="inactive")})

    def hook(script: Script) -> None:
        if script.name == "settle":
            host.units[SGLANG].active = "active"

    host.hook = hook

    assert reclaimed(scene(host, units=["sglang"])).verdict == Verdict.RESPAWNED


def test_a_transient_unit_that_is_gone_by_now_keeps_no_other_from_being_stopped() -> None:
    units = {SGLANG: Unit(), "run-1.service": Unit()}
    host = Host(used=[900], processes=[process(50, unit=SGLANG)], memory={50: (0, 900)})
    host.units = units
    stage = scene(host, units=["sglang", "run-1"])

    def hook(script: Script) -> None:
        if script.writes:
            units.pop("run-1.service", None)

    host.hook = hook
    report = reclaimed(stage)

    assert report.verdict == Verdict.CLEAN
    assert SGLANG in [row.unit for row in report.stopped]


@pytest.mark.parametrize("mode", ["plan", "reclaim"])
def test_where_nobody_tells_who_uses_which_gpu_it_is_refused_first(mode: str) -> None:
    """As in most containers: nvidia-smi lists no process, and some GPUs are wanted."""
    host = Host(used=[900, 900], processes=[process(50, unit=SGLANG)], units={SGLANG: Unit()})
    stage = scene(host, units=["sglang"])
    report = refused(stage, ReclaimPolicy.model_validate({"gpus": [0], "mode": mode}))

    assert report.verdict == Verdict.HELD_UNSEEN
    assert "sglang::scheduler (pid 50" in report.summary
    assert report.summary.endswith("nothing was touched")
    assert stage.clock.sleeps == []


def test_the_report_for_a_terminal() -> None:
    host = Host(used=[900], processes=[process(50, cgroups=["/"])], immortal={50})
    lines = str(refused(scene(host))).split("\n")

    assert lines[-1] == (
        "  still there (state D) after KILL: sglang::scheduler (pid 50, holds /dev/nvidia0 (fd))"
    )


def test_a_unit_whose_end_would_power_the_machine_off_is_refused() -> None:
    host = Host(used=[0], units={SGLANG: Unit(more="SuccessAction=poweroff\nFailureAction=none")})
    stage = scene(host, units=["sglang"])

    with pytest.raises(BadInput, match=r"when sglang\.service ends, systemd would poweroff"):
        reclaim(stage.session, ReclaimPolicy(mode="plan"))


def test_a_host_unit_that_is_protected_is_not_stopped_along() -> None:
    units = {SGLANG: Unit(required_by="b.service"), "b.service": Unit()}
    stage = scene(Host(used=[0], units=units), units=["sglang", "b"], protect=["b"])

    with pytest.raises(BadInput, match=r"would stop b\.service along"):
        reclaim(stage.session, POLICY)


def test_what_is_bound_to_a_trigger_is_seen() -> None:
    units = {
        SGLANG: Unit(triggers="a.socket"),
        "a.socket": Unit(required_by="bound.service"),
        "bound.service": Unit(),
    }
    stage = scene(Host(used=[0], units=units), units=["sglang"], protect=["bound.service"])

    with pytest.raises(BadInput, match=r"would stop bound\.service along"):
        reclaim(stage.session, POLICY)


def test_a_server_on_other_gpus_is_not_stopped_along() -> None:
    host = Host(used=[900, 900], memory={50: (0, 900), 51: (1, 900)})
    host.processes = [process(50, unit=SGLANG), process(51, unit="b.service")]
    host.units = {SGLANG: Unit(required_by="b.service"), "b.service": Unit()}
    stage = scene(host, units=["sglang"])

    with pytest.raises(BadInput, match=r"would stop b\.service along, which uses GPUs that you"):
        reclaim(stage.session, ReclaimPolicy(gpus=[0]))
    assert stage.writes == []


@pytest.mark.parametrize("missing", ["sees fds", "sees nodes", "sees people"])
def test_a_look_that_does_not_even_see_its_own_shell_is_unknown(missing: str) -> None:
    stage = scene(Host(used=[0]))
    answer = stage.direct.handler

    def blind(script: Script) -> Answer:
        found = dict(answer(script))  # type: ignore[arg-type]
        found["processes"] = str(found["processes"]).replace(missing, "")
        return found

    stage.direct.handler = blind

    assert refused(stage).verdict == Verdict.UNKNOWN


def test_what_is_bound_to_a_trigger_is_planned_and_reported() -> None:
    units = {
        SGLANG: Unit(triggers="a.socket"),
        "a.socket": Unit(required_by="bound.service"),
        "bound.service": Unit(),
    }
    stage = scene(Host(used=[0], units=units), units=["sglang"])
    planned = reclaim(stage.session, ReclaimPolicy(mode="plan")).stopped
    done = reclaim(stage.session, POLICY).stopped

    assert planned == done
    assert [(x.unit, x.triggered_by, x.because) for x in done] == [
        (SGLANG, ["a.socket"], ""),
        ("bound.service", [], "systemd stops it along with a.socket"),
    ]
