"""Processes as the host sees them, guests' included, read from /proc without any help inside."""

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True)
class Process:
    """A process at one moment.

    Attributes:
        host_pid: PID on the host.
        pid: PID in its own, innermost namespace.
        start: Start in clock ticks after boot, the same seen from everywhere.
        state: State letter, "Z" for a zombie.
        title: Command line joined by spaces, else the short name.
        cgroups: Text of /proc/PID/cgroup.
    """

    host_pid: int
    pid: int
    start: int
    state: str
    title: str
    cgroups: str

    def in_unit(self, unit: str) -> bool:
        """Says whether the process is in a unit's control group; ".service" may be left out."""
        return any(
            part in (unit, f"{unit}.service")
            for line in self.cgroups.splitlines()
            for part in line.split("/")
        )

    def end(self) -> None:
        """Kills the process, and no later one of the same number."""
        try:
            handle = os.pidfd_open(self.host_pid)
        except ProcessLookupError:
            return
        try:
            if start_time(self.host_pid) == self.start:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        except ProcessLookupError:
            pass  # ended meanwhile
        finally:
            os.close(handle)

    def holds_gpu(self) -> bool:
        """Says whether the process has an open descriptor or mapping of a GPU's node."""
        return _holds_gpu(_PROC / str(self.host_pid))


def start_time(pid: int) -> int:
    """Returns a process's start in clock ticks after boot; 0 where there is no such process."""
    try:
        return int(_stat(_PROC / str(pid))[19])
    except OSError:
        return 0


def processes_in(namespace: str) -> Iterator[Process]:
    """Yields the processes of one PID namespace.

    Args:
        namespace: Link text such as "pid:[4026532264]".
    """
    for entry in _PROC.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if str((entry / "ns/pid").readlink()) == namespace:
                yield _read(entry)
        except OSError:
            continue  # ended meanwhile


def _read(entry: Path) -> Process:
    fields = _stat(entry)
    status = (entry / "status").read_text(errors="replace")
    inner = next(line for line in status.splitlines() if line.startswith("NSpid:"))
    words = (entry / "cmdline").read_text(errors="replace").rstrip("\0").split("\0")
    title = " ".join(words).strip() or (entry / "comm").read_text(errors="replace").strip()
    cgroups = (entry / "cgroup").read_text()
    pid = int(inner.split()[-1])
    return Process(int(entry.name), pid, int(fields[19]), fields[0], title, cgroups)


def _stat(entry: Path) -> list[str]:
    """Returns the fields of /proc/PID/stat from the state on: the name before may hold spaces."""
    return (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()


def _holds_gpu(entry: Path) -> bool:
    try:
        tasks = list((entry / "task").iterdir())
        links = [str(file.readlink()) for task in tasks for file in (task / "fd").iterdir()]
        mapped = (entry / "maps").read_text(errors="replace")
    except OSError:
        return False
    return any(link.startswith("/dev/nvidia") for link in links) or "/dev/nvidia" in mapped
