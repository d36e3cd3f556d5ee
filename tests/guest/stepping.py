"""Counting the remote scripts of a flow run in a process of its own, and acting at one of them.

The flow run's own environment carries what is wanted (`Stepping.env`, given to
`Prefect.submit`); `flow_run_site/sitecustomize.py` does it there.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lab.waiting import wait_until

TESTS = Path(__file__).parents[1]
SITE = Path(__file__).parent / "flow_run_site"

IGNORED = ("keep the hold", "watch")
"""Scripts that a thread of its own sends now and then: they are no steps."""


@dataclass(frozen=True)
class Stepping:
    """One flow run's steps: scripts that it sends, those inside others not counted.

    Attributes:
        folder: An empty folder, for this run alone.
        at: The step, from 1, or its script's name (its first time); 0: none.
        when: "before" the script is sent, 40 ms into it ("during"), or "after" its end, also a bad
            one.
        act: "kill" its process, "kill-worker" (the worker first, then its process), or "wait" there
            until `go`. Waiting "during" a script is told (`wait_reached`) while the script runs,
            and its end is given back after `go`.
        ignore: Names of scripts that are no steps.
    """

    folder: Path
    at: int | str = 0
    when: Literal["before", "during", "after"] = "after"
    act: Literal["kill", "kill-worker", "wait"] = "kill"
    ignore: tuple[str, ...] = IGNORED

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)

    @property
    def env(self) -> dict[str, str]:
        """For the flow run's process."""
        return {
            "PYTHONPATH": os.pathsep.join([str(SITE), str(TESTS)]),
            "GPU_LAB_STEPS": str(self.folder),
            "GPU_LAB_STEP": json.dumps({"at": self.at, "when": self.when, "act": self.act}),
            "GPU_LAB_IGNORE": json.dumps(self.ignore),
        }

    @property
    def names(self) -> list[str]:
        """The steps so far, in order; also the one before which it waits or was killed."""
        path = self.folder / "steps"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line.partition(" ")[2] for line in lines]

    def reached(self) -> bool:
        """It waits there, or has."""
        return (self.folder / "reached").exists()

    def wait_reached(self, timeout: float = 60) -> None:
        """Wait until it waits at its step.

        Raises:
            LabError: It did not get there in time.
        """
        wait_until(f"the run waits at {self.at!r}", self.reached, timeout)

    def go(self) -> None:
        """Let it go on."""
        (self.folder / "go").touch()
