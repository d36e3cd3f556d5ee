"""Holders of every kind: however they hold, whatever they are called, whoever started them."""

from __future__ import annotations

import pytest

from gpu_reclaim import signals
from gpu_reclaim.models import ReclaimPolicy, Verdict, Via
from gpu_reclaim.reclaim import reclaim
from guest import units, ways, witness
from guest.samples import sampled
from lab.container import Container
from lab.guest_files import HOLDER
from lab.lab import Lab
from lab.waiting import wait_until

pytestmark = pytest.mark.lab

QUICK = ReclaimPolicy(term_grace_s=1, settle_timeout_s=1, stable_samples=2)
FOLDER = "/run/gpu-reclaim-test"
"""Goes with `reset`."""


def holder_fd(index: int) -> list[str]:
    return ["/dev/nvidia-uvm (fd)", f"/dev/nvidia{index} (fd)", "/dev/nvidiactl (fd)"]


def copy_of_holder(lab: Lab, name: str) -> str:
    lab.do(f"mkdir -p {FOLDER}; cp {HOLDER} {FOLDER}/{name}")
    return f"{FOLDER}/{name}"


def test_every_kind_of_holder_is_ended_and_named(lab: Lab) -> None:
    kinds = {
        "mapping": lab.hold("--gpus", "0", "--map-only"),
        "deaf": lab.hold("--gpus", "1", "--ignore-term", unit="lab-hold-deaf.service"),
        "plain": lab.hold("--gpus", "2", unit="lab-hold-plain.scope"),
        "orphan": lab.hold("--gpus", "3", "--orphan"),
    }
    them = {witness.identity(lab, pid) for pid in kinds.values()}
    people = witness.everybody(lab)
    report = reclaim(ways.session(lab), ReclaimPolicy(term_grace_s=1))
    rows = {kind: witness.row(report, pid) for kind, pid in kinds.items()}
    assert {kind: (row.signal, row.owner) for kind, row in rows.items()} == {
        "mapping": ("TERM", "none"),
        "deaf": ("KILL", "unit lab-hold-deaf.service"),
        "plain": ("TERM", "scope lab-hold-plain.scope"),
        "orphan": ("TERM", "none"),
    }
    assert rows["mapping"].devices == [
        "/dev/nvidia-uvm (map)",
        "/dev/nvidia0 (map)",
        "/dev/nvidiactl (map)",
    ]
    assert [rows[kind].devices for kind in ("deaf", "plain", "orphan")] == [
        holder_fd(index) for index in (1, 2, 3)
    ]
    assert {row.name for row in rows.values()} == {"lab-holder"}
    assert witness.ended(report) == them
    assert set(people) - set(witness.everybody(lab)) == them
    assert (report.verdict, witness.memory(lab)) == (Verdict.CLEAN, [0, 0, 0, 0])


@pytest.mark.parametrize("via", ["ssh", "hypervisor"])
def test_term_comes_before_kill(lab: Lab, via: Via) -> None:
    pid = lab.hold("--gpus", "0", "--ignore-term", "--catch", "/run/gpu-reclaim-caught")
    report = reclaim(ways.session(lab, via), ReclaimPolicy(via=via, term_grace_s=0.3))
    assert lab.do("cat /run/gpu-reclaim-caught") == "TERM\n"
    assert witness.row(report, pid).signal == "KILL"


def test_stopped_holder_gets_its_chance_to_end(lab: Lab) -> None:
    pid = lab.hold("--gpus", "0", "--catch", "/run/gpu-reclaim-caught")
    lab.do(f"kill -STOP {pid}")
    report = reclaim(ways.session(lab), ReclaimPolicy())
    assert lab.do("cat /run/gpu-reclaim-caught") == "TERM\n"
    assert witness.row(report, pid).signal == "TERM"


@pytest.mark.parametrize(
    "title",
    sampled(
        [
            "two\nlines",
            "node 1 2 x|y",
            "99/comm:it's",
            "end 1\n2/stat:2 (x) S 1 1 1",
            "$(touch /run/gpu-reclaim-pwned)",
            "`touch /run/gpu-reclaim-pwned`'\"\\",
            "-> '/dev/null'",
            ") R 1 2 3",
            "\t \x1b[31mred",
        ],
        keep=3,
    ),
)
def test_no_title_hides_a_holder(lab: Lab, title: str) -> None:
    pid = lab.hold("--gpus", "0", "--mib", "900", "--title", title)
    who, people = witness.identity(lab, pid), witness.everybody(lab)
    report = reclaim(ways.session(lab), ReclaimPolicy())
    assert (report.verdict, witness.ended(report)) == (Verdict.CLEAN, {who})
    assert witness.row(report, pid).name.isprintable()
    assert set(people) - set(witness.everybody(lab)) == {who}
    assert lab.attach("ls /run/gpu-reclaim-pwned").returncode != 0


def test_deleted_executable_is_no_cover(lab: Lab) -> None:
    program = copy_of_holder(lab, "old-build")
    pid = lab.hold("--gpus", "0", program=program)
    lab.do(f"rm {program}")
    report = reclaim(ways.session(lab), ReclaimPolicy())
    assert (report.verdict, witness.row(report, pid).outcome) == (Verdict.CLEAN, "ended")


def test_holder_in_a_namespace_of_its_own(lab: Lab) -> None:
    output = "/run/gpu-lab/nested.out"
    lab.do(
        f"setsid unshare --pid --mount --fork {HOLDER} --gpus 1 --mib 800"
        f" </dev/null >{output} 2>&1 &"
    )
    path = lab.state / "nested.out"
    wait_until("it holds", lambda: path.exists() and path.read_text().startswith("ready"))
    report = reclaim(ways.session(lab), ReclaimPolicy())
    assert report.verdict == Verdict.CLEAN
    assert [(row.name, row.outcome) for row in report.ended] == [("lab-holder", "ended")]
    assert witness.memory(lab) == [0, 0, 0, 0]


def test_unreaped_holder_is_ended(lab: Lab) -> None:
    pid = lab.hold("--gpus", "2", "--unreaped")
    report = reclaim(ways.session(lab), ReclaimPolicy())
    assert report.verdict == Verdict.CLEAN
    assert witness.row(report, pid).outcome == "ended"


def test_thread_that_outlives_its_leader_is_ended(lab: Lab) -> None:
    pid = lab.hold("--gpus", "0", "--mib", "5000", "--leader-exits")
    who = witness.identity(lab, pid)
    assert witness.memory(lab)[0] == 5000
    report = reclaim(ways.session(lab), QUICK)
    assert report.verdict == Verdict.CLEAN
    assert who in witness.ended(report)
    assert witness.memory(lab)[0] == 0


@pytest.fixture
def short_kill_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "KILL_WAIT_S", 1)


@pytest.mark.usefixtures("short_kill_wait")
def test_frozen_holder_is_unkillable(lab: Lab) -> None:
    pid = lab.hold("--gpus", "1", "--mib", "3000")
    who = witness.identity(lab, pid)
    lab.freeze(pid)
    report = witness.refused(ways.session(lab), QUICK)
    row = witness.row(report, pid)
    assert report.verdict == Verdict.UNKILLABLE
    assert (row.signal, row.outcome) == ("KILL", "D")
    assert f"lab-holder (pid {pid}, none, state D)" in report.summary
    # Where this kernel shows it at all.
    wchan = lab.attach(f"cat /proc/{pid}/wchan").stdout.strip("\n0")
    assert row.wchan.strip("0") == wchan
    assert not wchan or f"waiting in {wchan}" in report.summary
    assert "reboot" in report.remedy
    assert [gpu.memory_used_mib for gpu in report.gpus_after] == [0, 3000, 0, 0]
    assert who in witness.everybody(lab)


@pytest.mark.usefixtures("short_kill_wait")
def test_others_are_ended_though_one_is_frozen(lab: Lab) -> None:
    frozen = lab.hold("--gpus", "1")
    other = lab.hold("--gpus", "2")
    who = witness.identity(lab, other)
    lab.freeze(frozen)
    report = witness.refused(ways.session(lab), QUICK)
    assert (report.verdict, witness.ended(report)) == (Verdict.UNKILLABLE, {who})


def test_holder_in_another_guest_is_named_and_left_alone(lab: Lab, second_guest: Container) -> None:
    pid = lab.hold("--gpus", "0", "--mib", "4000", guest=second_guest)
    mine = lab.hold("--gpus", "1", "--mib", "600")
    theirs = {(process.pid, process.start) for process in second_guest.processes()}
    report = witness.refused(ways.session(lab), QUICK)
    assert report.verdict == Verdict.HELD_BY_OTHER_GUEST
    assert report.summary.startswith("GPU 0: 4000 MiB in use, held by guest 130: lab-holder (pid ")
    assert "nothing there was touched" in report.remedy
    assert [row.pid for row in report.ended] == [mine]
    assert {(process.pid, process.start) for process in second_guest.processes()} >= theirs
    assert pid in {process.pid for process in second_guest.processes()}


def test_without_a_node_another_guests_holder_is_unseen(lab: Lab, second_guest: Container) -> None:
    lab.hold("--gpus", "0", "--mib", "4000", guest=second_guest)
    links = ways.links(lab)
    links.hypervisor = links.node = None
    report = witness.refused(ways.session(lab, ways=links, vmid=None), QUICK)
    assert report.verdict == Verdict.HELD_UNSEEN
    assert "look from the machine that runs the driver" in report.remedy


@pytest.mark.parametrize(("apps", "early"), [("real", True), ("none", False)])
def test_protected_program_keeps_its_memory(lab: Lab, apps: str, early: bool) -> None:
    pid = lab.hold("--gpus", "3", "--mib", "5000", program=copy_of_holder(lab, "Xorg"))
    other = lab.hold("--gpus", "0")
    who = witness.identity(lab, pid)
    lab.smi("apps", apps)
    report = witness.refused(ways.session(lab), QUICK)
    assert report.verdict == Verdict.HELD_BY_PROTECTED
    assert report.summary.startswith(
        f"{'GPU 0: 1024 MiB in use, ' if early else ''}"
        "GPU 3: 5000 MiB in use, held by what must not be ended: "
        f"Xorg (pid {pid}, none): protected: it drives a display"
    )
    # Where nvidia-smi says whose the memory is, nobody else is ended in vain.
    assert (other in lab.processes()) == early
    assert report.summary.endswith("; nothing was touched") == early
    assert report.remedy == "stop it yourself if it may be stopped, then run this again"
    assert witness.spared(report, pid).devices == holder_fd(3)
    assert who in witness.everybody(lab)
    assert witness.memory(lab) == [1024 if early else 0, 0, 0, 5000]


def test_title_makes_nobody_protected(lab: Lab) -> None:
    pid = lab.hold("--gpus", "3", "--title", "Xorg")
    report = reclaim(ways.session(lab), ReclaimPolicy())
    assert (report.verdict, witness.row(report, pid).name) == (Verdict.CLEAN, "Xorg")


@pytest.mark.parametrize("name", ["lab-holder", "ollama*", "lab-hold-kept.service"])
def test_policy_protects_by_program_title_or_unit(lab: Lab, name: str) -> None:
    title = ["--title", "ollama runner"] if name == "ollama*" else []
    pid = lab.hold("--gpus", "1", "--mib", "2000", *title, unit="lab-hold-kept.service")
    with witness.untouched(lab, "lab-hold-kept.service"):
        report = witness.refused(ways.session(lab), QUICK.model_copy(update={"protect": [name]}))
    assert report.verdict == Verdict.HELD_BY_PROTECTED
    assert witness.spared(report, pid).reason == f"protected by name: {name}"


def test_host_protects_too(lab: Lab) -> None:
    pid = lab.hold("--gpus", "1", "--mib", "2000")
    with witness.untouched(lab):
        report = witness.refused(ways.session(lab, protect=["lab-*"]), QUICK)
    assert witness.spared(report, pid).reason == "protected by name: lab-*"


def test_supervisor_outside_systemd_brings_its_holder_back(lab: Lab) -> None:
    loop = f"while :; do {HOLDER} --gpus 0 --mib 700; done"
    lab.do(f"setsid sh -c {loop!r} </dev/null >/run/gpu-lab/loop.out 2>&1 &")
    path = lab.state / "loop.out"
    wait_until("it holds", lambda: path.exists() and "ready" in path.read_text())
    report = witness.refused(ways.session(lab), QUICK)
    assert report.verdict == Verdict.RESPAWNED
    assert report.summary.startswith("new holders appeared: lab-holder (pid ")
    assert "started by sh " in report.summary
    assert "end that first" in report.remedy
    assert report.ended
    assert {row.outcome for row in report.ended} == {"ended"}
    assert witness.memory(lab)[0] == 700


def test_unit_that_is_not_ours_brings_its_holder_back(lab: Lab) -> None:
    units.add(
        lab,
        "lab-again.service",
        Unit=["StartLimitIntervalSec=0"],
        Service=[f"ExecStart={HOLDER} --gpus 2 --mib 900", "Restart=always", "RestartSec=0"],
    )
    lab.do("systemctl start lab-again")
    wait_until("it holds", lambda: witness.memory(lab)[2] == 900)
    report = witness.refused(ways.session(lab), QUICK)
    assert report.verdict == Verdict.RESPAWNED
    assert report.remedy == (
        "stop what starts them: systemctl stop lab-again.service; "
        "add such units to the host's units"
    )
