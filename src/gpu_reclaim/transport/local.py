"""This very machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from gpu_reclaim.commands import (
    ANY_MACHINE,
    KILL_AFTER_S,
    REMOTE_SLACK_S,
    Guard,
    Result,
    Script,
    argv,
    decode,
    frame,
    unframe,
)
from gpu_reclaim.errors import TimedOut, Unreachable


@dataclass(frozen=True)
class Family:
    """This process and its ancestors, as any look at this machine would see them.

    Attributes:
        boot_id: Names the machine's present run.
        namespace: Of the pids, as /proc/self/ns/pid names it.
        pids: Ourselves, then our ancestors.
    """

    boot_id: str
    namespace: str
    pids: tuple[int, ...]


def family() -> Family:
    """Who we are, so that we are spared also when the host is reached by SSH and is this one."""
    proc = Path("/proc")
    try:
        boot_id = (proc / "sys/kernel/random/boot_id").read_text().strip()
        namespace = str((proc / "self/ns/pid").readlink())
    except OSError:  # not on Linux: then the host is another machine
        return Family("", "", ())
    pids, pid = [], os.getpid()
    while pid > 0:
        pids.append(pid)
        try:
            pid = int((proc / f"{pid}/stat").read_text().rpartition(") ")[2].split()[1])
        except (OSError, ValueError, IndexError):
            break
    return Family(boot_id, namespace, tuple(pids))


class LocalTransport:
    """Runs scripts on this machine, each in a process group of its own."""

    def __init__(self, *, guard: Guard = ANY_MACHINE, sudo: bool = False) -> None:
        self._guard = guard
        self._sudo = sudo

    @property
    def name(self) -> str:
        """How and where."""
        return "this machine"

    def run(self, script: Script) -> Result:
        """Run a script here; see `Transport.run`."""
        framed = frame(script, self._guard)
        started = time.monotonic()
        try:
            process = subprocess.Popen(
                argv(script, sudo=self._sudo),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise Unreachable(
                f"this machine: cannot start {script.name}: {error}",
                remedy="install coreutils (it brings `timeout`) and a POSIX shell",
            ) from error
        try:
            out, err = process.communicate(
                framed.text.encode(), timeout=script.timeout_s + REMOTE_SLACK_S * 2
            )
        except subprocess.TimeoutExpired as error:
            raise TimedOut(
                f"this machine: {script.name} did not end within {script.timeout_s:g} s",
                remedy="see what it waits for: `ps -eo pid,stat,wchan,args`",
            ) from error
        finally:
            _end(process)
        seconds = time.monotonic() - started
        raw = Result(
            script, self.name, decode(out), decode(err), process.returncode, seconds=seconds
        )
        return unframe(framed, raw)

    def close(self) -> None:
        """Nothing stays open."""


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of the script's process group (a cancelled run must leave nothing)."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(KILL_AFTER_S)
