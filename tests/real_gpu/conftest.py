"""Stand-in machines. Root and gcc are needed, as for the lab: left out, loudly, elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lab.possible import pytest_collection_modifyitems, pytest_terminal_summary
from real_gpu.machine import Machine

__all__ = ["pytest_collection_modifyitems", "pytest_terminal_summary"]

LAG_S = 0.5


@dataclass(frozen=True)
class Run:
    """A check that went to its end.

    Attributes:
        left: Pids of those that held a GPU after it.
    """

    code: int
    document: dict[str, Any]
    left: list[int]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine.build(tmp_path)


@pytest.fixture(scope="package")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """On a machine that nobody else uses, whose memory takes a while to become free."""
    machine = Machine.build(tmp_path_factory.mktemp("gpus"))
    machine.state("lag", str(LAG_S))
    code, document = machine.check()
    return Run(code, document, machine.holders())
