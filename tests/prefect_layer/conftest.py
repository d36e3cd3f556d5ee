"""One temporary Prefect server for all tests here, and a pretend host behind every name."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
from prefect.testing.utilities import prefect_test_harness

from gpu_reclaim.session import Session
from gpu_reclaim.tasks import host as host_tasks
from gpu_reclaim.tasks import restoring, stage
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
def prefect_log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """caplog that sees the lines of runs too."""
    logger = logging.getLogger("prefect")
    before, logger.propagate = logger.propagate, True
    with caplog.at_level(logging.DEBUG, "prefect"):
        yield caplog
    logger.propagate = before
