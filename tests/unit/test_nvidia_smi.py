"""Reading nvidia-smi: rows are numbers or None, and everything else is a problem."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpu_reclaim.commands import Section
from gpu_reclaim.models import GpuApp
from gpu_reclaim.nvidia_smi import (
    CODES,
    is_fault,
    mib,
    parse_apps,
    parse_gpus,
    query_apps,
    query_gpus,
)
from unit.shells import here, stub

CAPTURES = Path(__file__).parent / "captures"
ZERO = "GPU-00000000-0000-0000-0000-000000000000"
A, B = "GPU-aaaaaaaa-0000-0000-0000-000000000000", "GPU-bbbbbbbb-0000-0000-0000-000000000000"


def section(text: str, code: int = 0, word: str = "gpu") -> Section:
    return Section("".join(f"{word} {line}\n" for line in text.rstrip("\n").split("\n")), code)


def captured(name: str, word: str = "gpu") -> Section:
    return section((CAPTURES / name).read_text(), word=word)


def used(text: str, code: int = 0) -> list[int | None]:
    return [gpu.memory_used_mib for gpu in parse_gpus(section(text, code)).gpus]


# Captures of real boards.


@pytest.mark.parametrize(
    ("board", "name", "total", "idle", "load"),
    [
        ("rtx-2080-super", "NVIDIA GeForce RTX 2080 SUPER", 8192, 214, 819),
        ("h100", "NVIDIA H100 80GB HBM3", 81559, 0, 19818),
        ("h100-mig", "NVIDIA H100 80GB HBM3", 81559, 59, 11125),
        ("l40s", "NVIDIA L40S", 46068, 0, 1235),
    ],
)
def test_real_boards_idle_and_under_load(
    board: str, name: str, total: int, idle: int, load: int
) -> None:
    for state, memory in (("idle", idle), ("load", load)):
        reading = parse_gpus(captured(f"{board}-{state}-gpus.csv"))
        gpu = reading.gpus[0]

        assert reading.problem == ""
        assert len(reading.gpus) == 1
        assert (gpu.index, gpu.uuid, gpu.name, gpu.note) == (0, ZERO, name, "")
        assert (gpu.memory_used_mib, gpu.memory_total_mib) == (memory, total)


@pytest.mark.parametrize(
    ("board", "expected"),
    [
        ("rtx-2080-super", {5268: 370, 5267: 230}),
        ("h100", {11327: 2566, 11328: 1542, 11345: 15690}),
        ("h100-mig", {21180: 2296, 21181: 1272, 21198: 7484}),
        ("l40s", {20037: 538, 20038: 681}),
    ],
)
def test_real_compute_processes(board: str, expected: dict[int, int]) -> None:
    apps = parse_apps(captured(f"{board}-load-apps.csv", "app"))

    assert {app.pid: app.memory_used_mib for app in apps} == expected
    assert {app.gpu_uuid for app in apps} == {ZERO}


# Rows.


def test_rows_come_by_index() -> None:
    reading = parse_gpus(section(f"10, {B}, L40S, 5, 46068\n2, {A}, L40S, 0, 46068"))

    assert [gpu.index for gpu in reading.gpus] == [2, 10]
    assert reading.problem == ""


def test_a_name_with_commas_is_a_name() -> None:
    reading = parse_gpus(section(f"0, {A}, Board, 80 GB, HBM3, 7, 81559"))

    assert reading.gpus[0].name == "Board, 80 GB, HBM3"
    assert reading.gpus[0].memory_used_mib == 7
    assert reading.problem == ""


def test_a_name_with_control_characters_is_shown_harmlessly() -> None:
    assert parse_gpus(section(f"0, {A}, L40S\x1b[2J, 0, 1")).gpus[0].name == "L40S\\x1b[2J"


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ("[N/A]", False),
        ("N/A", False),
        ("[Not Supported]", False),
        ("[Insufficient Permissions]", False),
        ("[Unknown Error]", True),
        ("[GPU is lost]", True),
        ("GPU is lost", True),
        ("ERR!", True),
        ("[GPU requires reset]", True),
        ("", False),
        ("-1", False),
        ("0x0", False),
        ("1e3", False),
        ("0.0", False),
        ("\u0660", False),
        ("0 0", False),
        ("0 KiB", False),
    ],
)
def test_what_is_no_number_is_none_and_never_zero(value: str, fault: bool) -> None:
    reading = parse_gpus(section(f"0, {A}, L40S, {value}, 46068\n1, {B}, L40S, 0, 46068"))

    assert [gpu.memory_used_mib for gpu in reading.gpus] == [None, 0]
    assert [is_fault(gpu) for gpu in reading.gpus] == [fault, False]
    assert reading.gpus[0].note != ""


def test_a_lost_gpu_whose_whole_row_reads_so_is_a_fault() -> None:
    reading = parse_gpus(
        section(
            "0, [Unknown Error], [Unknown Error], [Unknown Error], [Unknown Error]\n"
            f"1, {B}, L40S, 0, 46068"
        )
    )

    assert reading.problem == ""
    assert is_fault(reading.gpus[0])
    assert reading.gpus[0].memory_used_mib is None


def test_an_unknown_total_is_none_and_no_fault() -> None:
    gpu = parse_gpus(section(f"0, {A}, L40S, 0, [N/A]")).gpus[0]

    assert (gpu.memory_used_mib, gpu.memory_total_mib, gpu.note) == (0, None, "")


def test_numbers_with_their_unit_are_read_too() -> None:
    assert used(f"0, {A}, L40S, 12 MiB, 46068 MiB") == [12]


@pytest.mark.parametrize(
    ("text", "number"),
    [("0", 0), (" 7 ", 7), ("7 MiB", 7), ("7MiB", None), ("", None), ("-0", None), ("²", None)],
)
def test_mib(text: str, number: int | None) -> None:
    assert mib(text) == number


@pytest.mark.parametrize(
    "line",
    [
        "index, uuid, name, memory.used [MiB], memory.total [MiB]",
        "-, -, -, -, -",
        "Idx, GPU, name, 0, 0",
        f"0, {A}, 0, 46068",
        f"zero, {A}, L40S, 0, 46068",
        f"²3, {A}, L40S, 0, 46068",
        f"-1, {A}, L40S, 0, 46068",
        "0, L40S, L40S, 0, 46068",
        "0, GPU-, L40S, 0, 46068",
        f"0, {A} , x, L40S",
        "No devices were found",
        "WARNING: infoROM is corrupted at gpu 0000:01:00.0",
        "Unable to determine the device handle for GPU0000:02:00.0: Unknown Error",
        "Failed to initialize NVML: Driver/library version mismatch",
    ],
)
def test_a_line_that_is_no_row_makes_the_reading_a_problem(line: str) -> None:
    alone = parse_gpus(section(line))
    mixed = parse_gpus(section(f"0, {B}, L40S, 0, 46068\n{line}"))

    assert "no GPU row" in alone.problem
    assert alone.gpus == []
    assert "no GPU row" in mixed.problem
    assert printable_head(line) in mixed.problem


def printable_head(line: str) -> str:
    return line[:30].strip()


@pytest.mark.parametrize("text", ["", "\n\n", "   "])
def test_no_output_is_a_problem(text: str) -> None:
    assert parse_gpus(section(text)).problem == "nvidia-smi printed no GPU"
    assert parse_gpus(Section("", 0)).problem == "nvidia-smi printed no GPU"


@pytest.mark.parametrize(
    "second", [f"0, {B}, L40S, 0, 46068", f"1, {A}, L40S, 0, 46068", f"0, {A}, L40S, 0, 46068"]
)
@pytest.mark.parametrize("code", [0, 14])
def test_a_gpu_listed_twice_is_a_problem(second: str, code: int) -> None:
    reading = parse_gpus(section(f"0, {A}, L40S, 0, 46068\n{second}", code))

    assert "twice" in reading.problem


def test_fewer_rows_are_fewer_gpus() -> None:
    assert len(parse_gpus(section(f"1, {B}, L40S, 0, 46068")).gpus) == 1


# Exit statuses.


@pytest.mark.parametrize("code", [*CODES, 1, 5, 7, 11, 13, 19, 126, 139, 255])
def test_every_exit_status_but_two_is_a_problem_even_with_good_rows(code: int) -> None:
    reading = parse_gpus(section(f"0, {A}, L40S, 0, 46068", code))

    assert f"exit status {code} ({CODES.get(code, 'an error')})" in reading.problem


def test_a_corrupt_inforom_is_a_warning_beside_valid_rows() -> None:
    text = f"WARNING: infoROM is corrupted at gpu 0000:01:00.0\n0, {A}, L40S, 3, 46068"
    reading = parse_gpus(section(text, 14))

    assert reading.problem == ""
    assert [gpu.memory_used_mib for gpu in reading.gpus] == [3]


def test_a_corrupt_inforom_without_any_row_is_a_problem() -> None:
    reading = parse_gpus(section("WARNING: infoROM is corrupted at gpu 0000:01:00.0", 14))

    assert "infoROM" in reading.problem


def test_a_cut_row_beside_the_warning_is_a_problem() -> None:
    reading = parse_gpus(section(f"0, {A}, L40S, 3, 46068\n1, {B}, L40S", 14))

    assert "no GPU row" in reading.problem


# Compute processes.


@pytest.mark.parametrize(
    "line",
    [
        "",
        "-",
        "-, -, -",
        "Idx, #, type",
        f"{A}, -, [N/A]",
        f"{A}, [N/A], 5",
        f"{A}, Idx, 5",
        f"{A}, 0, 5",
        f"{A}, -5, 5",
        f"{A}, ²3, 5",
        f"{A}, 12 13, 5",
        f"{A}, 12, 5, python3",
        f"{A}, 12",
        "No running processes found",
    ],
)
def test_a_line_that_is_no_process_is_left_out(line: str) -> None:
    apps = parse_apps(section(f"{line}\n{A}, 12, 5", word="app"))

    assert apps == [GpuApp(gpu_uuid=A, pid=12, memory_used_mib=5)]


@pytest.mark.parametrize("value", ["[N/A]", "[Not Supported]", "[Insufficient Permissions]", ""])
def test_memory_of_a_process_that_is_no_number_is_none(value: str) -> None:
    apps = parse_apps(section(f"{A}, 12, {value}", word="app"))

    assert [app.memory_used_mib for app in apps] == [None]


# The shell text, really run.


@pytest.mark.usefixtures("shell")
@pytest.mark.parametrize(
    ("body", "texts", "code"),
    [
        ("echo one; echo two", "one\ntwo", 0),
        ("echo out; echo err >&2; exit 9", "out\nerr", 9),
        ("printf 'no newline'; exit 14", "no newline", 14),
        (r"printf '%s\n' 'a \b & / $(x)'", "a \\b & / $(x)", 0),
        ("exit 6", "", 6),
        ("kill -s KILL $$", "", 137),
    ],
)
def test_the_query_prints_both_streams_and_the_exit_status(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    body: str,
    texts: str,
    code: int,
) -> None:
    put_stub(tmp_path, monkeypatch, body)
    result = here({"gpus": query_gpus(), "apps": query_apps()}, together=True)

    assert result.sections["gpus"] == section(texts, code)
    assert result.sections["apps"] == section(texts, code, "app")
    assert result.stderr.replace("Killed", "").strip() in ("", "sh: 1:")


def test_the_query_asks_for_few_fields_without_header_and_units(
    shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_stub(tmp_path, monkeypatch, 'echo "$@"')
    result = here({"gpus": query_gpus(), "apps": query_apps()})

    assert result.sections["gpus"].value("gpu") == (
        "--query-gpu=index,uuid,name,memory.used,memory.total --format=csv,noheader,nounits"
    )
    assert result.sections["apps"].value("app") == (
        "--query-compute-apps=gpu_uuid,pid,used_memory --format=csv,noheader,nounits"
    )


def test_a_missing_nvidia_smi_is_a_problem(shell: str) -> None:
    reading = parse_gpus(here({"gpus": query_gpus()}).sections["gpus"])

    assert "exit status 127 (nvidia-smi is not installed or not on PATH)" in reading.problem


def test_an_nvidia_smi_that_hangs_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_stub(tmp_path, monkeypatch, "exec sleep 600")
    reading = parse_gpus(here({"gpus": query_gpus(0.2)}).sections["gpus"])

    assert "exit status 124 (it did not answer in time)" in reading.problem


def put_stub(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    stub(folder, "nvidia-smi", body)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
