"""The connection breaks in the middle of a write: nobody knows, somebody looks, nobody guesses."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpu_reclaim.flows import reclaim_gpus
from gpu_reclaim.models import ReclaimPolicy, Verdict, Via
from guest import cutting, units, ways, witness
from lab.guest_files import HOLDER
from lab.lab import Lab
from lab.processes import Process
from lab.waiting import wait_until

pytestmark = pytest.mark.lab

Sessions = Callable[[Lab], list[Process]]
SSH, NODE = ("ssh", cutting.guest_sessions), ("hypervisor", cutting.node_sessions)
WAYS = [SSH, NODE]


@pytest.fixture
def flow_host(lab: Lab, prefect_server: None, stand_in_devices: None) -> None:
    ways.save_host(lab)


@pytest.mark.usefixtures("flow_host")
@pytest.mark.parametrize(
    ("via", "sessions"), [SSH, pytest.param(*NODE, marks=pytest.mark.exhaustive)]
)
def test_flow_tries_again_and_ends_nobody_twice(lab: Lab, via: Via, sessions: Sessions) -> None:
    deaf = lab.hold("--gpus", "0", "--ignore-term", "--catch", cutting.CAUGHT)
    plain = lab.hold("--gpus", "1", unit="lab-hold-plain.scope")
    them = {witness.identity(lab, pid) for pid in (deaf, plain)}
    people = witness.everybody(lab)
    policy = ReclaimPolicy(via=via, term_grace_s=4)
    with cutting.cut_once(lab, sessions, lambda: cutting.caught(lab)) as killed:
        report = reclaim_gpus("lab", policy)
    assert len(killed) == 1
    acting = "fuser_release" if via == "ssh" else "proxmox_exec_kill"
    assert {step.name: step.attempts for step in report.steps if step.attempts > 1} == {acting: 2}
    assert report.verdict == Verdict.CLEAN
    assert set(people) - set(witness.everybody(lab)) == them
    assert sorted(row.pid for row in report.ended) == sorted([deaf, plain])
    assert witness.ended(report) == them


@pytest.mark.usefixtures("flow_host")
@pytest.mark.parametrize(
    ("via", "sessions"), [NODE, pytest.param(*SSH, marks=pytest.mark.exhaustive)]
)
def test_stop_cut_short_is_finished(lab: Lab, via: Via, sessions: Sessions) -> None:
    stubborn = f"{HOLDER} --gpus 0 --mib 1500 --ignore-term --catch {cutting.CAUGHT}"
    units.add(lab, "lab-model.service", Service=[f"ExecStart={stubborn}", "TimeoutStopSec=4"])
    ways.save_host(lab, units=["lab-model"])
    lab.do("systemctl start lab-model")
    wait_until("it holds", lambda: witness.memory(lab)[0] == 1500)
    server, people = witness.of_unit(lab, "lab-model.service"), witness.everybody(lab)
    with cutting.cut_once(lab, sessions, lambda: cutting.caught(lab)) as killed:
        report = reclaim_gpus("lab", ReclaimPolicy(via=via))
    assert len(killed) == 1
    assert {step.name: step.attempts for step in report.steps if step.attempts > 1} == {
        "stop_systemd": 2
    }
    assert report.verdict == Verdict.CLEAN
    assert [row.unit for row in report.stopped] == ["lab-model.service"]
    assert witness.ended(report) == set(server)
    assert len(report.ended) == 1
    assert cutting.caught(lab) == "TERM\n"
    assert set(people) - set(witness.everybody(lab)) == set(server)


@pytest.mark.parametrize(("via", "sessions"), WAYS)
def test_library_says_that_nobody_knows(lab: Lab, via: Via, sessions: Sessions) -> None:
    deaf = lab.hold("--gpus", "0", "--ignore-term", "--catch", cutting.CAUGHT)
    policy = ReclaimPolicy(via=via, term_grace_s=1)
    with cutting.cut_once(lab, sessions, lambda: cutting.caught(lab)):
        report = witness.refused(ways.session(lab, via), policy)
    assert report.verdict == Verdict.UNKNOWN
    assert "the connection ended before end 1 processes did" in report.summary
    assert "the next attempt looks before it acts" in report.remedy
    assert [step.name for step in report.steps][:2] == ["survey", "stop_systemd"]
    assert [gpu.memory_used_mib for gpu in report.gpus_before] == [1024, 0, 0, 0]
    # What was started on the host goes on there to its end.
    wait_until("it has ended", lambda: lab.process(deaf) is None)
