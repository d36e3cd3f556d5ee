"""This very machine."""

from __future__ import annotations

import os
import signal
import subprocess
import time

from gpu_reclaim.commands import (
    ANY_MACHINE,
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
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()
