"""Shells to run things under, and processes to look at."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_reclaim.transport.local import LocalTransport
from unit.actors import Stage
from unit.shells import SHELLS, need, stub, tool_path


@pytest.fixture(scope="session")
def tool_paths() -> Iterator[dict[str, str]]:
    """Shell to the PATH that has it as `sh`; every user may use it."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        for shell in SHELLS:
            Path(folder, shell).mkdir()
        yield {shell: tool_path(Path(folder, shell), shell) for shell in SHELLS}


@pytest.fixture(params=SHELLS)
def shell(
    request: pytest.FixtureRequest, tool_paths: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> str:
    """Each shell in turn; `sh` and the tools are its."""
    name = str(request.param)
    monkeypatch.setenv("PATH", tool_paths[name])
    return name


@pytest.fixture(params=("dash", "busybox"))
def tools(
    request: pytest.FixtureRequest, tool_paths: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> str:
    """This machine's own tools, and busybox's alone."""
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


@pytest.fixture
def nobody(root: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalTransport:
    """This machine as a user without rights: what is called sudo here gives them away."""
    folder = tmp_path / "sudo"
    folder.mkdir()
    drop = f"exec {need('setpriv')} --reuid 65534 --regid 65534 --clear-groups --"
    stub(folder, "sudo", f'shift 2; {drop} "$@"')
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return LocalTransport(sudo=True)
