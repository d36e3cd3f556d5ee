"""One temporary Prefect server for all tests here, and a pretend host behind every name."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator

import pytest
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
from prefect.testing.utilities import prefect_test_harness

from gpu_reclaim import tasks
from gpu_reclaim.flows import exclusive, moe, reclaim_gpus, trials
from gpu_reclaim.models import ReclaimPolicy, ReclaimReport
from gpu_reclaim.session import Session
from gpu_reclaim.tasks import artifacts, restoring, stage
from gpu_reclaim.tasks import host as host_tasks
from prefect_layer.pretend_host import PretendHost, serving


@pytest.fixture(scope="package", autouse=True)
def server() -> Iterator[None]:
    # Heartbeats would add a second to every flow run.
    with (
        prefect_test_harness(server_startup_timeout=120),
        temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}),
    ):
        yield


def put_behind_every_name(host: PretendHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever GpuHost block is loaded leads to that host."""

    class Block:
        def session(self, name: str, *, via: str = "auto") -> Session:
            return host.session(name)

    for module in (host_tasks, restoring, stage):
        monkeypatch.setattr(module, "load_host", lambda name: Block())


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> PretendHost:
    """The host that the name "pretend" leads to."""
    host = serving()
    put_behind_every_name(host, monkeypatch)
    return host


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPUs are freed without runs and pages of its own, which take seconds each time."""

    reclaiming = sys.modules[reclaim_gpus.__module__]
    for verb in set(tasks.__all__) & set(vars(reclaiming)):
        monkeypatch.setattr(reclaiming, verb, getattr(tasks, verb).fn)

    def free_them(host: str, policy: ReclaimPolicy) -> ReclaimReport:
        with monkeypatch.context() as quiet:
            quiet.setattr(artifacts, "write", lambda _: None)
            return reclaim_gpus.fn(host, policy)

    for module in (exclusive, moe, trials):
        monkeypatch.setattr(module, "reclaim_gpus", free_them)


@pytest.fixture
def prefect_log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """caplog that sees the lines of runs too."""
    logger = logging.getLogger("prefect")
    before, logger.propagate = logger.propagate, True
    with caplog.at_level(logging.DEBUG, "prefect"):
        yield caplog
    logger.propagate = before
