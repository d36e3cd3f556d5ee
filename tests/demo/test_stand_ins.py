"""The demo's systemctl and pct against the parsers that read the real ones."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_reclaim import systemd
from gpu_reclaim.commands import Section
from gpu_reclaim.containers import pct_status, refusal

INSIDE = Path(__file__).parents[2] / "deployments/demo/inside"
UNITS = ("one.service", "two.service")


@pytest.fixture
def guest(tmp_path: Path) -> Path:
    for program, side in (("systemctl", "guest"), ("pct", "node")):
        folder = tmp_path / "bin" / side
        folder.mkdir(parents=True)
        shutil.copy(INSIDE / program, folder)
    for unit in UNITS:
        (tmp_path / "units" / unit).mkdir(parents=True)
    (tmp_path / "containers/129").mkdir(parents=True)
    (tmp_path / "containers/129/name").write_text("pretend\n")
    return tmp_path


@pytest.fixture
def sleeper(guest: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The main process of the first unit."""
    process = subprocess.Popen(["sleep", "600"])
    note(guest, process.pid)
    yield process
    process.kill()
    process.wait()


def note(guest: Path, pid: int, later: int = 0) -> None:
    start = int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[19])
    (guest / "units" / UNITS[0] / "main").write_text(f"{pid} {start + later}\n")


def run(guest: Path, script: str, side: str = "guest") -> Section:
    done = subprocess.run(
        ["sh", "-c", f"PATH={guest}/bin/{side}:$PATH\n{script}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return Section(done.stdout, done.returncode)


def test_show_prints_a_block_for_each_unit(guest: Path, sleeper: subprocess.Popen[bytes]) -> None:
    section = run(guest, systemd.show([*UNITS, "three.service"]))
    states = systemd.parse_show(section)

    assert [(x.name, x.load_state, x.active_state, x.sub_state) for x in states] == [
        ("one.service", "loaded", "active", "running"),
        ("two.service", "loaded", "inactive", "dead"),
        ("three.service", "not-found", "inactive", "dead"),
    ]
    assert [x.control_group for x in states] == ["/system.slice/one.service", "", ""]
    assert all(x.can_stop and x.names == [x.name] for x in states)
    asked = {line.partition("=")[0] for line in section.text.splitlines() if line}
    assert asked == set(systemd.PROPERTIES)


def test_stop_ends_the_main_process(guest: Path, sleeper: subprocess.Popen[bytes]) -> None:
    assert run(guest, systemd.stop(UNITS)).code == 0

    assert sleeper.wait(timeout=60) == -15
    states = systemd.parse_show(run(guest, systemd.show(UNITS)))
    assert [state.active for state in states] == [False, False]


def test_another_process_with_the_same_pid_is_not_the_main_process(
    guest: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    note(guest, sleeper.pid, later=1)

    assert run(guest, systemd.stop(UNITS)).code == 0
    assert sleeper.poll() is None
    assert not systemd.parse_show(run(guest, systemd.show(UNITS)))[0].active


def test_stop_of_an_unknown_unit_fails(guest: Path) -> None:
    assert run(guest, systemd.stop(["three.service"])).code == systemd.REFUSED


@pytest.mark.parametrize(
    ("vmid", "hostname", "error"),
    [
        (129, "pretend", None),
        (129, "other", "is called 'pretend'"),
        (130, "pretend", "there is no container 130"),
    ],
)
def test_pct_status(guest: Path, vmid: int, hostname: str, error: str | None) -> None:
    section = run(guest, pct_status(vmid, hostname), "node")
    found = refusal("node", vmid, hostname, section)

    assert error in str(found) if error else found is None


def test_pct_exec_runs_with_the_guests_programs(guest: Path) -> None:
    assert run(guest, "pct exec 129 -- sh -c 'command -v systemctl'", "node").text == (
        f"{guest}/bin/guest/systemctl\n"
    )
