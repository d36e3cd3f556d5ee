"""A client without Prefect, killed at any remote step, leaves a host that mends itself.

`make test` kills a flow run instead, at some steps (test_guest_exclusive_killed.py).
"""

from __future__ import annotations

import signal
import time

import pytest

from gpu_reclaim import hold
from guest import holds, killed_client, ways, witness
from guest.ways import UNIT
from lab.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.exhaustive]


def steps(lab: Lab) -> list[str]:
    """Names of the scripts of a whole reclaim with a hold, which then is ended."""
    lab.start_server()
    client = killed_client.start(lab, 0, "after")
    said, _ = client.communicate(timeout=60)
    assert client.returncode == 0
    hold.restore(ways.session(lab), everybody=True)
    return said.split("\n")[:-1]


def walk(lab: Lab, when: str) -> None:
    """Kill at each script in turn; after the lease's time all is as before."""
    triggers = holds.add_triggers(lab)
    names = steps(lab)
    gateway = holds.add_gateway(lab)
    everything = [UNIT, gateway, *triggers]
    lab.wait_ready()
    before = holds.running(lab)
    survived = 0
    for number, name in enumerate(names, 1):
        client = killed_client.start(lab, number, when)
        client.communicate(timeout=60)
        # How often it reads while the GPUs settle differs from run to run.
        assert client.returncode == -signal.SIGKILL or number > len(names) - 3, name
        if client.returncode == 0:
            survived += 1
        if when == "during":
            time.sleep(2.5)
        holds.expire(lab)
        holds.wait_back(lab, *everything)
        lab.wait_ready()
        assert holds.running(lab) == before, name
        assert len(witness.of_unit(lab, UNIT)) == 6, name
        print(f"killed {when} {number} of {len(names)}: {name}: all is back")
    assert survived <= 3


def test_killed_after_each_remote_step(lab: Lab) -> None:
    walk(lab, "after")


def test_killed_during_each_remote_step(lab: Lab) -> None:
    walk(lab, "during")
