"""Processes that hold files, ignore signals or have odd names."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from gpu_reclaim.models import Process

LIMIT_S = 60
"""Of every wait in these tests; generous, so that no result hangs on a slow machine."""

BODY = """
import ctypes, mmap, os, signal, sys, time
{setup}
sys.stdout.write("ready\\n"); sys.stdout.flush()
while True:
    time.sleep(600)
"""

OPEN = "held = os.open({path!r}, os.O_RDWR)"
MAP_ONLY = "\n".join(
    [
        "fd = os.open({path!r}, os.O_RDWR)",
        "held = mmap.mmap(fd, 4096, flags=mmap.MAP_PRIVATE)",
        # mmap keeps a duplicate of the descriptor, so every one but the standard three is closed.
        "os.closerange(3, 64)",
    ]
)
IGNORE_TERM = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
NAMED = "open('/proc/self/comm', 'w').write({name!r})"


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Look until something is so."""
    until = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > until:
            raise AssertionError(f"{what}: not within {LIMIT_S} s")
        time.sleep(0.01)


def stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name: state, ppid and so on."""
    return (
        Path(f"/proc/{pid}/stat").read_bytes().decode(errors="replace").rpartition(") ")[2].split()
    )


def identity(pid: int, **more: object) -> Process:
    """A process as a scan would have seen it now."""
    fields = stat(pid)
    values = {"pid": pid, "start_time": int(fields[19]), "state": fields[0], "name": f"test {pid}"}
    return Process.model_validate(values | more)


def alive(pid: int) -> bool:
    """It exists and is no zombie."""
    try:
        return stat(pid)[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@dataclass
class Stage:
    """Where processes are started, and files for them to hold."""

    folder: Path
    children: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(
        self, setup: str = "", *, argv: tuple[str, ...] = (), program: Path | None = None
    ) -> int:
        """Start a Python process, wait until its setup is done, and give its pid."""
        command = [str(program or sys.executable), "-S", "-c", BODY.format(setup=setup), *argv]
        return self.run(command)

    def run(self, command: list[str], **more: object) -> int:
        """Start a program that prints a line when it is ready, and give its pid."""
        child: subprocess.Popen[str] = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            **more,  # type: ignore[call-overload]
        )
        self.children.append(child)
        assert child.stdout is not None
        line = child.stdout.readline()
        assert line == "ready\n"
        return child.pid

    def file(self, name: str) -> str:
        """A file of one page to be held."""
        path = self.folder / name
        path.write_bytes(b"\0" * 4096)
        return str(path)

    def node(self, name: str, major: int, minor: int) -> str:
        """A character device node."""
        path = str(self.folder / name)
        os.mknod(path, 0o666 | 0o020000, os.makedev(major, minor))
        return path

    def reap(self, pid: int) -> None:
        """Collect a child that has ended, so that nothing is left of it."""
        next(child for child in self.children if child.pid == pid).wait(LIMIT_S)

    def close(self) -> None:
        """End them all."""
        for child in self.children:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(signal.SIGCONT)
            child.kill()
            child.wait(LIMIT_S)
            if child.stdout is not None:
                child.stdout.close()


def in_a_thread(do: Callable[[], object]) -> tuple[threading.Thread, list[Exception]]:
    """Begin it there; its error, if one comes out."""
    found: list[Exception] = []

    def run() -> None:
        try:
            do()
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found
