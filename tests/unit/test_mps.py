"""Asking MPS to quit: by its own command, on real processes called as MPS's are."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from gpu_reclaim import mps
from gpu_reclaim.commands import Section
from gpu_reclaim.models import Ended, Spared
from unit.actors import BODY, Stage, wait_for
from unit.shells import here, stub

DAEMON = """
import os, signal, subprocess, sys
server = subprocess.Popen([sys.argv[1], "-S", "-c", "import time; time.sleep(600)"])
sys.stdout.write("ready\\n"); sys.stdout.flush()
print(server.pid, file=open(sys.argv[2], "w"), flush=True)
while server.poll() is None:
    signal.sigtimedwait([signal.SIGUSR1], 0.05)
"""


class Mps:
    """A control daemon with a server, and the command that speaks to them."""

    def __init__(self, stage: Stage, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.asked = folder / "asked"
        python = Path(sys.executable).resolve()
        for name in ("nvidia-cuda-mps-control", "nvidia-cuda-mps-server"):
            shutil.copy(python, folder / name)
        environment = os.environ | {
            "CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe",
            "PYTHONHOME": sys.base_prefix,
        }
        arguments = [str(folder / "nvidia-cuda-mps-server"), str(folder / "pid")]
        daemon = [str(folder / "nvidia-cuda-mps-control"), "-S", "-c", DAEMON, *arguments]
        stage.run(daemon, env=environment)
        wait_for(lambda: (folder / "pid").exists() and self.text("pid") != "", "a server")
        self.server = int(self.text("pid"))
        command = folder / "bin"
        command.mkdir()
        monkeypatch.setenv("PATH", f"{command}:{os.environ['PATH']}")
        self.answers("")

    def text(self, name: str) -> str:
        return (self.folder / name).read_text().strip()

    def answers(self, clients: str, code: int = 0) -> None:
        """How the control command answers."""
        body = "\n".join(
            [
                "read -r word rest",
                f'echo "$CUDA_MPS_PIPE_DIRECTORY $word $rest" >>{self.asked}',
                f"[ {code} = 0 ] || exit {code}",
                'case "$word" in',
                f"  get_server_list) echo {self.server};;",
                f"  get_client_list) printf '%s' '{clients}';;",
                f"  quit) kill {self.server};;",
                "esac",
            ]
        )
        stub(self.folder / "bin", "nvidia-cuda-mps-control", body)

    def quit(self) -> tuple[list[Ended], dict[int, str]]:
        rows = [row(self.server)]
        result = here({"mps": mps.quit_servers(rows)})
        return mps.parse_quit(result.section("mps"), rows, {self.server: 77}, "ssh")


def row(pid: int) -> Spared:
    return Spared(pid=pid, name="nvidia-cuda-mps-server", owner="none", reason="MPS", devices=["x"])


@pytest.fixture
def service(tools: str, stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mps:
    return Mps(stage, tmp_path, monkeypatch)


def test_it_quits_when_nobody_uses_it(service: Mps) -> None:
    ended, left = service.quit()

    assert [(x.pid, x.start_time, x.signal, x.outcome) for x in ended] == [
        (service.server, 77, "quit", "ended")
    ]
    assert left == {}
    pipe = f"{service.folder}/pipe"
    assert [line.strip() for line in service.text("asked").split("\n")] == [
        f"{pipe} get_server_list",
        f"{pipe} get_client_list {service.server}",
        f"{pipe} quit",
    ]


def test_it_is_left_alone_while_it_has_clients(service: Mps) -> None:
    service.answers("4711\n")

    assert service.quit() == ([], {service.server: "it still has clients (4711)"})
    assert "quit" not in service.text("asked")


def test_a_daemon_that_does_not_answer_is_not_asked_to_quit(service: Mps) -> None:
    service.answers("", code=1)

    assert service.quit() == ([], {service.server: "its control daemon does not answer"})
    assert "quit" not in service.text("asked")


def test_a_server_whose_parent_is_no_control_daemon_is_left_alone(
    service: Mps, stage: Stage
) -> None:
    other = stage.run([sys.executable, "-S", "-c", BODY.format(setup="")])
    rows = [row(other)]
    result = here({"mps": mps.quit_servers(rows)})

    assert mps.parse_quit(result.section("mps"), rows, {}, "ssh") == (
        [],
        {other: "its control daemon is gone"},
    )
    assert not service.asked.exists()


def test_without_the_command_there_is_nobody_to_ask(tools: str) -> None:
    result = here({"mps": mps.quit_servers([row(os.getpid())])})

    assert mps.parse_quit(result.section("mps"), [row(os.getpid())], {}, "ssh") == (
        [],
        {os.getpid(): "there is no nvidia-cuda-mps-control to ask"},
    )


def test_a_server_that_is_gone_is_neither_ended_nor_left() -> None:
    assert mps.parse_quit(Section("mps gone 5\n", 0), [row(5)], {}, "ssh") == ([], {})
