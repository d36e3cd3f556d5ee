"""The lab's stand-ins of SGLang's tuning scripts: what they say, write and hold."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_reclaim.errors import BadInput
from gpu_reclaim.moeconfigs import GRID, parse_name, parse_table
from gpu_reclaim.moeoutput import failure, parse_log
from lab.guest import sglang_moe
from lab.waiting import wait_until
from unit.stand_in import MOE_FILE, make_home
from unit.tuner import Tuner

H200_FILE = "E=256,N=256,device_name=NVIDIA_H200.json"
NO_ROOM = "OutOfResources: out of resource: shared memory, Required: 147456, Hardware limit: 101376"
SMALL = sglang_moe.heuristic(16) | {"num_warps": 4, "num_stages": 2}
HUGE = sglang_moe.best(16) | {"BLOCK_SIZE_M": 256, "BLOCK_SIZE_K": 256, "num_stages": 5}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_home(tmp_path_factory.mktemp("home"))


@pytest.fixture
def tuner(home: Path, tmp_path: Path) -> Iterator[Tuner]:
    tuner = Tuner(home, tmp_path)
    yield tuner
    tuner.end()


def test_one_size_makes_a_file_with_one_key(tuner: Tuner) -> None:
    status, output, errors = tuner.run("--tp-size 4 --batch-size 64 --tune")
    assert status == 0, errors
    lines = output.splitlines()
    assert lines[0] == f"Start tuning over 1920 configurations to create {MOE_FILE}..."
    assert re.search(r"\d{4}\] Completed tuning for batch_size=64$", lines[1])
    assert "(BenchmarkWorker pid=" in lines[1]
    assert lines[2] == f"Writing best config to {MOE_FILE}..."
    assert re.fullmatch(r"Tuning took 0\.\d\d seconds", lines[3])
    assert "\r100%|##########| 1920/1920 [" in errors.replace("\n", "\r")
    log = parse_log(output + errors)
    assert (log.planned_name, log.written, log.rows) == (MOE_FILE, MOE_FILE, 1920)
    assert (log.done, log.progress) == ((64,), (1920, 1920))
    assert tuner.files() == {MOE_FILE: {"64": sglang_moe.best(64)}}
    name = parse_name(MOE_FILE)
    assert name is not None
    assert parse_table((tuner.work / MOE_FILE).read_text(), name) == {64: sglang_moe.best(64)}
    assert tuner.processes() == {}


@pytest.mark.parametrize(
    ("flags", "name", "keys"),
    [
        ("--tp 4", MOE_FILE, GRID),
        ("", MOE_FILE.replace("N=256", "N=512"), GRID),
        ("--tp 4 --batch-sizes 4 256", MOE_FILE, (4, 256)),
        ("--tp 4 --ep 2 --batch-size 8", MOE_FILE.replace("256,N=256", "128,N=512"), (8,)),
        (
            "--tp 4 --batch-size 8 --dtype fp8_w8a8 --per-channel-quant",
            MOE_FILE.replace(".json", ",dtype=fp8_w8a8,per_channel_quant=True.json"),
            (8,),
        ),
    ],
)
def test_the_file_is_the_one_that_a_server_of_these_flags_wants(
    tuner: Tuner, flags: str, name: str, keys: tuple[int, ...]
) -> None:
    tuner.tell(seconds=0.01)
    status, _, errors = tuner.run(f"{flags} --tune")
    assert status == 0, errors
    assert tuner.files() == {name: {str(key): sglang_moe.best(key) for key in keys}}


@pytest.mark.parametrize(
    ("space", "chosen"),
    [
        ([SMALL, sglang_moe.best(4096)], SMALL),
        ([HUGE, sglang_moe.best(4096), SMALL], SMALL),
        ([HUGE], "OutOfResources: out of resource: shared memory, Required: 983040,"),
        ({"8": SMALL}, "ValueError: --search-space-file must contain a JSON list"),
    ],
)  # fmt: skip
def test_of_a_given_space_the_best_that_fits(tuner: Tuner, space: object, chosen: Any) -> None:
    (tuner.work / "space.json").write_text(json.dumps(space))
    flags = "--tp 4 --batch-size 8 --tune --search-space-file space.json"
    status, output, errors = tuner.run(flags)
    if isinstance(chosen, str):
        assert (status, tuner.files()) == (1, {})
        assert chosen in output + errors
    else:
        assert tuner.files()[MOE_FILE] == {"8": chosen}


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [
        ({}, ["nvidia0", "nvidia1", "nvidia2", "nvidia3"]),
        ({"CUDA_VISIBLE_DEVICES": "2"}, ["nvidia2"]),
        ({"CUDA_VISIBLE_DEVICES": "1,3"}, ["nvidia1", "nvidia3"]),
    ],
)
def test_it_holds_the_gpus_that_it_sees_until_it_is_told_to_end(
    tuner: Tuner, visible: dict[str, str], gpus: list[str]
) -> None:
    tuner.tell(seconds=30)
    process = tuner.start("--tp 4 --tune", **visible)
    expected = sorted(["gcs_server", "raylet", *["ray::BenchmarkWorker.tune"] * len(gpus)])

    def titles() -> list[str]:
        return sorted(title for pid, title in tuner.processes().items() if pid != process.pid)

    wait_until("it holds them", lambda: tuner.gpus() == gpus and titles() == expected)
    sessions = {os.getsid(pid) for pid in tuner.processes()}
    assert len(sessions) == len(gpus) + 3
    assert tuner.used_mib() == [
        9000 + 100 * gpu if f"nvidia{gpu}" in gpus else 0 for gpu in range(4)
    ]
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == signal.SIGTERM
    assert tuner.processes() == {}
    assert tuner.files() == {}


def test_without_a_gpu_it_ends(tuner: Tuner) -> None:
    status, _, errors = tuner.run("--tp 4 --tune", CUDA_VISIBLE_DEVICES="-1")
    assert status == 1
    assert "KeyError: 'GPU'" in errors
    assert tuner.processes() == {}


def test_a_worker_that_is_ended_costs_everything(tuner: Tuner) -> None:
    tuner.tell(seconds=30)
    process = tuner.start("--tp 4 --batch-size 8 --tune")
    wait_until("they work", lambda: len(tuner.gpus()) == 4)
    workers = {pid for pid, title in tuner.processes().items() if title.startswith("ray::")}
    os.kill(min(workers), signal.SIGKILL)
    output, errors = process.communicate(timeout=10)
    assert process.returncode == 1
    assert "ActorDiedError" in errors
    assert "Writing" not in output
    assert tuner.processes() == {}


@pytest.mark.parametrize(
    ("fault", "outcome", "files"),
    [
        ("out of shared memory", (1, NO_ROOM),
         {}),
        ("out of shared memory", (1, "assert best_config is not None"), {}),
        ("crashes", (1, "CUDA error: an illegal memory access was encountered"), {}),
        ("writes nothing", (0, f"Writing best config to {MOE_FILE}"), {}),
        ("wrong name", (0, f"to create {H200_FILE}"), {H200_FILE: {"8": sglang_moe.best(8)}}),
        ("wrong size", (0, "Writing"), {MOE_FILE: {"16": sglang_moe.best(8)}}),
        ("bad row", (0, "Writing"), {MOE_FILE: {"8": {**sglang_moe.best(8), "BLOCK_SIZE_M": 24}}}),
        ("metadata", (0, "Writing"),
         {MOE_FILE: {"triton_version": "3.6.0", "8": sglang_moe.best(8)}}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("key", ["8", "*"])
def test_what_goes_wrong(
    tuner: Tuner, key: str, fault: str, outcome: tuple[int, str], files: dict[str, Any]
) -> None:
    status, said = outcome
    tuner.tell({key: fault})
    found, output, errors = tuner.run("--tp 4 --batch-size 8 --tune")
    assert found == status
    assert said in output + errors
    assert ("Traceback" in errors) == bool(status)
    assert tuner.files() == files
    assert tuner.processes() == {}
    name = parse_name(MOE_FILE)
    assert name is not None
    if fault in ("bad row", "metadata"):
        with pytest.raises(BadInput):
            parse_table((tuner.work / MOE_FILE).read_text(), name)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("out of shared memory", "a row needs 147456 bytes of shared memory"),
        ("crashes", "CUDA failed: CUDA error: an illegal memory access was encountered"),
    ],
)
def test_its_failures_are_understood(tuner: Tuner, fault: str, told: str) -> None:
    tuner.tell({"8": fault})
    status, output, errors = tuner.run("--tp 4 --batch-size 8 --tune")
    assert failure(status, output + errors, 60).startswith(told)


def test_one_size_that_goes_wrong_costs_all_others(tuner: Tuner) -> None:
    tuner.tell({"8": "crashes"})
    assert tuner.run("--tp 4 --batch-sizes 4 8 16 --tune")[0] == 1
    assert tuner.files() == {}
    assert tuner.run("--tp 4 --batch-size 16 --tune")[0] == 0
    assert list(tuner.files()[MOE_FILE]) == ["16"]


def ended(process: subprocess.Popen[str], seconds: float) -> bool:
    """Whether it ends within so many seconds."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


@pytest.mark.parametrize(("fault", "ends"), [("times out", True), ("ignores TERM", False)])
def test_it_can_go_on_for_ever(tuner: Tuner, fault: str, ends: bool) -> None:
    tuner.tell({"8": fault})
    process = tuner.start("--tp 4 --batch-size 8 --tune")
    wait_until("it holds them", lambda: len(tuner.gpus()) == 4)
    assert not ended(process, 1)
    process.send_signal(signal.SIGTERM)
    if ends:
        assert process.wait(10) == signal.SIGTERM
        assert tuner.processes() == {}
        return
    assert not ended(process, 1)
    process.kill()
    process.wait(10)
    assert len(tuner.gpus()) == 4


def test_ray_can_be_left_behind(tuner: Tuner) -> None:
    tuner.tell({"8": "leaves ray"})
    process = tuner.start("--tp 4 --batch-size 8 --tune")
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "Tuning took" in output
    assert sorted(tuner.processes().values()) == ["ray::BenchmarkWorker.tune", "raylet"]
    assert tuner.gpus() == ["nvidia0"]
    assert tuner.files() == {MOE_FILE: {"8": sglang_moe.best(8)}}
