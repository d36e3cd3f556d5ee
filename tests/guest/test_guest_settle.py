"""Waiting on evidence: as long as needed and no longer, by what nvidia-smi was asked."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from gpu_reclaim.models import ReclaimPolicy, Verdict
from gpu_reclaim.reclaim import reclaim
from gpu_reclaim.settling import settle
from guest import ways, witness
from lab.lab import Lab

pytestmark = pytest.mark.lab

SHORT = ReclaimPolicy(term_grace_s=1, settle_timeout_s=1)


def free_at_the_end(lab: Lab) -> int:
    """How many readings in a row were free at the end; none may be free before them.

    The survey's reading is left out.
    """
    after = [reading == witness.FREE for reading in witness.readings(lab)[1:]]
    first = after.index(True)
    assert all(after[first:])
    return len(after) - first


@pytest.mark.parametrize("samples", [1, 3, 6])
def test_lingering_memory_is_waited_for_and_no_longer(lab: Lab, samples: int) -> None:
    lab.smi("lag", "4" if samples == 3 else "0.5")
    lab.start_server()
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        time.sleep(seconds)

    session = replace(ways.session(lab), sleep=sleep)
    report = reclaim(session, ReclaimPolicy(stable_samples=samples))
    assert report.verdict == Verdict.CLEAN
    # One more than the wait needed: the final look.
    assert free_at_the_end(lab) == samples + 1
    waited = len(witness.readings(lab)) - 1 - (samples + 1)
    assert waited >= (3 if samples == 3 else 1)
    assert len(pauses) == waited + samples - 1
    assert max(pauses) <= 1
    assert pauses[waited:] == [pytest.approx(0.05)] * (samples - 1)


def test_free_memory_is_only_confirmed(lab: Lab) -> None:
    lab.hold("--gpus", "0")
    reclaim(ways.session(lab), ReclaimPolicy())
    assert len(witness.readings(lab)) == 1 + 3 + 1
    assert free_at_the_end(lab) == 3 + 1


def between(lab: Lab, steps: list[str | None]) -> Callable[[float], None]:
    """A `sleep` that changes the stuck memory: one step each time, the last one stays."""
    rest = iter(steps)

    def sleep(_seconds: float) -> None:
        step = next(rest, ...)
        if step is not ...:
            lab.smi("stuck", step)

    return sleep


def test_memory_that_comes_back_starts_the_count_again(lab: Lab) -> None:
    steps = [None, "1 500\n", None]
    session = replace(ways.session(lab), sleep=between(lab, steps))
    settled = settle(session, ReclaimPolicy())
    used = [sample.memory_mib[1] for sample in settled.samples]
    assert (used, settled.free) == ([0, 0, 500, 0, 0, 0], True)


def test_memory_that_drains_is_followed_to_the_end(lab: Lab) -> None:
    lab.smi("stuck", "1 90\n")
    steps = ["1 60\n", "1 30\n", None]
    session = replace(ways.session(lab), sleep=between(lab, list(steps)))
    settled = settle(session, ReclaimPolicy())
    assert [sample.memory_mib[1] for sample in settled.samples] == [90, 60, 30, 0, 0, 0]


def test_memory_that_never_stays_free_is_never_clean(lab: Lab) -> None:
    """Free at the last reading is not free: the samples have to agree."""
    steps = ["1 5000\n", None] * 50
    change, ticks = between(lab, list(steps)), [0.0]

    def sleep(seconds: float) -> None:
        change(seconds)
        ticks[0] += 3

    session = replace(
        ways.session(lab), sleep=sleep, clock=lambda: ticks[0] + time.monotonic() * 1e-6
    )
    report = witness.refused(session, ReclaimPolicy(settle_timeout_s=11))
    assert [reading[1] for reading in witness.readings(lab)[1:6]] == [0, 5000, 0, 5000, 0]
    assert report.verdict not in (Verdict.CLEAN, Verdict.RESIDUE)


def test_memory_that_never_goes_is_held_unseen(lab: Lab) -> None:
    lab.start_server()
    lab.smi("stuck", "2 7000\n")
    report = witness.refused(ways.session(lab), SHORT)
    assert report.verdict == Verdict.HELD_UNSEEN
    assert report.summary == "GPU 2: 7000 MiB in use and no holder can be seen"
    assert "look from the machine that runs the driver (the Proxmox node)" in report.remedy
    assert "GPU reset or reboot, decided by a person" in report.remedy
    assert [gpu.memory_used_mib for gpu in report.gpus_after] == [0, 0, 7000, 0]
    assert lab.server_pids() == {}
    settled = next(step for step in report.steps if step.name == "settle")
    assert settled.seconds >= 1


def test_residue_is_called_residue(lab: Lab) -> None:
    lab.start_server()
    lab.smi("stuck", "1 40\n")
    report = reclaim(ways.session(lab), SHORT.model_copy(update={"settle_timeout_s": 20}))
    assert (report.verdict, report.summary) == (
        Verdict.RESIDUE,
        "no unprotected holder; GPU 1: 40 MiB in use, at most 100 allowed",
    )
    assert [gpu.memory_used_mib for gpu in report.gpus_after] == [0, 40, 0, 0]


@pytest.mark.parametrize("change", [{"strict_zero": True}, {"residue_mib": 39}])
def test_residue_is_refused_on_demand(lab: Lab, change: dict[str, int]) -> None:
    lab.smi("stuck", "1 40\n")
    report = witness.refused(ways.session(lab), SHORT.model_copy(update=change))
    assert report.verdict == Verdict.HELD_UNSEEN
    assert report.summary == "GPU 1: 40 MiB in use and no holder can be seen"


def test_residue_of_a_holder_is_no_residue(lab: Lab) -> None:
    pid = lab.hold("--gpus", "1", "--mib", "40")
    report = reclaim(ways.session(lab), ReclaimPolicy())
    assert (report.verdict, witness.row(report, pid).outcome) == (Verdict.CLEAN, "ended")
