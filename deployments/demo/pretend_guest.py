"""The pretend guest: real processes around a private folder of pretend GPUs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import family

HERE = Path(__file__).resolve().parent
INSIDE = HERE / "inside"
NVIDIA_SMI = HERE.parents[1] / "tests/lab/guest/nvidia_smi.py"

UNIT = "gpu-reclaim-demo.service"
VMID = 129
GPUS = 4
RELEASE_LAG_S = 1
"""Pretend memory stays in use this long after its holder has ended, as a driver's may."""

PERSISTENCED = """
exec 3<>"$1/nvidia0" 4<>"$1/nvidia1" 5<>"$1/nvidia2" 6<>"$1/nvidia3" 7<>"$1/nvidiactl"
echo ready
read -r line
"""


class GuestError(Exception):
    """The pretend guest could not be set up; the text says what to do."""


@dataclass(frozen=True)
class Actor:
    """A process of the pretend guest.

    Attributes:
        pid: Its pid.
        start: Its start time; with the pid its identity.
        name: What it is called.
        about: What is special about it, for people.
        dies: The reclaim must end it.
    """

    pid: int
    start: int
    name: str
    about: str
    dies: bool

    @property
    def lives(self) -> bool:
        """Whether this very process is still there."""
        return family.start_time(self.pid) == self.start


WORKERS = [
    "holds nvidia0",
    "holds nvidia1, ignores TERM",
    "holds nvidia2 by a mapping alone",
    "holds nvidia3",
]


def make_folder() -> Path:
    """A new private folder from which programs can be run.

    Raises:
        GuestError: There is no place for one.
    """
    for parent in (tempfile.gettempdir(), "/tmp", "/var/tmp"):  # noqa: S108 - mkdtemp makes it safe
        real = str(Path(parent).resolve())
        # Below /dev a plain file counts as no GPU; other characters are refused in device prefixes.
        if not re.fullmatch(r"/[A-Za-z0-9_./:-]*", real) or real.startswith("/dev/"):
            continue
        folder = Path(tempfile.mkdtemp(prefix="gpu-reclaim-demo-", dir=real))
        probe = folder / "probe"
        probe.touch(mode=0o700)
        if os.access(probe, os.X_OK):
            return folder
        shutil.rmtree(folder)
    raise GuestError("programs cannot be run from the temporary folder: set TMPDIR to another one")


@dataclass
class Guest:
    """The pretend guest, from `start` to `stop`.

    Attributes:
        folder: Where everything of it lies.
        hostname: What it must be called: the name of this very machine.
        actors: Its processes.
        lifeline: A pipe's end to read from, for whoever must end with the demo: at its end of file.
    """

    folder: Path
    hostname: str = field(default_factory=lambda: _read("/proc/sys/kernel/hostname"))
    machine_id: str = field(default_factory=lambda: _read("/etc/machine-id"))
    actors: list[Actor] = field(default_factory=list)
    lifeline: int = -1
    _held: int = -1

    @property
    def device_prefix(self) -> str:
        """How the path of each pretend GPU begins."""
        return f"{self.folder}/dev/nvidia"

    def path(self, side: str) -> str:
        """PATH on the guest, or on its node."""
        return f"{self.folder}/bin/{side}:{os.environ.get('PATH', os.defpath)}"

    def start(self) -> None:
        """Make the folder's files and start the processes.

        Raises:
            GuestError: One of them did not start.
        """
        self._make_files()
        self.lifeline, self._held = os.pipe()
        self._start_server()
        self._start_innocents()

    def stop(self) -> None:
        """Let go of the lifeline: whoever reads from it ends by itself."""
        for end in (self.lifeline, self._held):
            if end >= 0:
                os.close(end)
        self.lifeline = self._held = -1

    def reap(self) -> None:
        """Play init: wait for processes that ended."""
        family.reap(actor.pid for actor in self.actors)

    def facts(self) -> dict[str, Any]:
        """What the part of the demo that runs the flow must know."""
        return {
            "folder": str(self.folder),
            "device_prefix": self.device_prefix,
            "hostname": self.hostname,
            "machine_id": self.machine_id,
            "unit": UNIT,
            "vmid": VMID,
            "gpus": GPUS,
            "actors": [asdict(actor) for actor in self.actors],
        }

    def _make_files(self) -> None:
        for name in ("dev", "run/mem", "bin/guest", "bin/node", f"units/{UNIT}"):
            (self.folder / name).mkdir(parents=True)
        for name in [*(f"nvidia{index}" for index in range(GPUS)), "nvidiactl"]:
            (self.folder / "dev" / name).write_bytes(bytes(4096))
        (self.folder / "run/lag").write_text(f"{RELEASE_LAG_S}\n", "utf-8")
        container = self.folder / "containers" / str(VMID)
        container.mkdir(parents=True)
        (container / "name").write_text(f"{self.hostname}\n", "utf-8")
        _program(self.folder / "bin/guest/systemctl", (INSIDE / "systemctl").read_text("utf-8"))
        _program(self.folder / "bin/node/pct", (INSIDE / "pct").read_text("utf-8"))
        _program(self.folder / "bin/guest/nvidia-smi", self._nvidia_smi())

    def _nvidia_smi(self) -> str:
        command = shlex.join([sys.executable, "-IS", str(NVIDIA_SMI)])
        settings = f"GPU_LAB_DEV={self.folder}/dev GPU_LAB_STATE={self.folder}/run"
        return f'#!/bin/sh\n{settings} GPU_LAB_PROC=/proc exec {command} "$@"\n'

    def _start_server(self) -> None:
        script = INSIDE / "launch_server.py"
        command = [sys.executable, "-IS", str(script), str(self.folder), UNIT]
        pid, lines = self._start(command)
        about = f"main process of {UNIT}, holds no GPU"
        self._add(pid, f"{Path(sys.executable).name} launch_server.py", about, dies=True)
        for note in sorted(map(json.loads, lines), key=lambda note: str(note["name"])):
            about = WORKERS[note["holds"]]
            self.actors.append(Actor(note["pid"], note["start"], note["name"], about, dies=True))
        if len(lines) != len(WORKERS):
            raise GuestError(f"{len(lines)} of {len(WORKERS)} workers started: {self._said()}")

    def _start_innocents(self) -> None:
        script = INSIDE / "monitoring_agent.py"
        pid, _ = self._start([sys.executable, "-IS", str(script)])
        name = f"{Path(sys.executable).name} monitoring_agent.py"
        self._add(pid, name, "a Python program without a GPU", dies=False)
        # The rule goes by the executable's own name, so it must really be called that.
        shell = self.folder / "bin/nvidia-persistenced"
        shutil.copy(Path("/bin/sh").resolve(), shell)
        shell.chmod(0o700)
        devices = f"{self.folder}/dev"
        command = [shell.name, "-c", PERSISTENCED, shell.name, devices]
        pid, _ = self._start(command, executable=shell)
        self._add(pid, shell.name, "holds every device, uses no memory", dies=False)

    def _add(self, pid: int, name: str, about: str, *, dies: bool) -> None:
        self.actors.append(Actor(pid, family.start_time(pid), name, about, dies))

    def _start(
        self, command: list[str], *, executable: Path | None = None
    ) -> tuple[int, list[str]]:
        """Start a process and wait until it is ready; its pid, and what it printed before."""
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(
                command,
                executable=executable,
                stdin=self.lifeline,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,
            )
        assert process.stdout is not None  # noqa: S101 - for the type checker
        lines = _until_ready(process.stdout)
        if lines is None:
            raise GuestError(f"{command[0]} did not start: {self._said()}")
        return process.pid, lines

    def _said(self) -> str:
        return _read(f"{self.folder}/log") or "nothing was said"


def _until_ready(stream: IO[bytes]) -> list[str] | None:
    """Lines before `ready`; None when the stream ends without it."""
    with contextlib.closing(stream):
        lines: list[str] = []
        for line in stream:
            if line == b"ready\n":
                return lines
            lines.append(line.decode())
    return None


def _program(path: Path, text: str) -> None:
    path.write_text(text, "utf-8")
    path.chmod(0o700)


def _read(path: str) -> str:
    """A file's text, stripped; empty where there is none."""
    try:
        return Path(path).read_text("utf-8").strip()
    except OSError:
        return ""
