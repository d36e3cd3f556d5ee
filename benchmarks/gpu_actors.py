"""What gpu_check.py starts and sees by itself, without the library that it checks."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

HOLDER = Path(__file__).with_name("cuda_holder.py")
START_LIMIT_S = 30
"""The first CUDA context without persistence mode takes many seconds on boxes of eight GPUs."""

END_LIMIT_S = 10
SMI_LIMIT_S = 60


class ActorError(Exception):
    """A process of the check did not start, or nvidia-smi gave no numbers."""


@dataclass
class Actor:
    """A process that the check started.

    Attributes:
        pid: Its pid; with the start time its identity.
        start_time: Clock ticks after boot.
        launcher: What was started; another process where the actor is an orphan.
        gone_at: When the launcher had ended (monotonic seconds); None while it is there.
    """

    pid: int
    start_time: int
    launcher: subprocess.Popen[bytes]
    gone_at: float | None = None

    def __post_init__(self) -> None:
        """Reap it as soon as it ends, as any supervisor would: a zombie is a finding of its own."""
        Thread(target=self._reap, daemon=True).start()

    def _reap(self) -> None:
        self.launcher.wait()
        self.gone_at = time.monotonic()

    @property
    def alive(self) -> bool:
        """It is there: the same process, and more than a zombie."""
        stat = stat_fields(self.pid)
        return bool(stat) and int(stat[19]) == self.start_time and stat[0] not in "ZX"

    @property
    def orphan(self) -> bool:
        """What started it has ended, and it has another parent now."""
        stat = stat_fields(self.pid)
        ended = self.pid != self.launcher.pid and self.launcher.poll() is not None
        return ended and bool(stat) and int(stat[1]) != self.launcher.pid

    @property
    def shown(self) -> str:
        """All that `ps` could show of it."""
        folder = Path(f"/proc/{self.pid}")
        words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").strip()
        return f"{(folder / 'comm').read_text().strip()} {words.decode(errors='replace')}"

    def kill(self) -> None:
        """KILL it if it is there."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def end(self) -> None:
        """End it if it is there, and wait until it is gone."""
        self.kill()
        for pipe in (self.launcher.stdin, self.launcher.stdout):
            if pipe is not None:
                pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.launcher.wait(END_LIMIT_S)
        until = time.monotonic() + END_LIMIT_S
        while self.alive and time.monotonic() < until:
            time.sleep(0.01)


def stat_fields(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on (proc(5)); empty when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return []


def start(*flags: str) -> Actor:
    """Start a process of cuda_holder.py and wait until it holds what it is to hold.

    Raises:
        ActorError: It ended instead, or took too long.
    """
    # The order of nvidia-smi, and all GPUs that it shows.
    environment = {**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    launcher = subprocess.Popen(
        [sys.executable, HOLDER, *flags],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )
    line = first_line(launcher)
    stat = stat_fields(int(json.loads(line)["pid"])) if line else []
    if not stat:
        launcher.kill()
        launcher.communicate()  # ends an orphan too: its standard input is closed with this
        raise ActorError(f"cuda_holder.py {' '.join(flags)} was not ready: {launcher.returncode}")
    actor = Actor(int(json.loads(line)["pid"]), int(stat[19]), launcher)
    if actor.pid != launcher.pid:
        launcher.wait(END_LIMIT_S)
    return actor


def first_line(launcher: subprocess.Popen[bytes]) -> bytes:
    """What it printed; empty when it ended without a word or took too long."""
    out = launcher.stdout
    if out is None or not select.select([out], [], [], START_LIMIT_S)[0]:
        return b""
    return out.readline()


def ask(option: str) -> list[list[str]]:
    """Rows of an nvidia-smi query.

    Raises:
        ActorError: It failed, or took too long.
    """
    argv = ["nvidia-smi", option, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            argv, check=False, capture_output=True, text=True, timeout=SMI_LIMIT_S
        )
    except subprocess.TimeoutExpired as error:
        raise ActorError(f"nvidia-smi did not answer within {SMI_LIMIT_S} s") from error
    if done.returncode != 0:
        raise ActorError(f"nvidia-smi failed with {done.returncode}: {done.stdout.strip()}")
    return [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines()]


def memory(what: str = "used") -> dict[int, int]:
    """Memory by GPU index, in MiB.

    Raises:
        ActorError: nvidia-smi failed, or gave something else than numbers.
    """
    rows = ask(f"--query-gpu=index,memory.{what}")
    try:
        return {int(index): int(mib) for index, mib in rows}
    except ValueError as error:
        raise ActorError(f"nvidia-smi gave no numbers for memory.{what}: {rows}") from error
