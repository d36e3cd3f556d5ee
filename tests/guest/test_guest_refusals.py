"""Another guest than expected: nothing is touched. A broken nvidia-smi: never clean."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpu_reclaim import nvidia_smi
from gpu_reclaim.commands import Guard
from gpu_reclaim.models import ReclaimPolicy, Verdict, Via
from guest import ways, witness
from guest.samples import sampled
from lab.lab import Lab
from lab.node import write_container
from lab.waiting import wait_until

pytestmark = pytest.mark.lab

QUICK = ReclaimPolicy(term_grace_s=1, settle_timeout_s=1, stable_samples=2)


@pytest.mark.parametrize("via", ["auto", "ssh", "hypervisor"])
def test_another_hostname_is_refused(lab: Lab, via: Via) -> None:
    lab.start_server()
    lab.set_hostname_in_guest("impostor")
    with witness.untouched(lab):
        report = witness.refused(ways.session(lab, via), ReclaimPolicy(via=via))
    assert report.verdict == Verdict.IDENTITY_MISMATCH
    assert "its hostname is 'impostor', expected 'gpu-guest'; nothing was touched" in report.summary
    assert report.summary.startswith("container 129" if via == "hypervisor" else "ssh root@10.")
    assert report.remedy.startswith("check the address and vmid")
    assert (report.stopped, report.ended, report.steps) == ([], [], [])


@pytest.mark.parametrize("via", ["auto", "ssh", "hypervisor"])
def test_another_machine_id_is_refused(lab: Lab, via: Via) -> None:
    lab.start_server()
    links = ways.links(lab, via, expected=Guard(lab.hostname, "0" * 32))
    with witness.untouched(lab):
        report = witness.refused(ways.session(lab, ways=links), ReclaimPolicy(via=via))
    assert report.verdict == Verdict.IDENTITY_MISMATCH
    assert f"its machine-id is {lab.machine_id!r}, expected '0000" in report.summary
    assert report.ended == []


def test_another_name_on_the_node_is_refused(lab: Lab) -> None:
    lab.start_server()
    write_container(129, "renamed", lab.guest_address, None)
    with witness.untouched(lab):
        report = witness.refused(ways.session(lab))
    assert report.verdict == Verdict.IDENTITY_MISMATCH
    assert "container 129 is called 'renamed', expected 'gpu-guest'" in report.summary


def test_identity_is_read_again_by_every_step(lab: Lab) -> None:
    """The guest becomes another one in the middle: the step that acts refuses by itself."""
    lab.start_server()
    session = ways.session(lab)
    clock = session.clock
    looks = iter(range(100))

    def clock_with_a_swap() -> float:
        # The first step reads the clock twice, the record once before.
        if next(looks) == 3:
            lab.set_hostname_in_guest("impostor")
        return clock()

    changed = replace(session, clock=clock_with_a_swap)
    with witness.untouched(lab):
        report = witness.refused(changed)
    assert report.verdict == Verdict.IDENTITY_MISMATCH
    assert [step.name for step in report.steps] == ["survey"]


@pytest.mark.parametrize("via", ["auto", "hypervisor"])
def test_locked_guest_is_refused(lab: Lab, via: Via) -> None:
    lab.start_server()
    lab.set_lock("backup")
    with witness.untouched(lab):
        report = witness.refused(ways.session(lab, via), ReclaimPolicy(via=via))
    assert report.verdict == Verdict.GUEST_LOCKED
    assert "container 129 is locked (backup); nothing was touched" in report.summary
    assert report.remedy.startswith("wait until the backup is over")
    assert report.steps == []


def test_guest_locked_meanwhile_is_refused(lab: Lab) -> None:
    lab.start_server()
    session = ways.session(lab, "hypervisor")
    clock = session.clock
    looks = iter(range(100))

    def clock_with_a_lock() -> float:
        if next(looks) == 3:
            lab.set_lock("snapshot")
        return clock()

    changed = replace(session, clock=clock_with_a_lock)
    with witness.untouched(lab):
        report = witness.refused(changed, ReclaimPolicy(via="hypervisor"))
    assert report.verdict == Verdict.GUEST_LOCKED
    assert [step.name for step in report.steps] == ["survey"]


@pytest.mark.parametrize("via", ["auto", "hypervisor"])
def test_stopped_guest_is_named(lab: Lab, via: Via) -> None:
    write_container(131, lab.hostname, "10.131.0.2", None)
    links = ways.links(lab, via, guest={"address": "10.129.0.3", "connect_timeout_s": 1}, vmid=131)
    session = ways.session(lab, ways=links, vmid=131)
    report = witness.refused(session, ReclaimPolicy(via=via))
    assert report.verdict == Verdict.GUEST_STOPPED
    assert "container 131 is stopped; nothing was touched" in report.summary
    assert report.remedy == "start it (`pct start 131`) if it should run"


@pytest.mark.parametrize("kind", ["missing", "failing", "silent", "nonsense"])
def test_broken_nvidia_smi_is_never_clean(lab: Lab, kind: str) -> None:
    if kind == "missing":
        lab.hide("/usr/bin/nvidia-smi")
    else:
        words = {
            "failing": "9 NVIDIA-SMI has failed because it couldn't communicate with the driver",
            "silent": "0 ",
            "nonsense": "0 No devices, no rows",
        }
        lab.smi("fail", words[kind])
    report = witness.refused(ways.session(lab), QUICK)
    assert report.verdict == Verdict.DRIVER_FAULT
    said = {
        "missing": "exit status 127 (nvidia-smi is not installed or not on PATH)",
        "failing": "exit status 9 (the NVIDIA driver is not loaded or does not answer)",
        "silent": "nvidia-smi printed no GPU",
        "nonsense": "nvidia-smi printed something that is no GPU row: No devices, no rows",
    }
    assert said[kind] in report.summary
    assert ("PATH" if kind == "missing" else "dmesg") in report.remedy
    assert report.gpus_after == []


def test_missing_row_is_a_missing_gpu(lab: Lab) -> None:
    lab.start_server()
    before = lab.server_pids()
    lab.smi("missing", "2")
    report = witness.refused(ways.session(lab))
    assert (report.verdict, report.summary) == (
        Verdict.GPU_MISSING,
        "3 GPUs answer, 4 are expected; nothing was touched",
    )
    assert lab.server_pids() == before


def test_gpu_that_vanishes_on_the_way_is_missing(lab: Lab) -> None:
    lab.start_server()
    session = ways.session(lab, expected_gpus=None)
    clock = session.clock
    looks = iter(range(100))

    def clock_with_a_loss() -> float:
        if next(looks) == 3:
            lab.smi("missing", "2")
        return clock()

    report = witness.refused(replace(session, clock=clock_with_a_loss))
    assert report.verdict == Verdict.GPU_MISSING
    assert report.summary.startswith("GPUs seen before are gone: 2 (GPU-")


@pytest.mark.parametrize(
    ("value", "verdict"),
    sampled(
        [
            ("[N/A]", Verdict.UNKNOWN),
            ("[Insufficient Permissions]", Verdict.UNKNOWN),
            ("[Unknown Error]", Verdict.DRIVER_FAULT),
            ("[GPU is lost]", Verdict.DRIVER_FAULT),
            ("-1 MiB", Verdict.UNKNOWN),
        ],
        keep=2,
    ),
)
def test_memory_that_is_no_number_is_not_zero(lab: Lab, value: str, verdict: Verdict) -> None:
    lab.smi("override", f"2 memory.used {value}\n")
    report = witness.refused(ways.session(lab), QUICK)
    assert report.verdict == verdict
    assert "GPU 2" in report.summary
    assert [gpu.memory_used_mib for gpu in report.gpus_before] == [0, 0, None, 0]


def test_unwanted_gpu_may_be_unread(lab: Lab) -> None:
    lab.smi("override", "2 memory.used [N/A]\n")
    session = ways.session(lab)
    report = witness.refused(session, QUICK.model_copy(update={"gpus": [2]}))
    assert report.verdict == Verdict.UNKNOWN


def test_slow_nvidia_smi_is_unknown(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia_smi, "TIME_LIMIT_S", 1)
    lab.smi("delay", "3")
    report = witness.refused(ways.session(lab), QUICK)
    assert report.verdict == Verdict.UNKNOWN
    assert "exit status 124 (it did not answer in time)" in report.summary
    assert "persistence mode" in report.remedy


@pytest.mark.parametrize("via", ["ssh", "hypervisor"])
def test_hanging_nvidia_smi_is_unknown_and_left_by_nobody(lab: Lab, via: Via) -> None:
    lab.smi("delay", "40")
    people = witness.everybody(lab)
    session = ways.session(lab, via, script_timeout_s=2)
    report = witness.refused(session, QUICK.model_copy(update={"via": via}))
    assert report.verdict == Verdict.UNKNOWN
    assert "in time" in report.summary or "did not end within 2 s" in report.summary
    assert report.gpus_after == []
    # Nothing of ours stays behind to wait for it.
    wait_until("our own processes are gone", lambda: witness.everybody(lab) == people, 8)
