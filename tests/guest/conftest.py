"""One lab for all tests here, idle before each; and a Prefect of their own for those with a flow."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest
from lab.container import Container
from lab.lab import Lab
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
from prefect.testing.utilities import prefect_test_harness

TOOLS = ("lxc-start", "debootstrap", "/usr/sbin/sshd", "ip", "gcc", "ssh-keygen", "fuser")
WHY = pytest.StashKey[str]()


def obstacle() -> str:
    """Why this machine cannot run the lab; empty where it can."""
    if os.geteuid() != 0:
        return "not root, and a container is to be booted"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if not missing:
        return ""
    cure = "run tests/lab/install.sh" if shutil.which("apt-get") else "and there is no apt-get"
    return f"missing {', '.join(missing)}: {cure}"


@pytest.hookimpl(trylast=True)  # after -m and -k, so that only what was asked for counts
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the lab's tests out where there can be no lab, and say so; in CI that is an error."""
    why = obstacle()
    needing = [item for item in items if item.get_closest_marker("lab")]
    if not why or not needing:
        return
    line = f"{len(needing)} lab tests cannot run here: {why}"
    if os.environ.get("CI", "").lower() in ("1", "true"):
        raise pytest.UsageError(f"CI must run the lab, but {line}")
    items[:] = [item for item in items if item not in needing]
    config.hook.pytest_deselected(items=needing)
    config.stash[WHY] = line


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The reason, where nobody can miss it."""
    line = terminalreporter.config.stash.get(WHY, "")
    if line:
        terminalreporter.write_line(f"NOT TESTED: {line}", red=True, bold=True)


@pytest.fixture(scope="package")
def booted() -> Iterator[Lab]:
    """One lab for all tests here; given back before the tests of another folder start."""
    with Lab() as lab:
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
