"""Cutting a connection at a chosen moment: sshd's child for it is killed, the listener stays."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from guest.witness import Identity
from lab.lab import Lab
from lab.processes import Process, processes_in
from lab.waiting import wait_until

CAUGHT = "/run/gpu-reclaim-caught"
"""Where a holder notes the TERM it gets; goes with `reset`."""


def guest_sessions(lab: Lab) -> list[Process]:
    """Sessions of the guest's sshd."""
    return [each for each in lab.guest.processes() if each.title.startswith("sshd: root")]


def node_sessions(_lab: Lab) -> list[Process]:
    """Sessions of the node's sshd, which are processes of this machine."""
    ours = str(Path("/proc/self/ns/pid").readlink())
    return [
        each
        for each in processes_in(ours)
        if each.title.startswith("sshd: root") and "gpu-reclaim-lab-node" in each.cgroups
    ]


def caught(lab: Lab) -> str:
    """What the holder with `--catch` noted so far."""
    path = lab.guest.rootfs / CAUGHT.lstrip("/")
    return path.read_text() if path.exists() else ""


@contextmanager
def cut_once(
    lab: Lab, sessions: Callable[[Lab], list[Process]], when: Callable[[], object]
) -> Iterator[list[Identity]]:
    """Kill the sessions opened inside this block, once, as soon as `when` holds.

    Yields:
        Who was killed; filled when it has happened.
    """
    older = {each.host_pid for each in sessions(lab)}
    killed: list[Identity] = []

    def watch() -> None:
        wait_until("the moment for the cut", lambda: bool(when()), 60)
        for each in sessions(lab):
            if each.host_pid not in older:
                each.end()
                killed.append((each.pid, each.start))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield killed
    finally:
        watcher.join()
