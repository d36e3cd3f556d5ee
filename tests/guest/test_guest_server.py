"""The server as it is: four titled workers, a unit that comes back, two innocents."""

from __future__ import annotations

import pytest

from gpu_reclaim.models import ReclaimPolicy, Verdict, Via
from gpu_reclaim.reclaim import reclaim
from guest import ways, witness
from lab.lab import Lab
from lab.waiting import wait_until

pytestmark = pytest.mark.lab

STEPS = (
    "survey",
    "stop_systemd",
    "proxmox_exec_kill",
    "fuser_release",
    "settle",
    "verify_nvidia_smi",
)


def test_server_is_ended_and_nobody_else(lab: Lab) -> None:
    pids = lab.start_server()
    server, before = witness.of_unit(lab, ways.UNIT), witness.everybody(lab)
    report = reclaim(ways.session(lab), ReclaimPolicy())
    assert (report.verdict, report.summary, report.remedy) == (
        Verdict.CLEAN,
        "4 GPUs at 0 MiB, no unprotected holder",
        "",
    )
    assert [gpu.memory_used_mib for gpu in report.gpus_before] == [90000, 90100, 90200, 90300]
    assert [gpu.memory_used_mib for gpu in report.gpus_after] == [0, 0, 0, 0]
    assert witness.memory(lab) == [0, 0, 0, 0]
    assert witness.state_of(lab) == "inactive"
    assert witness.ended(report) == set(server)
    assert set(before) - set(witness.everybody(lab)) == set(server)
    assert set(witness.everybody(lab)) == set(before) - set(server)
    assert witness.row(report, pids["launch_server"]).signal == "systemctl stop"
    assert {row.signal for row in report.ended} == {"systemctl stop", "TERM"}


def test_report_names_everybody(lab: Lab) -> None:
    pids = lab.start_server()
    report = reclaim(ways.session(lab), ReclaimPolicy())
    assert [(row.unit, row.triggered_by) for row in report.stopped] == [(ways.UNIT, [])]
    for rank in range(4):
        row = witness.row(report, pids[f"sglang::scheduler_TP{rank}"])
        assert (row.name, row.owner, row.via, row.devices) == (
            f"sglang::scheduler_TP{rank}",
            f"unit {ways.UNIT}",
            f"ssh root@{lab.guest_address}",
            ["/dev/nvidia-uvm (fd)", f"/dev/nvidia{rank} (fd)", "/dev/nvidiactl (fd)"],
        )
    assert witness.row(report, pids["sglang::detokenizer"]).devices == []
    assert [(row.name, row.reason) for row in report.spared] == [
        ("nvidia-persistenced", "protected: it keeps the driver or the fabric up")
    ]


def test_server_does_not_come_back(lab: Lab) -> None:
    lab.start_server()
    reclaim(ways.session(lab), ReclaimPolicy())
    # Longer than RestartSec, by the guest's own clock.
    assert lab.do(f"sleep 2; systemctl is-active {ways.UNIT} || true").strip() == "inactive"
    assert lab.server_pids() == {}


def test_second_reclaim_finds_nothing_to_do(lab: Lab) -> None:
    lab.start_server()
    reclaim(ways.session(lab), ReclaimPolicy())
    with witness.untouched(lab):
        report = reclaim(ways.session(lab), ReclaimPolicy())
    assert (report.verdict, report.stopped, report.ended) == (Verdict.CLEAN, [], [])
    assert [row.name for row in report.spared] == ["nvidia-persistenced"]


def test_everything_goes_through_the_node_when_sshd_is_down(lab: Lab) -> None:
    lab.start_server()
    server, before = witness.of_unit(lab, ways.UNIT), witness.everybody(lab)
    lab.stop_guest_sshd()
    # What a closed session leaves to be tidied up is over in a moment.
    wait_until("only the idle are left", lambda: set(witness.everybody(lab)) <= set(before))
    sshd = witness.everybody(lab)
    report = reclaim(ways.session(lab), ReclaimPolicy())
    through = f"container 129 through ssh root@127.0.0.1:{lab.node_port}"
    assert witness.vias(report) == dict.fromkeys(STEPS, through)
    assert {row.via for row in report.ended} == {through}
    assert report.verdict == Verdict.CLEAN
    assert witness.ended(report) == set(server)
    assert set(witness.everybody(lab)) == set(sshd) - set(server) < set(before)
    assert witness.memory(lab) == [0, 0, 0, 0]


@pytest.mark.parametrize("via", ["hypervisor", "ssh"])
def test_one_way_alone_will_do(lab: Lab, via: Via) -> None:
    lab.start_server()
    server, people = witness.of_unit(lab, ways.UNIT), witness.innocents(lab)
    report = reclaim(ways.session(lab, via), ReclaimPolicy(via=via))
    through = f"container 129 through ssh root@127.0.0.1:{lab.node_port}"
    way = through if via == "hypervisor" else f"ssh root@{lab.guest_address}"
    skipped = {"proxmox_exec_kill": ""} if via == "ssh" else {}
    assert witness.vias(report) == dict.fromkeys(STEPS, way) | skipped
    assert report.verdict == Verdict.CLEAN
    assert witness.ended(report) == set(server)
    assert witness.innocents(lab) == people


def test_auto_uses_both_ways(lab: Lab) -> None:
    lab.start_server()
    report = reclaim(ways.session(lab), ReclaimPolicy())
    through = f"container 129 through ssh root@127.0.0.1:{lab.node_port}"
    direct = dict.fromkeys(STEPS, f"ssh root@{lab.guest_address}")
    assert witness.vias(report) == direct | {"proxmox_exec_kill": through}


def test_node_down_is_no_obstacle(lab: Lab) -> None:
    lab.start_server()
    links = ways.links(lab, node={"port": 1})
    report = reclaim(ways.session(lab, ways=links), ReclaimPolicy())
    direct = dict.fromkeys(STEPS, f"ssh root@{lab.guest_address}")
    assert witness.vias(report) == direct | {"proxmox_exec_kill": ""}
    assert report.verdict == Verdict.CLEAN


def test_fuser_is_not_needed(lab: Lab) -> None:
    lab.start_server()
    server = witness.of_unit(lab, ways.UNIT)
    for tool in ("fuser", "pstree", "killall"):
        lab.hide(f"/usr/bin/{tool}")
    report = reclaim(ways.session(lab), ReclaimPolicy())
    assert (report.verdict, witness.ended(report)) == (Verdict.CLEAN, set(server))


def test_plan_touches_nothing(lab: Lab) -> None:
    lab.start_server()
    server = witness.of_unit(lab, ways.UNIT)
    holder = lab.hold("--gpus", "2", "--mib", "700")
    with witness.untouched(lab):
        report = reclaim(ways.session(lab), ReclaimPolicy(mode="plan"))
    assert report.verdict == Verdict.PLANNED
    assert report.summary == (
        f"nothing was touched; a reclaim would stop {ways.UNIT} and end 7 processes"
    )
    planned = {(row.pid, row.start_time) for row in report.ended}
    assert planned == {*server, witness.identity(lab, holder)}
    assert {(row.outcome, row.signal) for row in report.ended} == {("planned", "")}
    assert [row.unit for row in report.stopped] == [ways.UNIT]
    assert [step.name for step in report.steps] == ["survey"]


def test_plan_is_what_a_reclaim_does(lab: Lab) -> None:
    lab.start_server()
    lab.hold("--gpus", "2", "--mib", "700")
    plan = reclaim(ways.session(lab), ReclaimPolicy(mode="plan"))
    done = reclaim(ways.session(lab), ReclaimPolicy())
    assert witness.ended(done) == {(row.pid, row.start_time) for row in plan.ended}
    assert [row.unit for row in done.stopped] == [row.unit for row in plan.stopped]
