"""Killed, cancelled or cut off at any remote step of a pipeline, the host is as before.

A real worker runs the pipeline in a process of its own. All steps are walked by `make
test-exhaustive`; some of them, where most is different, by `make test`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.client.schemas.objects import StateType

from gpu_reclaim.errors import GpusNotReclaimed
from gpu_reclaim.flows import reclaim_gpus
from gpu_reclaim.tasks.slots import limit_name, read_slot
from guest import holds, pipelines, units, ways, witness
from guest.real_prefect import Prefect
from guest.stepping import Stepping
from guest.ways import UNIT
from lab.lab import Lab
from lab.waiting import wait_until

pytestmark = pytest.mark.lab

PARAMETERS: dict[str, Any] = {"host": "lab", "policy": {"hold_minutes": 5, **holds.QUICK}}
SAMPLE = ("begin the work",)
ONLY = tuple(filter(None, os.environ.get("GPU_LAB_ONLY", "").split(",")))
"""Names of steps, to walk those alone."""

HURRIED = {"PREFECT_CLIENT_MAX_RETRIES": "1", "PREFECT_LOGGING_TO_API_ENABLED": "false"}
"""A run asks a dead server twice instead of six times, and does not keep its log lines for it: so a
walk of many steps ends within the day."""

LAST = "put back what was stopped"
CUT_S = 60
MOST_S = 10
"""After a cancel all is back within so many seconds."""


class Scene:
    """The lab with a server that others need, and the pipeline as a deployment."""

    def __init__(self, lab: Lab, prefect: Prefect, folder: Path, *, alone: bool = False) -> None:
        self.lab, self.prefect, self.folder = lab, prefect, folder
        self.deployment = prefect.deploy(f"{pipelines.__file__}:evaluation")
        triggers = [] if alone else holds.add_triggers(lab)
        lab.start_server()
        self.everything = [*triggers, UNIT, *([] if alone else [holds.add_gateway(lab)])]
        self.names = self._whole_run()
        self.before = holds.running(lab), holds.files(lab)

    def _whole_run(self) -> list[str]:
        """The steps of a run that nobody disturbs."""
        steps = Stepping(self.folder / "whole")
        state = self.prefect.wait(self.prefect.submit(self.deployment, PARAMETERS, steps.env))
        assert state.is_completed(), state.message
        self.lab.wait_ready()
        return steps.names

    def run(
        self, number: int, more: dict[str, str] | None = None, **how: Any
    ) -> tuple[UUID, Stepping]:
        """Start a run at whose step something will happen, with more in its environment."""
        steps = Stepping(self.folder / f"{number}-{time.monotonic_ns()}", at=number, **how)
        return self.prefect.submit(self.deployment, PARAMETERS, steps.env | (more or {})), steps

    def is_back(self) -> bool:
        """The units run, and no trace of a hold is left on the host."""
        states = holds.is_active(self.lab, *self.everything)
        return states == ["active"] * len(states) and not holds.traces(self.lab)

    def check(self, what: str) -> None:
        """Everything is as before: units, files, the slot."""
        self.lab.wait_ready()
        assert holds.running(self.lab) == self.before[0], what
        assert holds.files(self.lab) ^ self.before[1] == set(), what
        assert len(witness.of_unit(self.lab, UNIT)) == 6, what
        assert witness.memory(self.lab) == [90_000, 90_100, 90_200, 90_300], what
        print(f"{what}: all is as before")

    def slot_is_free(self) -> bool:
        with self.prefect.client() as client:
            limit = client.read_global_concurrency_limit_by_name(limit_name("lab"))
            return limit.active_slots == 0 and read_slot(client, "lab") is None


@pytest.fixture
def scene(lab: Lab, prefect: Prefect, tmp_path: Path) -> Scene:
    return Scene(lab, prefect, tmp_path)


def walk(scene: Scene, one: Callable[[int, str], None], only: tuple[str, ...] = ()) -> None:
    """Do it at every step, or at some."""
    done = 0
    for number, name in enumerate(scene.names, 1):
        if only and name not in only:
            continue
        one(number, f"{number} of {len(scene.names)}, {name}")
        done += 1
    print(f"{done} of {len(only) or len(scene.names)} steps")
    assert done == (len(only) or len(scene.names))


def kill(scene: Scene) -> Callable[[int, str], None]:
    """SIGKILL to the run's process; its worker puts back, long before the host would."""

    def one(number: int, what: str) -> None:
        run, _ = scene.run(number)
        state = scene.prefect.wait(run)
        # How often it reads while the GPUs settle differs from run to run.
        assert state.type == StateType.CRASHED or number > len(scene.names) - 3, what
        wait_until(f"killed after {what}: all is back", scene.is_back, 30)
        wait_until(f"killed after {what}: the slot is free", scene.slot_is_free, 30)
        scene.check(f"killed after {what}")

    return one


def kill_with_worker(scene: Scene) -> Callable[[int, str], None]:
    """SIGKILL to both; only the host is left, which acts once its time is over."""

    def one(number: int, what: str) -> None:
        run, _ = scene.run(number, act="kill-worker")
        scene.prefect.wait_gone(run)
        holds.expire(scene.lab)
        wait_until(f"both killed after {what}: all is back", scene.is_back, 30)
        scene.check(f"run and worker killed after {what}")
        scene.prefect.repair()

    return one


def cancel(scene: Scene) -> Callable[[int, str], None]:
    """Cancel through the API, while the run is at the step."""

    def one(number: int, what: str) -> None:
        run, steps = scene.run(number, act="wait")
        wait_until(
            "it is there", lambda: steps.reached() or scene.prefect.state(run).is_final(), 60
        )
        began = time.monotonic()
        scene.prefect.cancel(run)
        wait_until(f"cancelled at {what}: all is back", scene.is_back, 60)
        took = time.monotonic() - began
        state = scene.prefect.wait(run)
        assert state.type == StateType.CANCELLED or not steps.reached(), what
        wait_until(f"cancelled at {what}: the slot is free", scene.slot_is_free, 30)
        scene.check(f"cancelled at {what}, back after {took:.1f} s")
        assert took < MOST_S, what

    return one


@pytest.mark.exhaustive
@pytest.mark.usefixtures("prefect_server", "stand_in_devices")
def test_runs_of_two_servers_keep_off_each_other(
    lab: Lab, prefect: Prefect, tmp_path: Path
) -> None:
    """A worker of one server holds the host; a run of the other is told so, or waits."""
    ways.save_host(lab)
    lab.start_server()
    deployment = prefect.deploy(f"{pipelines.__file__}:evaluation")
    steps = Stepping(tmp_path / "steps", at="begin the work", act="wait")
    run = prefect.submit(deployment, PARAMETERS, steps.env)
    steps.wait_reached()
    with pytest.raises(GpusNotReclaimed, match="held by Prefect run reclaim-lab") as caught:
        reclaim_gpus("lab", holds.policy(0))
    assert f"{prefect.url.removesuffix('/api')}/" in str(caught.value)
    other = threading.Thread(target=reclaim_gpus, args=("lab", holds.policy(0, wait_minutes=2)))
    other.start()
    time.sleep(4)
    assert other.is_alive()
    steps.go()
    assert prefect.wait(run).type == StateType.COMPLETED
    other.join(60)
    assert not other.is_alive()
    assert lab.server_pids() == {}
    assert holds.traces(lab) == []


def test_killed_or_cancelled_at_a_step_that_acts(scene: Scene) -> None:
    walk(scene, kill(scene), SAMPLE)
    walk(scene, cancel(scene), SAMPLE)
    secret = scene.lab.client_key.read_text().splitlines()[3]
    assert secret not in scene.prefect.log.read_text()


def lose_worker(scene: Scene) -> Callable[[int, str], None]:
    """SIGKILL to the worker alone: the run goes on, or crashes as Prefect writes to nobody."""

    def one(number: int, what: str) -> None:
        run, steps = scene.run(number, act="wait")
        steps.wait_reached()
        scene.prefect.kill_worker()
        steps.go()
        state = scene.prefect.wait(run)
        wait_until(f"worker killed at {what}: all is back", scene.is_back, 30)
        wait_until(f"worker killed at {what}: the slot is free", scene.slot_is_free, 30)
        scene.check(f"worker killed at {what}: {state.type}")
        scene.prefect.repair()

    return one


def lose_server(scene: Scene) -> Callable[[int, str], None]:
    """SIGKILL to Prefect's server, which comes back when all is over."""

    def over(run: UUID) -> bool:
        return not scene.prefect.flow_processes(run)

    def one(number: int, what: str) -> None:
        run, steps = scene.run(number, act="wait", more=HURRIED)
        steps.wait_reached()
        scene.prefect.kill_server()
        steps.go()
        began = time.monotonic()
        wait_until(
            f"server killed at {what}: all is back",
            lambda: (LAST in steps.names or over(run)) and scene.is_back(),
            300,
        )
        took = time.monotonic() - began
        # Prefect's events are kept for a server for minutes, after all else is done.
        scene.prefect.start_server()
        wait_until("the run is over", lambda: over(run), 300)
        scene.check(f"server killed at {what}, back after {took:.0f} s")
        scene.prefect.repair()

    return one


def lose_wire(scene: Scene) -> Callable[[int, str], None]:
    """Packets to guest and node are dropped for a minute."""

    def one(number: int, what: str) -> None:
        run, steps = scene.run(number, act="wait")
        steps.wait_reached()
        with scene.lab.cut():
            steps.go()
            time.sleep(CUT_S)
        began = time.monotonic()
        state = scene.prefect.wait(run, timeout=300)
        wait_until(f"cut off at {what}: all is back", scene.is_back, 60)
        took = time.monotonic() - began
        wait_until(f"cut off at {what}: the slot is free", scene.slot_is_free, 30)
        scene.check(f"cut off for {CUT_S} s at {what}: {state.type}, back {took:.0f} s later")

    return one


def lose_guest(scene: Scene) -> Callable[[int, str], None]:
    """The guest starts anew; its unit is enabled, as a service is."""

    def one(number: int, what: str) -> None:
        run, steps = scene.run(number, act="wait")
        steps.wait_reached()
        scene.lab.guest.restart()
        steps.go()
        state = scene.prefect.wait(run, timeout=300)
        wait_until(f"guest restarted at {what}: all is back", scene.is_back, 60)
        wait_until(f"guest restarted at {what}: the slot is free", scene.slot_is_free, 30)
        scene.check(f"guest restarted at {what}: {state.type}")

    return one


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "end", [kill, kill_with_worker, cancel, lose_worker, lose_server, lose_wire]
)
def test_ended_at_each_remote_step(
    scene: Scene, end: Callable[[Scene], Callable[[int, str], None]]
) -> None:
    walk(scene, end(scene), ONLY)


@pytest.mark.exhaustive
def test_restarted_at_each_remote_step(lab: Lab, prefect: Prefect, tmp_path: Path) -> None:
    units.drop_in(lab, UNIT, "[Install]\nWantedBy=multi-user.target\n")
    lab.do(f"systemctl enable --quiet {UNIT}")
    try:
        scene = Scene(lab, prefect, tmp_path, alone=True)
        walk(scene, lose_guest(scene), ONLY)
    finally:
        lab.do(f"systemctl disable --quiet {UNIT}")
