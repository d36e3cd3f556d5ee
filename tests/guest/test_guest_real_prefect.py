"""Flow runs that a worker started meet bad ends on the real guest; the host mends itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal
from uuid import UUID

import pytest
from prefect.client.schemas.objects import StateType

from guest import holds, witness
from guest.real_prefect import Prefect
from guest.stepping import Stepping
from guest.ways import UNIT
from lab.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.exhaustive]

DEPLOYMENT = "reclaim-gpus/reclaim-gpus"
PARAMETERS: dict[str, Any] = {"host": "lab", "policy": {"hold_minutes": 5, **holds.QUICK}}
STOP = f"stop {UNIT}"


def test_the_steps_of_a_run_are_recorded(lab: Lab, prefect: Prefect, tmp_path: Path) -> None:
    lab.start_server()
    steps = Stepping(tmp_path / "steps")
    run = prefect.submit(DEPLOYMENT, PARAMETERS, steps.env)
    state = prefect.wait(run)
    assert state.is_completed(), state.message
    names = steps.names
    assert names.index("take the host") < names.index(STOP) < names.index("prove the hold")
    assert not steps.reached()
    assert "# lab: clean" in prefect.artifacts(run)["gpu-reclaim-lab"]
    assert prefect.logs(run)


def test_a_killed_run_leaves_a_host_that_puts_all_back(
    lab: Lab, prefect: Prefect, tmp_path: Path
) -> None:
    killed(lab, prefect, Stepping(tmp_path / "steps", at="take the host"))


@pytest.mark.parametrize("when", ["during", "after"])
def test_so_does_one_killed_with_its_worker(
    lab: Lab, prefect: Prefect, tmp_path: Path, when: Literal["during", "after"]
) -> None:
    killed(lab, prefect, Stepping(tmp_path / "steps", at=STOP, when=when, act="kill-worker"))


def killed(lab: Lab, prefect: Prefect, steps: Stepping) -> None:
    """Kill a run at a step; after the lease's time all is as before."""
    lab.start_server()
    before = holds.running(lab)
    run = prefect.submit(DEPLOYMENT, PARAMETERS, steps.env)
    prefect.wait_gone(run)
    assert steps.names[-1] == steps.at
    assert holds.traces(lab)
    if steps.act == "kill":
        assert prefect.wait(run).type == StateType.CRASHED
    holds.expire(lab)
    holds.wait_back(lab, UNIT)
    lab.wait_ready()
    assert holds.running(lab) == before
    assert len(witness.of_unit(lab, UNIT)) == 6


def waiting_at_the_stop(lab: Lab, prefect: Prefect, tmp_path: Path) -> tuple[UUID, Stepping]:
    """A run that has just stopped the server, and waits there."""
    lab.start_server()
    steps = Stepping(tmp_path / "steps", at=STOP, act="wait")
    run = prefect.submit(DEPLOYMENT, PARAMETERS, steps.env)
    steps.wait_reached()
    return run, steps


def test_a_run_cancelled_at_a_step_puts_all_back(
    lab: Lab, prefect: Prefect, tmp_path: Path
) -> None:
    run, _ = waiting_at_the_stop(lab, prefect, tmp_path)
    assert holds.start(lab, UNIT) == (1, "inactive")
    prefect.cancel(run)
    assert prefect.wait(run).type == StateType.CANCELLED
    assert witness.state_of(lab) == "active"
    assert not holds.traces(lab)


def test_a_run_outlives_its_server_and_worker(lab: Lab, prefect: Prefect, tmp_path: Path) -> None:
    run, steps = waiting_at_the_stop(lab, prefect, tmp_path)
    prefect.kill_worker()
    prefect.kill_server()
    prefect.start_server()
    steps.go()
    assert prefect.wait(run).type == StateType.COMPLETED
    assert holds.start(lab, UNIT) == (1, "inactive")


def test_a_run_whose_wire_is_cut_fails_and_the_host_puts_all_back(
    lab: Lab, prefect: Prefect, tmp_path: Path
) -> None:
    run, steps = waiting_at_the_stop(lab, prefect, tmp_path)
    with lab.cut():
        steps.go()
        holds.expire(lab)
        holds.wait_back(lab, UNIT)
        assert prefect.wait(run, timeout=600).type == StateType.FAILED
    lab.wait_ready()
    assert len(witness.of_unit(lab, UNIT)) == 6
