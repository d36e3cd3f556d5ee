"""Units as people write them: triggered, aliased, stubborn, long gone."""

from __future__ import annotations

import socket

import pytest

from gpu_reclaim.errors import BadInput
from gpu_reclaim.models import ReclaimPolicy, Verdict
from gpu_reclaim.reclaim import reclaim
from guest import units, ways, witness
from lab.guest_files import HOLDER
from lab.lab import Lab
from lab.shell import run
from lab.waiting import wait_until

pytestmark = pytest.mark.lab

QUICK = ReclaimPolicy(term_grace_s=1, settle_timeout_s=1, stable_samples=2)


def add_holder_unit(lab: Lab, name: str, *lines: str, gpu: int = 0) -> None:
    exe = f"ExecStart={HOLDER} --gpus {gpu} --mib 1500"
    units.add(lab, f"{name}.service", Service=[exe, *lines])


def test_triggers_are_stopped_first_and_named(lab: Lab) -> None:
    add_holder_unit(lab, "lab-triggered")
    units.add(lab, "lab-triggered.socket", Socket=["ListenStream=31000"])
    units.add(lab, "lab-triggered.timer", Timer=["OnActiveSec=1h"])
    lab.do("systemctl start lab-triggered.socket lab-triggered.timer")
    with socket.create_connection((lab.guest_address, 31000), timeout=10):
        wait_until("it holds", lambda: witness.memory(lab)[0] == 1500)
    server = witness.of_unit(lab, "lab-triggered.service")
    report = reclaim(ways.session(lab, units=["lab-triggered"]), ReclaimPolicy())
    assert report.verdict == Verdict.CLEAN
    assert [(row.unit, sorted(row.triggered_by)) for row in report.stopped] == [
        ("lab-triggered.service", ["lab-triggered.socket", "lab-triggered.timer"])
    ]
    assert witness.ended(report) == set(server)
    for kind in ("service", "socket", "timer"):
        assert witness.state_of(lab, f"lab-triggered.{kind}") == "inactive"
    words = "^(Stopped|Closed) lab-triggered.[a-z]*"
    journal = lab.do(f"journalctl -o cat -u 'lab-triggered.*' | grep -o -E '{words}'")
    stopped = journal.split()[1::2]
    assert stopped[-1] == "lab-triggered.service"
    assert sorted(stopped[:-1]) == ["lab-triggered.socket", "lab-triggered.timer"]


def test_trigger_that_does_not_run_is_not_named(lab: Lab) -> None:
    add_holder_unit(lab, "lab-model")
    units.add(lab, "lab-model.socket", Socket=["ListenStream=31000"])
    lab.do("systemctl start lab-model.service")
    wait_until("it holds", lambda: witness.memory(lab)[0] == 1500)
    report = reclaim(ways.session(lab, units=["lab-model"]), ReclaimPolicy())
    assert [(row.unit, row.triggered_by) for row in report.stopped] == [("lab-model.service", [])]


def test_live_trigger_of_an_idle_unit_is_stopped_too(lab: Lab) -> None:
    add_holder_unit(lab, "lab-model")
    units.add(lab, "lab-model.socket", Socket=["ListenStream=31000"])
    lab.do("systemctl start lab-model.socket")
    report = reclaim(ways.session(lab, units=["lab-model"]), ReclaimPolicy())
    assert report.verdict == Verdict.CLEAN
    assert witness.state_of(lab, "lab-model.socket") == "inactive"
    assert [(row.unit, row.triggered_by) for row in report.stopped] == [
        ("lab-model.service", ["lab-model.socket"])
    ]


def test_alias_stands_for_its_unit(lab: Lab) -> None:
    units.alias(lab, "llm.service", ways.UNIT)
    lab.start_server()
    server, people = witness.of_unit(lab, ways.UNIT), witness.everybody(lab)
    report = reclaim(ways.session(lab, units=["llm"]), ReclaimPolicy())
    assert report.verdict == Verdict.CLEAN
    assert [row.unit for row in report.stopped] == [ways.UNIT]
    assert witness.ended(report) == set(server)
    assert set(people) - set(witness.everybody(lab)) == set(server)


def test_unit_of_a_template(lab: Lab) -> None:
    exe = f"ExecStart={HOLDER} --gpus %i --mib 1500"
    units.add(lab, "lab-model@.service", Service=[exe])
    lab.do("systemctl start lab-model@0 lab-model@3")
    wait_until("both hold", lambda: witness.memory(lab) == [1500, 0, 0, 1500])
    them = {name: witness.of_unit(lab, f"lab-model@{name}.service") for name in "03"}
    wanted = ["lab-model@0", "lab-model@3.service"]
    report = reclaim(ways.session(lab, units=wanted), ReclaimPolicy())
    assert [row.unit for row in report.stopped] == ["lab-model@0.service", "lab-model@3.service"]
    assert witness.ended(report) == {*them["0"], *them["3"]}


def test_unit_in_a_slice_of_its_own(lab: Lab) -> None:
    units.add(
        lab,
        "lab-model.service",
        Service=[f"ExecStart={HOLDER} --gpus 1 --mib 1500", "Delegate=yes", "Slice=lab-llm.slice"],
    )
    lab.do("systemctl start lab-model")
    wait_until("it holds", lambda: witness.memory(lab)[1] == 1500)
    server = witness.of_unit(lab, "lab-model.service")
    report = reclaim(ways.session(lab, units=["lab-model"]), ReclaimPolicy())
    assert (report.verdict, witness.ended(report)) == (Verdict.CLEAN, set(server))
    assert [row.owner for row in report.ended] == ["unit lab-model.service"]


def test_unit_that_refuses_a_manual_stop_is_left_alone(lab: Lab) -> None:
    units.drop_in(lab, ways.UNIT, "[Unit]\nRefuseManualStop=yes\n")
    lab.start_server()
    with witness.untouched(lab):
        report = witness.refused(ways.session(lab))
    assert report.verdict == Verdict.UNKNOWN
    assert report.summary == (
        f"lab: {ways.UNIT} refuses to be stopped by hand (RefuseManualStop); nothing was touched"
    )
    assert report.remedy == "stop what it belongs to, and name that in the GpuHost block"
    assert (report.stopped, report.ended) == ([], [])


def test_workers_left_by_a_unit_that_is_already_inactive(lab: Lab) -> None:
    lab.start_server()
    lab.do(f"systemctl stop {ways.UNIT}")
    left, people = witness.of_unit(lab, ways.UNIT), witness.everybody(lab)
    assert len(left) == 5
    report = reclaim(ways.session(lab), ReclaimPolicy())
    assert (report.verdict, report.stopped) == (Verdict.CLEAN, [])
    assert witness.ended(report) == set(left)
    assert {row.signal for row in report.ended} == {"TERM"}
    assert set(people) - set(witness.everybody(lab)) == set(left)


def test_unit_that_is_waiting_to_restart_is_stopped(lab: Lab) -> None:
    add_holder_unit(lab, "lab-model", "Restart=always", "RestartSec=1h")
    lab.do("systemctl start lab-model")
    wait_until("it holds", lambda: witness.memory(lab)[0] == 1500)
    lab.do("systemctl kill -s KILL lab-model")
    wait_until("it waits", lambda: witness.state_of(lab, "lab-model") == "activating")
    report = reclaim(ways.session(lab, units=["lab-model"]), ReclaimPolicy())
    assert [row.unit for row in report.stopped] == ["lab-model.service"]
    assert witness.state_of(lab, "lab-model") == "inactive"


def test_failed_unit_needs_no_stop(lab: Lab) -> None:
    units.add(lab, "lab-broken.service", Service=["Type=oneshot", "ExecStart=/bin/false"])
    lab.attach("systemctl start lab-broken")
    assert witness.state_of(lab, "lab-broken") == "failed"
    report = reclaim(ways.session(lab, units=["lab-broken", ways.UNIT]), ReclaimPolicy())
    assert (report.verdict, report.stopped) == (Verdict.CLEAN, [])


def test_unit_that_is_deaf_to_term_is_waited_for(lab: Lab) -> None:
    add_holder_unit(lab, "lab-model", "TimeoutStopSec=1")
    text = f"[Service]\nExecStart=\nExecStart={HOLDER} --gpus 0 --mib 1500 --ignore-term\n"
    units.drop_in(lab, "lab-model.service", text)
    lab.do("systemctl start lab-model")
    wait_until("it holds", lambda: witness.memory(lab)[0] == 1500)
    server = witness.of_unit(lab, "lab-model.service")
    report = reclaim(ways.session(lab, units=["lab-model"]), ReclaimPolicy())
    assert (report.verdict, witness.ended(report)) == (Verdict.CLEAN, set(server))
    assert [row.signal for row in report.ended] == ["systemctl stop"]


def test_two_units_are_stopped_in_one_go(lab: Lab) -> None:
    add_holder_unit(lab, "lab-one", gpu=0)
    add_holder_unit(lab, "lab-two", gpu=3)
    lab.do("systemctl start lab-one lab-two")
    wait_until("both hold", lambda: witness.memory(lab) == [1500, 0, 0, 1500])
    wanted = ["lab-one", "lab-two", ways.UNIT]
    report = reclaim(ways.session(lab, units=wanted), ReclaimPolicy())
    assert report.verdict == Verdict.CLEAN
    assert [row.unit for row in report.stopped] == ["lab-one.service", "lab-two.service"]


def test_protected_unit_is_not_stopped(lab: Lab) -> None:
    lab.start_server()
    with witness.untouched(lab):
        report = witness.refused(
            ways.session(lab), QUICK.model_copy(update={"protect": ["sglang-*.service"]})
        )
    assert report.verdict == Verdict.HELD_BY_PROTECTED
    assert (report.stopped, report.ended) == ([], [])


def test_built_in_protected_unit_is_refused(lab: Lab) -> None:
    session = ways.session(lab, units=["nvidia-persistenced"])
    with (
        witness.untouched(lab, "nvidia-persistenced"),
        pytest.raises(BadInput, match="service is never stopped"),
    ):
        reclaim(session, ReclaimPolicy())


def test_wanted_gpu_takes_its_worker_alone(lab: Lab) -> None:
    lab.smi("apps", "real")
    pids = [lab.hold("--gpus", str(gpu), "--mib", "2000") for gpu in range(4)]
    who = witness.identity(lab, pids[1])
    people = witness.everybody(lab)
    report = reclaim(ways.session(lab), ReclaimPolicy(gpus=[1]))
    assert report.summary == "1 GPU at 0 MiB, no unprotected holder"
    assert (report.verdict, witness.ended(report)) == (Verdict.CLEAN, {who})
    assert set(people) - set(witness.everybody(lab)) == {who}
    assert witness.memory(lab) == [2000, 0, 2000, 2000]


def test_unit_that_uses_other_gpus_too_is_left_alone(lab: Lab) -> None:
    """A server's workers go together: one GPU of it cannot be had alone."""
    lab.start_server()
    lab.hold("--gpus", "1", "--mib", "2000")
    with witness.untouched(lab):
        report = witness.refused(ways.session(lab), ReclaimPolicy(gpus=[1]))
    assert report.verdict == Verdict.HELD_BY_PROTECTED
    assert f"its unit {ways.UNIT} also uses GPU 0, GPU 2, GPU 3, which you did" in report.summary
    assert report.summary.endswith("; nothing was touched")
    assert f"systemctl stop {ways.UNIT}" in report.remedy
    assert (report.ended, report.stopped) == ([], [])


def test_process_that_uses_other_gpus_too_is_left_alone(lab: Lab) -> None:
    pid = lab.hold("--gpus", "1,2", "--mib", "2000")
    with witness.untouched(lab):
        report = witness.refused(ways.session(lab), ReclaimPolicy(gpus=[1]))
    assert report.verdict == Verdict.HELD_BY_PROTECTED
    assert witness.spared(report, pid).reason == "it also uses GPU 2, which you did not ask for"


def test_unit_whose_gpus_are_all_wanted_is_stopped(lab: Lab) -> None:
    lab.start_server()
    server = witness.of_unit(lab, ways.UNIT)
    other = lab.hold("--gpus", "3", "--mib", "2000")
    report = reclaim(ways.session(lab), ReclaimPolicy(gpus=[0, 1, 2, 3]))
    assert (report.verdict, [row.unit for row in report.stopped]) == (Verdict.CLEAN, [ways.UNIT])
    assert witness.ended(report) == {*server, (other, witness.row(report, other).start_time)}


def test_unit_on_wanted_gpus_is_stopped_and_the_rest_goes_on(lab: Lab) -> None:
    exe = f"ExecStart={HOLDER} --gpus 0,1 --mib 1500"
    units.add(lab, "lab-model.service", Service=[exe])
    lab.do("systemctl start lab-model")
    other = lab.hold("--gpus", "2", "--mib", "2000")
    wait_until("it holds", lambda: witness.memory(lab) == [1500, 1500, 2000, 0])
    report = reclaim(ways.session(lab, units=["lab-model"]), ReclaimPolicy(gpus=[0, 1]))
    assert report.verdict == Verdict.CLEAN
    assert [row.unit for row in report.stopped] == ["lab-model.service"]
    assert other in lab.processes()
    assert witness.memory(lab) == [0, 0, 2000, 0]


def test_unit_on_other_gpus_goes_on(lab: Lab) -> None:
    add_holder_unit(lab, "lab-one", gpu=0)
    lab.do("systemctl start lab-one")
    wait_until("it holds", lambda: witness.memory(lab)[0] == 1500)
    wanted = lab.hold("--gpus", "2", "--mib", "2000")
    who = witness.identity(lab, wanted)
    report = reclaim(ways.session(lab, units=["lab-one"]), ReclaimPolicy(gpus=[2]))
    assert (report.verdict, report.stopped) == (Verdict.CLEAN, [])
    assert witness.ended(report) == {who}
    assert (witness.state_of(lab, "lab-one"), witness.memory(lab)) == ("active", [1500, 0, 0, 0])


@pytest.mark.parametrize("apps", ["none", "hostpids"])
def test_wanted_gpu_whose_user_is_not_listed_is_never_clean(lab: Lab, apps: str) -> None:
    lab.smi("apps", apps)
    lab.hold("--gpus", "1", "--mib", "2000")
    lab.hold("--gpus", "2", "--mib", "2000")
    with witness.untouched(lab):
        report = witness.refused(ways.session(lab), QUICK.model_copy(update={"gpus": [1]}))
    assert report.verdict == Verdict.HELD_UNSEEN
    assert (report.ended, report.stopped) == ([], [])


def test_listed_pid_of_another_namespace_names_nobody_here(lab: Lab) -> None:
    """nvidia-smi may list the host's pids, and one may be somebody else's in the guest."""
    lab.smi("apps", "hostpids")
    taken = host_pid(lab, lab.hold("--gpus", "1", "--mib", "2000"))
    give_next_pid(lab, taken)
    assert lab.hold("--gpus", "2", "--mib", "2000", unit="lab-hold-x.service") == taken
    with witness.untouched(lab, "lab-hold-x.service"):
        witness.refused(ways.session(lab), QUICK.model_copy(update={"gpus": [1]}))


def host_pid(lab: Lab, pid: int) -> int:
    process = lab.process(pid)
    assert process is not None
    return process.host_pid


def give_next_pid(lab: Lab, pid: int) -> None:
    """Have the next process of the guest be this one, as counting on would in time."""
    init = next(each for each in lab.guest.processes() if each.pid == 1)
    enter = ["nsenter", "-t", str(init.host_pid), "-p", "sh", "-c"]
    # Two are started on the way to the holder: the shell of `attach` and systemd-run.
    run([*enter, f"echo {pid - 3} >/proc/sys/kernel/ns_last_pid"])


@pytest.mark.parametrize("pattern", ["^sidecar::cache$", "--model-path /models/draft"])
def test_match_ends_a_process_without_a_gpu(lab: Lab, pattern: str) -> None:
    sleeps = "import time; time.sleep(1000)"
    renamed = f"import setproctitle as s; s.setproctitle('sidecar::cache'); {sleeps}"
    for arguments in (f'"{sleeps}" --model-path /models/draft', f'"{renamed}"'):
        lab.do(f"setsid python3 -c {arguments} </dev/null >/dev/null 2>&1 &")
    word = "draft" if "draft" in pattern else "sidecar"
    wait_until("it has its title", lambda: "sidecar::cache" in witness.everybody(lab).values())
    people = witness.everybody(lab)
    named = {who for who, title in people.items() if word in title}
    report = reclaim(ways.session(lab), ReclaimPolicy(match=[pattern]))
    assert (report.verdict, witness.ended(report)) == (Verdict.CLEAN, named)
    assert len(named) == 1
    assert set(people) - set(witness.everybody(lab)) == named


def test_match_of_old_ends_the_agent_as_asked_but_nothing_protected(lab: Lab) -> None:
    lab.start_server()
    server = witness.of_unit(lab, ways.UNIT)
    agent = set(witness.of_unit(lab, "gpu-agent.service"))
    kept = set(witness.everybody(lab)) - set(server) - agent
    report = reclaim(ways.session(lab), ReclaimPolicy(match=["python3", "."]))
    assert witness.ended(report) >= {*server, *agent}
    for title in ("/sbin/init", "/usr/bin/nvidia-persistenced", "/lib/systemd/systemd-logind"):
        assert title in [text for who, text in witness.everybody(lab).items() if who in kept]


def test_unit_outside_the_blocks_that_waits_to_restart_is_told(lab: Lab) -> None:
    """Between its holder's end and its `RestartSec` nobody holds the GPU, and it is not free."""
    add_holder_unit(lab, "lab-later", "Restart=always", "RestartSec=600", gpu=2)
    lab.do("systemctl start lab-later")
    wait_until("it holds", lambda: witness.memory(lab)[2] == 1500)
    report = witness.refused(ways.session(lab))
    assert report.verdict == Verdict.RESPAWNED
    assert "lab-later.service" in report.summary
    assert "systemctl stop lab-later.service" in report.remedy
