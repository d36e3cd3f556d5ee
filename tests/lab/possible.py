"""Whether this machine can run the lab; hooks for the conftest.py of tests that need it."""

import os
import shutil

import pytest

from lab.lab import TOOLS

_WHY = pytest.StashKey[str]()


def obstacle() -> str:
    """Returns why this machine cannot run the lab; empty where it can."""
    if os.geteuid() != 0:
        return "not root, and a container is to be booted"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if not missing:
        return ""
    cure = "run tests/lab/install.sh" if shutil.which("apt-get") else "and there is no apt-get"
    return f"missing {', '.join(missing)}: {cure}"


@pytest.hookimpl(trylast=True)  # after -m and -k, so that only what was asked for counts
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the lab's tests out where there can be no lab, and says so; in CI it is an error."""
    why = obstacle()
    needing = [item for item in items if item.get_closest_marker("lab")]
    if not why or not needing:
        return
    line = f"{len(needing)} lab tests cannot run here: {why}"
    if os.environ.get("CI", "").lower() in ("1", "true"):
        raise pytest.UsageError(f"CI must run the lab, but {line}")
    items[:] = [item for item in items if item not in needing]
    config.hook.pytest_deselected(items=needing)
    config.stash[_WHY] = line


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says why, once, where nobody can miss it."""
    stash = terminalreporter.config.stash
    if _WHY in stash:
        terminalreporter.write_line(f"NOT TESTED: {stash[_WHY]}", red=True, bold=True)
        del stash[_WHY]
