"""One lab for all tests here, idle before each; and a Prefect for those with a flow.

Where the flow runs in the test's own process, `prefect_server` is enough; `prefect` has a worker
too, which runs deployments in processes of their own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
from prefect.testing.utilities import prefect_test_harness

from guest import real_prefect
from guest.real_prefect import Prefect
from lab.container import Container
from lab.lab import Lab
from lab.possible import pytest_collection_modifyitems, pytest_terminal_summary

__all__ = ["pytest_collection_modifyitems", "pytest_terminal_summary"]

pytest.register_assert_rewrite("guest.witness")


@pytest.fixture(scope="package")
def booted() -> Iterator[Lab]:
    """One lab for all tests here; given back before the tests of another folder start."""
    with Lab(bench=True) as lab:
        yield lab


@pytest.fixture
def lab(booted: Lab) -> Lab:
    """The lab, idle."""
    booted.reset()
    return booted


@pytest.fixture(scope="package")
def other_guest(booted: Lab) -> Container:
    """Guest 130 on the same GPUs; it stays, once booted."""
    return booted.add_guest(130)


@pytest.fixture
def second_guest(lab: Lab, other_guest: Container) -> Iterator[Container]:
    """Guest 130, idle afterwards; `lab.reset` looks after the first guest alone."""
    idle = {(process.pid, process.start) for process in other_guest.processes()}
    yield other_guest
    for process in other_guest.processes():
        if (process.pid, process.start) not in idle:
            process.end()


@pytest.fixture(scope="package")
def prefect_server() -> Iterator[None]:
    """A Prefect server with an empty database."""
    quiet = temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None})
    with prefect_test_harness(server_startup_timeout=120), quiet:
        yield


@pytest.fixture
def stand_in_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lab's device nodes count as GPUs for flows of the test's own process."""
    monkeypatch.setenv("GPU_RECLAIM_DEVICE_PREFIXES", json.dumps(["/dev/nvidia"]))


@pytest.fixture(scope="package")
def started_prefect(booted: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prefect]:
    """One real Prefect for all tests here: the repository's deployments, and the host "lab"."""
    prefect = real_prefect.started(tmp_path_factory.mktemp("prefect"), booted)
    yield prefect
    prefect.close()


@pytest.fixture
def prefect(started_prefect: Prefect) -> Prefect:
    """The real Prefect, whole: its server and its worker run, no flow does."""
    started_prefect.repair()
    return started_prefect
