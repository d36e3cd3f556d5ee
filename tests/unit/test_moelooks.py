"""What is looked at on a host before MoE kernels are tuned: by real shells, of real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_reclaim import moelooks
from gpu_reclaim.commands import Section
from gpu_reclaim.errors import BadInput
from gpu_reclaim.moelooks import (
    HELPFUL,
    MOST_TABLE,
    Device,
    Environment,
    parse_device,
    parse_environment,
    ranks,
    read_devices,
    read_environment,
    read_lookups,
    read_tables,
    sees_the_same,
)
from gpu_reclaim.session import Session
from gpu_reclaim.transport.scripted import Answer
from unit.moe_host import GPU, NAME, moe_scene, with_file, without_file
from unit.shells import here, need, stub
from unit.tuned import UNIT, on_this_machine

SECRET = "hf_do-not-show"
Told = dict[str, Answer | list[Answer]]
CARDS = "read what GPUs can do"

SYSTEMCTL = """
for name in "$@"; do :; done
[ "$name" = sglang.service ] || exit 1
case " $* " in
  *" MainPID "*) echo "MainPID=$(cat '@HOME@/pid')";;
  *" InvocationID "*) echo "InvocationID=$(cat '@HOME@/run')";;
  *" Environment "*) echo "Environment=$(cat '@HOME@/environment')";;
esac
"""
JOURNALCTL = """
for word in "$@"; do :; done
case "$word" in *_INVOCATION_ID=0123abc | *_INVOCATION_ID=) cat '@HOME@/journal';; esac
"""


@pytest.fixture
def home(tmp_path: Path, shell: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host's systemd, which knows of one unit."""
    own = tmp_path / "it is own"
    own.mkdir()
    tools = tmp_path / "stand-ins"
    tools.mkdir()
    for name, text in (("systemctl", SYSTEMCTL), ("journalctl", JOURNALCTL)):
        stub(tools, name, text.replace("@HOME@", str(own)))
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    for name, text in (("pid", "0"), ("run", "0123abc"), ("environment", ""), ("journal", "")):
        (own / name).write_text(f"{text}\n")
    return own


@pytest.fixture
def session(home: Path) -> Session:
    return on_this_machine(home)


@contextmanager
def server(home: Path, env: dict[str, str]) -> Iterator[None]:
    """A main process with that environment and no other."""
    with subprocess.Popen([need("sleep"), "60"], env=env) as process:
        (home / "pid").write_text(f"{process.pid}\n")
        try:
            yield
        finally:
            process.kill()


def shown(home: Path, env: dict[str, str]) -> tuple[Environment, str]:
    """What is read of it, and all that was printed."""
    with server(home, env):
        section = here({"env": moelooks.environment(UNIT)}).section("env")
    return parse_environment(section), section.text


def test_only_what_helps_is_read(home: Path) -> None:
    helpful = {name: f"/x/{name.lower()} y=z" for name in HELPFUL}
    hidden = {"HF_TOKEN": SECRET, "MY_PATH": SECRET, "PATHS": SECRET, "HF_HOME2": SECRET}
    found, text = shown(home, {**helpful, **hidden, "OPENAI_API_KEY": SECRET})

    assert found == Environment(helpful)
    assert SECRET not in text
    assert not [x for x in HELPFUL if "TOKEN" in x or "KEY" in x]


def test_a_value_of_several_lines_is_one(home: Path) -> None:
    """What looks like a variable in it is none."""
    env = {"HF_HOME": "/a\nCUDA_HOME=/b\nset 1\n", "NOTE": f"x\nPATH={SECRET}", "PATH": "/bin"}
    found, text = shown(home, env)

    assert found.values == {"HF_HOME": "/a CUDA_HOME=/b set 1 ", "PATH": "/bin"}
    assert (found.of_unit, SECRET in text) == (False, False)


@pytest.mark.parametrize(
    ("folder", "of_unit", "expected"),
    [
        ("", "", ("", False)),
        ("/o", "", ("/o", False)),
        ("/o", "A=1 SGLANG_MOE_CONFIG_DIR=/o B=2", ("/o", True)),
        ("/o", "SGLANG_MOE_CONFIG_DIR=/o", ("/o", True)),
        ("/o p", '"SGLANG_MOE_CONFIG_DIR=/o p" A=1', ("/o p", True)),
        ("/o", "MY_SGLANG_MOE_CONFIG_DIR=/o X=SGLANG_MOE_CONFIG_DIR", ("/o", False)),
    ],
)
def test_where_its_folder_of_configs_is_set(
    home: Path, folder: str, of_unit: str, expected: tuple[str, bool]
) -> None:
    (home / "environment").write_text(f"{of_unit}\n")
    found, _ = shown(home, {"SGLANG_MOE_CONFIG_DIR": folder} if folder else {"A": "1"})

    assert (found.folder, found.of_unit) == expected
    assert found.values == {}


@pytest.mark.parametrize("pid", ["0", "", "4194304999"])
def test_no_main_process(home: Path, session: Session, pid: str) -> None:
    (home / "pid").write_text(f"{pid}\n")

    assert read_environment(session, UNIT) == Environment()


def test_the_environment_of_a_unit_that_is_none(home: Path, session: Session) -> None:
    with server(home, {"PATH": "/bin"}):
        assert read_environment(session, UNIT) == Environment({"PATH": "/bin"})
        assert read_environment(session, "it's.service") == Environment()


# What it is run with, and what it sees.


@pytest.mark.parametrize(
    ("values", "models"),
    [
        ({}, "/root/.cache/huggingface"),
        ({"HOME": "/home/llm"}, "/home/llm/.cache/huggingface"),
        ({"HF_HOME": "/models"}, "/models"),
        ({"HOME": "/home/llm", "HF_HOME": "/models"}, "/models"),
    ],
)
def test_scripts_see_the_models_of_its_user_and_leave_nothing_there(
    values: dict[str, str], models: str
) -> None:
    own = {"HF_MODULES_CACHE": "/srv/modules", "HF_HUB_OFFLINE": "0", "PATH": "/opt/bin"}
    found = Environment({**own, **values}).for_scripts

    assert (found["HF_HOME"], found["HOME"], found["PATH"]) == (models, "/root", "/opt/bin")
    assert found["HF_MODULES_CACHE"] == "/root/.cache/huggingface/modules"
    assert (found["HF_HUB_OFFLINE"], found["PYTHONDONTWRITEBYTECODE"]) == ("1", "1")


def test_it_sees_what_the_host_sees(home: Path, session: Session) -> None:
    folder = home / "it's here"
    folder.mkdir()
    with server(home, {"PATH": "/bin"}):
        assert sees_the_same(session, UNIT, [str(folder), "/", f"{home}/nowhere"]) == []


@pytest.mark.parametrize("pid", ["0", "", "4194304999"])
def test_no_process_sees_anything(home: Path, session: Session, pid: str) -> None:
    (home / "pid").write_text(f"{pid}\n")

    assert sees_the_same(session, UNIT, [str(home), "/"]) == [str(home), "/"]


@pytest.mark.usefixtures("root")
def test_a_root_of_its_own(home: Path, session: Session, tmp_path: Path) -> None:
    """As in a container: what is of the same path there is another folder, or none."""
    inside = tmp_path / "image"
    (inside / "var/lib").mkdir(parents=True)
    (inside / "own").mkdir()
    text = "import os, sys, time; os.chroot(sys.argv[1]); print(1, flush=True); time.sleep(60)"
    argv = [sys.executable, "-c", text, str(inside)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        (home / "pid").write_text(f"{process.pid}\n")
        paths = ["/var/lib", str(home), "/own", "/nowhere"]
        found = sees_the_same(session, UNIT, paths)
        process.kill()

    assert found == paths[:-1]


# Its log.


def test_what_its_present_run_says(home: Path, session: Session) -> None:
    lines = ["noise", without_file(), "Decode batch", with_file(rank=1), with_file(rank=1)]
    (home / "journal").write_text("\n".join([*lines, ""]))

    found = [(x.rank, x.found) for x in read_lookups(session, UNIT)]
    assert found == [("TP0", "none"), ("TP1", "own")]


def test_all_kinds_of_lines_are_let_through(home: Path, session: Session) -> None:
    down = replace(NAME, down=True)
    said = [
        without_file().replace("Using default MoE kernel config.", text)
        for text in (
            "Using default MoE kernel config.",
            "Using MoE kernel config with down_moe=False.",
        )
    ]
    path = with_file(down).rpartition(" from ")[2].rstrip(".")
    said.append(f"[x TP3] Down MoE config file not found at {path}; reusing the tuned config")
    (home / "journal").write_text("\n".join([*said, ""]))

    assert [x.name for x in read_lookups(session, UNIT)] == [NAME, down]


@pytest.mark.parametrize(("run", "journal"), [("", with_file()), ("fedcba", with_file()), ("", "")])
def test_another_run_says_nothing(home: Path, session: Session, run: str, journal: str) -> None:
    (home / "run").write_text(f"{run}\n")
    (home / "journal").write_text(f"{journal}\n")

    assert read_lookups(session, UNIT) == []


def test_of_a_long_log_the_last_lines_are_read(home: Path, session: Session) -> None:
    lines = [with_file(rank=rank) for rank in range(600)]
    (home / "journal").write_text("\n".join([*lines, ""]))

    found = [x.rank for x in read_lookups(session, UNIT)]
    assert found == [f"TP{rank}" for rank in range(100, 600)]


# Its GPUs.


@pytest.mark.parametrize(
    ("line", "device"),
    [
        (f"0, {GPU}, 12.0", Device(0, NAME.device, (12, 0))),
        ("11, NVIDIA H200, 9.0 ", Device(11, "NVIDIA_H200", (9, 0))),
        ("1, NVIDIA L40S", Device(1, "NVIDIA_L40S")),
        ("1, NVIDIA H100, PCIe, 9.0", Device(1, "NVIDIA_H100,_PCIe", (9, 0))),
        ("", None),
        ("No devices were found", None),
        ("x, NVIDIA L40S, 8.9", None),
        ("1, ", None),
    ],
)
def test_a_gpu(line: str, device: Device | None) -> None:
    assert parse_device(line) == device


def test_a_number_that_is_no_capability() -> None:
    assert parse_device("0, GPU 12, 12.0", with_capability=False) == Device(0, "GPU_12")


def test_a_driver_that_tells_it_is_asked_once() -> None:
    made = moe_scene()

    assert [x.capability for x in read_devices(made.session)] == [(12, 0)] * 4
    assert made.asked == [CARDS]


@pytest.mark.parametrize("code", [2, 1, 6])
def test_a_driver_that_does_not(code: int) -> None:
    unknown: Answer = {"gpus": Section("gpu no field", code)}
    told: Told = {CARDS: [unknown, {"gpus": "gpu 0, NVIDIA L40S"}]}
    made = moe_scene(told)

    assert read_devices(made.session) == [Device(0, "NVIDIA_L40S")]
    fields = ["index,name,compute_cap", "index,name"]
    bodies = [x.sections["gpus"] for x in made.direct.asked]
    assert [f"--query-gpu={x} " in body for x, body in zip(fields, bodies, strict=True)] == [
        *(True, True),
    ]


def test_a_warning_is_no_refusal() -> None:
    told: Told = {CARDS: {"gpus": Section("gpu 0, NVIDIA L40S, 8.9", 14)}}

    assert read_devices(moe_scene(told).session) == [Device(0, "NVIDIA_L40S", (8, 9))]


@pytest.mark.parametrize(
    ("value", "number"), [(4, 4), (None, 1), (0, 1), (-1, 1), ("4", 1), (2.0, 1)]
)
def test_ranks(value: object, number: int) -> None:
    assert ranks({"tp_size": value}, "tp_size") == number


# Its files.


def test_files(tmp_path: Path, session: Session) -> None:
    folder = tmp_path / "it's [a] folder, 100 %"
    folder.mkdir()
    texts = {
        "E=1,block_shape=[128, 128].json": b'{"1": 2}\nfile 1 00\n',
        "empty": b"",
        "bytes": b"\xff\x00a",
        "longest": b"x" * MOST_TABLE,
    }
    for name, data in texts.items():
        (folder / name).write_bytes(data)
    (folder / "a folder").mkdir()
    paths = [str(folder / name) for name in (*texts, "gone", "a folder")]
    found = read_tables(session, paths)

    assert found == {
        str(folder / name): data.decode("utf-8", "replace") for name, data in texts.items()
    }
    assert read_tables(session, []) == {}


def test_a_file_that_is_too_long(tmp_path: Path, session: Session) -> None:
    (tmp_path / "long").write_bytes(b"x" * (MOST_TABLE + 1))
    with pytest.raises(BadInput, match="long is too long for a file of configs") as caught:
        read_tables(session, ["/gone", f"{tmp_path}/long"])

    assert caught.value.remedy


def test_a_file_that_nobody_may_read(nobody: object, tmp_path: Path) -> None:
    file = tmp_path / "closed"
    file.write_text("{}")
    file.chmod(0)
    session = on_this_machine(tmp_path, nobody)  # type: ignore[arg-type]

    # Empty is no JSON, so it is refused as a table.
    assert read_tables(session, [str(file)]) in ({}, {str(file): ""})


def test_an_answer_of_nothing() -> None:
    assert parse_environment(Section("", 1)) == Environment()
