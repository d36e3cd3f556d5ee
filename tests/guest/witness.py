"""What happened in the guest, seen from outside: independent of SSH and of the code under test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gpu_reclaim.errors import GpusNotReclaimed
from gpu_reclaim.models import Ended, ReclaimPolicy, ReclaimReport, Spared
from gpu_reclaim.reclaim import reclaim
from gpu_reclaim.session import Session
from guest.ways import UNIT
from lab.guest_files import INNOCENTS
from lab.lab import Lab

QUERY = "nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits"
FREE = {0: 0, 1: 0, 2: 0, 3: 0}
Identity = tuple[int, int]
"""Pid and start time."""


def everybody(lab: Lab) -> dict[Identity, str]:
    """All processes of the guest but the dead who are not yet collected.

    Of sshd the listener alone, which writes the number of its connections into its title: the
    others come and go with every look.
    """
    alive = [process for process in lab.guest.processes() if process.state != "Z"]
    sshd = sorted((x for x in alive if x.in_unit("ssh.service")), key=lambda x: (x.start, x.pid))
    found = {(x.pid, x.start): x.title for x in alive if x not in sshd}
    return found | {(x.pid, x.start): "sshd" for x in sshd[:1]}


def identity(lab: Lab, pid: int) -> Identity:
    """A living process's pid and start time."""
    return pid, lab.processes()[pid][0]


def of_unit(lab: Lab, unit: str) -> dict[Identity, str]:
    """Who is in a unit's control group; the dead who are not yet collected do not count."""
    return {
        (process.pid, process.start): process.title
        for process in lab.guest.processes()
        if process.in_unit(unit) and process.state != "Z"
    }


def innocents(lab: Lab) -> dict[Identity, str]:
    """The monitoring agent and nvidia-persistenced."""
    return of_unit(lab, INNOCENTS[0]) | of_unit(lab, INNOCENTS[1])


def state_of(lab: Lab, unit: str = UNIT) -> str:
    """A unit's state, one word."""
    return lab.attach(f"systemctl is-active {unit}").stdout.strip()


def memory(lab: Lab) -> list[int]:
    """MiB in use now, as the guest's nvidia-smi prints them."""
    return [int(line) for line in lab.do(QUERY).split()]


def readings(lab: Lab) -> list[dict[int, int]]:
    """What nvidia-smi was asked about the GPUs so far: MiB really in use at each time."""
    return [c.used_mib for c in lab.smi_calls() if any("--query-gpu" in word for word in c.argv)]


FILES = r"""
find / -xdev -path /run/gpu-lab -prune -o -printf '@FIELDS@\n'
for folder in /run /tmp /dev /var/tmp; do
  find $folder -path /run/gpu-lab -prune -o -printf '@FIELDS@\n'
done
"""


def files(lab: Lab, fields: str, but: tuple[str, ...]) -> set[str]:
    """Every file of the guest, a line each, but for those whose lines begin so.

    Args:
        lab: The lab.
        fields: What is told of each, as find's -printf has it; the path comes first.
        but: What is written meanwhile by others.
    """
    listed = lab.do(FILES.replace("@FIELDS@", fields), timeout=60).splitlines()
    return {line for line in listed if not line.startswith(but)}


@contextmanager
def untouched(lab: Lab, unit: str = UNIT) -> Iterator[None]:
    """Nobody ended, nobody started, the unit as it was."""
    people, state = everybody(lab), state_of(lab, unit)
    yield
    now = everybody(lab)
    assert (people.items() - now.items(), now.items() - people.items()) == (set(), set())
    assert state_of(lab, unit) == state


def refused(session: Session, policy: ReclaimPolicy | None = None) -> ReclaimReport:
    """Reclaim in vain; the report that the error carries."""
    with pytest.raises(GpusNotReclaimed) as caught:
        reclaim(session, policy or ReclaimPolicy())
    return caught.value.report


def row(report: ReclaimReport, pid: int) -> Ended:
    """The one line about a process that was ended."""
    rows = [ended for ended in report.ended if ended.pid == pid]
    assert len(rows) == 1
    return rows[0]


def spared(report: ReclaimReport, pid: int) -> Spared:
    """The one line about a process that was left alone."""
    rows = [each for each in report.spared if each.pid == pid]
    assert len(rows) == 1
    return rows[0]


def ended(report: ReclaimReport) -> set[Identity]:
    """Pid and start time of everybody the report calls ended."""
    return {(each.pid, each.start_time) for each in report.ended if each.outcome == "ended"}


def vias(report: ReclaimReport) -> dict[str, str]:
    """Step to the way it went."""
    return {step.name: step.via for step in report.steps}
