"""Where there can be no lab, its tests are left out in one loud line; in CI that is an error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def collect(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Collect tests where no tool of the lab is on the PATH."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "CI"))}
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "--collect-only",
            "-q",
            "-p",
            "lab.possible",
            "tests/lab",
            *options,
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**kept, "PATH": "/nowhere", "PYTHONPATH": "tests", **environment},
    )


def test_lab_tests_are_left_out_loudly() -> None:
    done = collect()
    lines = [line for line in done.stdout.splitlines() if line.startswith("NOT TESTED: ")]
    assert len(lines) == 1
    assert " lab tests cannot run here: missing lxc-start" in lines[0] or "not root" in lines[0]
    assert "test_lab.py" not in done.stdout


def test_in_ci_that_is_an_error() -> None:
    done = collect(CI="true")
    assert done.returncode != 0
    assert "CI must run the lab, but " in done.stderr


def test_whoever_leaves_them_out_by_mark_is_not_bothered() -> None:
    done = collect("-m", "not lab", CI="true")
    assert "NOT TESTED" not in done.stdout
    assert "CI must run" not in done.stderr
