"""Processes that no signal ends: frozen ones, as a process stuck in the driver would be."""

import contextlib
from pathlib import Path

from lab import record
from lab.errors import LabError
from lab.processes import Process

_FOLDER = Path("/sys/fs/cgroup/freezer/gpu-reclaim-lab-frozen")


def freeze(process: Process) -> None:
    """Makes a process deaf to every signal (state D) until it is thawed.

    Raises:
        LabError: This machine has no version 1 freezer; with the newer one a KILL gets through.
    """
    if not _FOLDER.parent.is_dir():
        raise LabError(f"{_FOLDER.parent} is not mounted: no process can be made unkillable")
    if not _FOLDER.exists():
        record.started("frozen", str(_FOLDER))
        _FOLDER.mkdir()
    (_FOLDER / "cgroup.procs").write_text(str(process.host_pid))
    (_FOLDER / "freezer.state").write_text("FROZEN")


def thaw() -> None:
    """Lets every frozen process go on: a signal sent meanwhile takes effect now."""
    with record.ending("frozen") as folders:
        for folder in map(Path, folders):
            if folder.exists():
                (folder / "freezer.state").write_text("THAWED")
                for pid in (folder / "cgroup.procs").read_text().split():
                    _leave(folder, pid)
                folder.rmdir()


def _leave(folder: Path, pid: str) -> None:
    with contextlib.suppress(ProcessLookupError):  # a signal was waiting for it
        (folder.parent / "cgroup.procs").write_text(pid)
