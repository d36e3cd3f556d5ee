"""Shells to run things under, and processes to look at."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from unit.actors import Stage
from unit.shells import SHELLS, tool_path


@pytest.fixture(scope="session")
def tool_paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Shell to the PATH that has it as `sh`."""
    return {shell: tool_path(tmp_path_factory.mktemp(shell), shell) for shell in SHELLS}


@pytest.fixture(params=SHELLS)
def shell(
    request: pytest.FixtureRequest, tool_paths: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> str:
    """Each shell in turn; `sh` and the tools are its."""
    name = str(request.param)
    monkeypatch.setenv("PATH", tool_paths[name])
    return name


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """Starts processes, and ends them with the test."""
    folder = tmp_path / "stage"
    folder.mkdir()
    with contextlib.closing(Stage(folder)) as made:
        yield made


@pytest.fixture
def root() -> None:
    """Only root may do what this test does."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
