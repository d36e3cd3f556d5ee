"""The check for machines with real GPUs, run on stand-ins: its document, refusals and failures."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lab.waiting import wait_until
from real_gpu.conftest import LAG_S, Run
from real_gpu.machine import ROOT, Machine, finish, read_until

pytestmark = pytest.mark.lab

SHAPES = ["plain", "renamed", "orphan", "every node", "ignores term"]
MIB, LARGE_MIB = 1024, 8192


@pytest.fixture
def foreign(machine: Machine) -> Iterator[subprocess.Popen[bytes]]:
    """Somebody else's process that holds a GPU."""
    text = "import sys; held = open(sys.argv[1]); print(flush=True); sys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", text, machine.folder / "dev/nvidia1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


def test_on_a_quiet_machine_every_check_holds(quiet: Run) -> None:
    document = quiet.document

    assert document["failed"] == []
    assert quiet.code == 0
    assert quiet.left == []
    assert [done["name"] for done in document["rounds"]] == [*SHAPES, "all together"]
    assert {done["verdict"] for done in document["rounds"]} == {"clean"}
    assert document["idle_mib"] == {"0": 0, "1": 0}
    assert document["not_checked"] == []


def test_each_holder_is_ended_by_the_signal_that_it_needs(quiet: Run) -> None:
    *single, together = quiet.document["rounds"]

    assert [[(x["signal"], x["outcome"]) for x in done["ended"]] for done in single] == [
        *[[("TERM", "ended")]] * 4,
        [("KILL", "ended")],
    ]
    assert sorted(x["signal"] for x in together["ended"]) == ["KILL", *["TERM"] * 4]
    assert [len(done["bystanders"]) for done in [*single, together]] == [2] * 6
    assert all(all(done["bystanders"].values()) for done in [*single, together])


def test_the_shapes_are_what_they_claim(quiet: Run) -> None:
    rounds = {done["name"]: done for done in quiet.document["rounds"]}

    assert rounds["renamed"]["holders"][0]["shown"] == "sglang::schedul sglang::scheduler_TP0"
    assert rounds["renamed"]["ended"][0]["name"] == "sglang::scheduler_TP0"
    assert [rounds[name]["holders"][0]["orphan"] for name in ("plain", "orphan")] == [False, True]
    opener = rounds["every node"]
    assert len(opener["ended"][0]["devices"]) == 3
    assert opener["mib_held"] == {"0": MIB, "1": 0}
    assert opener["partly"] == {"0": [opener["holders"][0]["pid"]], "1": []}


def test_the_lag_of_killed_memory_is_measured(quiet: Run) -> None:
    release = quiet.document["release"]

    assert release["mib_held"] == LARGE_MIB
    assert 0 <= release["gone_s"] < LAG_S
    assert LAG_S <= release["free_s"] < 5
    assert 0 < release["in_use_s"] < release["free_s"]
    assert 0 < release["reading_s"] < release["free_s"]
    smi = quiet.document["smi_seconds"]
    assert 0 < smi["median"] <= smi["max"]


def test_beside_a_foreign_holder_it_refuses(
    machine: Machine, foreign: subprocess.Popen[bytes]
) -> None:
    code, document = machine.check()

    assert code == 2
    assert "did not start" in document["refused"]
    assert [row["pid"] for row in document["holders"]] == [foreign.pid]
    assert foreign.poll() is None
    assert machine.holders() == [foreign.pid]


@pytest.mark.parametrize(
    ("obstruct", "reason"),
    [
        (lambda x: x.state("stuck", "1 500"), r"in use.*1: 500"),
        (lambda x: x.state("fail", "9 no driver"), "no plan can be made"),
        (lambda x: x.state("override", "0 memory.used [N/A]"), "no plan can be made"),
        (lambda x: (x.folder / "lib/libcuda.so.1").write_text(""), "CUDA driver's library"),
    ],
    ids=["memory in use", "nvidia-smi fails", "memory unknown", "no libcuda"],
)
def test_where_nothing_could_be_proven_it_refuses(
    machine: Machine, obstruct: Callable[[Machine], object], reason: str
) -> None:
    obstruct(machine)
    code, document = machine.check()

    assert code == 2
    assert re.search(reason, document["refused"])
    assert list((machine.folder / "state/mem").iterdir()) == []


@pytest.mark.parametrize(
    ("reading", "expected"),
    [
        # The last of the readings before the first holder starts: the plan shows the intruder.
        (7, {"plain": "the plan names others", "renamed": "did not start"}),
        # The one after the first reclaim: the next round does not begin.
        (8, {"plain": "", "renamed": "did not start"}),
    ],
)
def test_whoever_comes_later_is_not_touched(
    machine: Machine, reading: int, expected: dict[str, str]
) -> None:
    machine.intrude_after(reading)
    code, document = machine.check()
    intruder = int((machine.folder / "intruder").read_text())
    try:
        assert machine.holders() == [intruder]
        assert code == 1
        reasons = {done["name"]: done["not_run"] for done in document["rounds"]}
        assert all(text in reasons[name] for name, text in expected.items())
        assert "renamed: run" in document["failed"]
        assert ("plain: run" in document["failed"]) == bool(expected["plain"])
    finally:
        os.kill(intruder, signal.SIGKILL)


def test_memory_that_stays_is_a_failure(machine: Machine) -> None:
    # The first round has looked around by then, and has nothing left to end but its own holder.
    machine.state("lag", "60")
    process = machine.start("--settle-s", "1")
    read_until(process, "bystander namesake")
    code, document = finish(process)

    assert code == 1
    assert document["rounds"][0]["verdict"] == "held_unseen"
    assert {"plain: verdict", "plain: memory back at idle"} <= set(document["failed"])
    assert "in use" in document["rounds"][1]["not_run"]
    assert {"renamed: run", "release: run"} <= set(document["failed"])
    assert machine.holders() == []


def command_line(pid: int) -> bytes:
    """What a process shows; a zombie, which nobody here may be there to reap, shows nothing."""
    file = Path(f"/proc/{pid}/cmdline")
    return file.read_bytes() if file.exists() else b""


def test_killed_it_leaves_nothing(machine: Machine) -> None:
    process = machine.start()
    pid = int(read_until(process, r"bystander namesake: pid (\d+)")[1])
    wait_until("a holder holds a GPU", lambda: machine.holders() != [], timeout=60)
    process.kill()
    process.communicate()

    wait_until("all its processes are gone", lambda: machine.holders() == [], timeout=60)
    wait_until("the bystander is gone", lambda: command_line(pid) == b"", timeout=60)


def test_it_needs_no_prefect() -> None:
    text = "import sys, gpu_check; print(*sys.modules, sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", text],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT / "benchmarks",
    )
    names = {line.partition(".")[0] for line in done.stdout.splitlines()}

    assert "gpu_reclaim" in names
    assert not names & {"prefect", "paramiko", "pydantic_settings", "proxmoxer", "requests"}
