"""Processes of our own: who they are, and how all of them are ended, by pid."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
"""prctl(2): orphans among our descendants become our children, instead of init's."""

PATIENCE_S = 3.0
"""Seconds between TERM and KILL for what is left at the end."""


def adopt_orphans() -> None:
    """From now on nobody whom we started, or who was started by them, gets lost."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; empty when the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(") ")[2].split()
    except OSError:
        return []


def start_time(pid: int) -> int:
    """Start of a process in clock ticks after boot; 0 when it is dead or gone."""
    fields = _stat(pid)
    return int(fields[19]) if fields and fields[0] not in "ZX" else 0


def children() -> list[int]:
    """Pids of our children, dead ones that were not waited for included."""
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    ours = str(os.getpid())
    return [pid for pid in pids if _stat(pid)[1:2] == [ours]]


def reap(pids: Iterable[int]) -> None:
    """Wait for those of these children that are dead, so that they are gone for others too."""
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def end_children() -> None:
    """End all our children and theirs: TERM, and KILL for those who stay."""
    until = time.monotonic() + PATIENCE_S
    told: set[int] = set()
    while left := children():
        late = time.monotonic() > until
        for pid in left:
            # A child's pid stays its own until we wait for it, so this cannot hit anybody else.
            if late or pid not in told:
                os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
            told.add(pid)
        reap(left)
        time.sleep(0.02)
