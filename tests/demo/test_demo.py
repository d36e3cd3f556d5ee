"""The demo as a user runs it: what it says, its exit status, and that it leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "deployments/demo/demo.py"
MARK = "DEMO_TEST_MARK"
PATIENCE_S = 300
"""Against a demo that hangs; no verdict hangs on it."""


@dataclass(frozen=True)
class Setting:
    """Where a demo runs: its environment carries a mark that all its processes inherit."""

    folder: Path
    mark: str

    def start(self) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            MARK: self.mark,
            "TMPDIR": str(self.folder),
            # A demo that listened to these would reach nothing, or another Prefect.
            "PREFECT_API_URL": "http://127.0.0.1:9/api",
            "PREFECT_HOME": str(self.folder / "not-mine"),
            "GPU_RECLAIM_POLICY__TERM_GRACE_S": "nonsense",
            "HTTP_PROXY": "http://127.0.0.1:9",
        }
        return subprocess.Popen(
            [sys.executable, "-u", DEMO],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            cwd=self.folder,
        )

    def left(self) -> list[str]:
        """Its processes and files that are there."""
        return self.processes() + [str(path) for path in self.folder.iterdir()]

    def processes(self) -> list[str]:
        """Command lines of the processes that carry the mark."""
        found = []
        for process in Path("/proc").iterdir():
            try:
                if self.mark.encode() in (process / "environ").read_bytes():
                    found.append((process / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue
        return found


@dataclass(frozen=True)
class Run:
    """A demo that went to its end."""

    code: int
    text: str
    left: list[str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    setting = Setting(tmp_path_factory.mktemp("demo"), uuid.uuid4().hex)
    process = setting.start()
    text, _ = process.communicate(timeout=PATIENCE_S)
    return Run(process.returncode, text, setting.left())


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(tmp_path, uuid.uuid4().hex)


def read_until(process: subprocess.Popen[str], pattern: str) -> str:
    """What a process prints, up to a line that matches."""
    assert process.stdout is not None
    text = ""
    for line in process.stdout:
        text += line
        if re.search(pattern, line):
            return text
    raise AssertionError(f"no line matched {pattern!r}:\n{text}")


def wait_for(true: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < until
        time.sleep(0.05)


def table(text: str, title: str) -> list[str]:
    """The lines of the table below a title, without its head."""
    after = text.split(f"{title}\n", 1)[1]
    rows = after.split("  --", 1)[1].split("\n")[1:]
    return rows[: rows.index("")]


def test_the_demo_reclaims_and_proves_it(run: Run) -> None:
    text = run.text

    assert run.code == 0, text
    assert re.search(r"^  verdict +clean$", text, re.M), text
    assert "4 GPUs at 0 MiB, no unprotected holder" in text
    ended = "\n".join(table(text, "  Ended"))
    assert re.findall(r"sglang::scheduler_TP\d", ended) == [
        f"sglang::scheduler_TP{rank}" for rank in range(4)
    ]
    assert re.search(r"TP1 +ended \(TERM, then KILL\)", ended)
    assert re.search(r"TP2 +ended \(TERM\) +holds nvidia2 \(mapped\)", ended)
    spared = table(text, "  Spared")
    assert re.search(r"nvidia-persistenced .* keeps the driver", spared[0])
    assert "scheduler" not in "".join(spared)
    assert "The demo passed" in text


def test_nothing_of_it_is_left(run: Run) -> None:
    assert run.left == []


def test_it_looks_for_itself_who_lives(run: Run) -> None:
    rows = table(run.text, "5. The demo's own look at the processes it started\n" + "-" * 50)
    fates = {re.split(r" {2,}", row.strip())[1]: row.split()[-2:] for row in rows}
    assert fates.pop(f"{Path(sys.executable).name} launch_server.py") == ["end", "ended"]
    assert fates.pop(f"{Path(sys.executable).name} monitoring_agent.py") == ["live", "lives"]
    assert fates.pop("nvidia-persistenced") == ["live", "lives"]
    assert fates == {f"sglang::scheduler_TP{rank}": ["end", "ended"] for rank in range(4)}


@pytest.mark.parametrize(
    ("number", "moment"),
    [
        (signal.SIGTERM, "Starting a private Prefect server"),
        (signal.SIGINT, "ending sglang"),
    ],
)
def test_interrupted_it_leaves_nothing(
    setting: Setting, number: signal.Signals, moment: str
) -> None:
    process = setting.start()
    read_until(process, moment)
    assert len(setting.left()) > 1
    process.send_signal(number)
    text, _ = process.communicate(timeout=PATIENCE_S)

    assert process.returncode == 128 + number
    assert f"Stopped by {number.name}" in text
    assert setting.left() == []


def test_killed_it_takes_all_its_processes_along(setting: Setting) -> None:
    process = setting.start()
    wait_for(lambda: "story.py" in " ".join(setting.processes()))
    process.kill()
    process.communicate(timeout=PATIENCE_S)

    wait_for(lambda: setting.processes() == [])
