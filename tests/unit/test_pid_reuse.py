"""A pid that means another process by the time of the signal: nobody but victims is signalled."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from unit.shells import need

PLAY = Path(__file__).with_name("pid_reuse.py")
FEW_PIDS_SINCE = (6, 14)
"""Since this kernel pid_max belongs to the PID namespace (kernel/pid_namespace.c); before, it would
be the whole machine's."""


def play(way: str, rounds: int, seed: int) -> dict[str, int]:
    """Play in a PID namespace of its own; what happened, counted."""
    alone = [need("unshare"), "--pid", "--fork", "--mount-proc"]
    command = [*alone, sys.executable, str(PLAY), way, str(rounds), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=3600)
    counts: dict[str, int] = json.loads(done.stdout)
    return counts


def few_pids() -> bool:
    release = Path("/proc/sys/kernel/osrelease").read_text().split(".")
    return (int(release[0]), int(release[1])) >= FEW_PIDS_SINCE


def test_a_stranger_with_a_victims_pid_is_never_signalled(root: None) -> None:
    counts = play("forced", 3, 1)

    assert counts["hurt"] == 0
    # Four in each round took their pid before the script began.
    assert counts["changed"] == 12
    assert counts["reused"] >= 12
    assert counts["sent"] >= 3 * 8


def test_where_pids_go_round_within_a_moment_no_stranger_is_signalled(root: None) -> None:
    if not few_pids():
        pytest.skip("this kernel has one pid_max for the whole machine")
    counts = play("natural", 10, 1)

    assert counts["hurt"] == 0
    assert counts["reused"] > 10


@pytest.mark.exhaustive
@pytest.mark.parametrize(("way", "rounds"), [("forced", 50), ("natural", 500)])
def test_a_long_time_of_reused_pids(root: None, way: str, rounds: int) -> None:
    counts = play(way, rounds, 129)

    assert counts["hurt"] == 0
    assert counts["reused"] > rounds
