"""A machine with two stand-in GPUs: plain files as nodes, with an nvidia-smi and a libcuda."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
STAND_IN = ROOT / "tests/lab/guest/nvidia_smi.py"
FAKE_CUDA = Path(__file__).with_name("fake_cuda.c")
PATIENCE_S = 170
"""Against a check that hangs; no verdict hangs on it."""

INTRUSION = """#!/bin/sh
# The stand-in nvidia-smi; after the check's own reading number @NUMBER@ somebody takes a GPU.
@STAND_IN@ "$@"
code=$?
case "$*" in *=index,memory.used*)
    if [ "$(grep -c =index,memory.used @FOLDER@/state/calls)" = @NUMBER@ ]; then
        sleep 600 3<@FOLDER@/dev/nvidia1 </dev/null >/dev/null 2>&1 &
        echo $! >@FOLDER@/intruder
    fi
esac
exit $code
"""


@dataclass(frozen=True)
class Machine:
    """The stand-ins, in a folder; nothing outside it counts as a GPU."""

    folder: Path

    @classmethod
    def build(cls, folder: Path) -> Machine:
        for name in ("bin", "lib", "dev", "state/mem"):
            (folder / name).mkdir(parents=True)
        for name in ("nvidia0", "nvidia1", "nvidiactl"):
            (folder / "dev" / name).touch()
        (folder / "bin/nvidia-smi").symlink_to(STAND_IN)
        library = folder / "lib/libcuda.so.1"
        compiler = ["gcc", "-Wall", "-Werror", "-shared", "-fPIC", "-o"]
        subprocess.run([*compiler, library, FAKE_CUDA], check=True)
        return cls(folder)

    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "PATH": f"{self.folder}/bin:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": f"{self.folder}/lib",
            "GPU_LAB_DEV": f"{self.folder}/dev",
            "GPU_LAB_STATE": f"{self.folder}/state",
            "GPU_LAB_PROC": "/proc",
            "GPU_RECLAIM_DEVICE_PREFIXES": json.dumps([f"{self.folder}/dev/nvidia"]),
            "GPU_RECLAIM_HOLD_FOLDER": str(self.folder),
        }

    def state(self, name: str, text: str) -> None:
        (self.folder / "state" / name).write_text(f"{text}\n")

    def start(self, *flags: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, ROOT / "benchmarks/gpu_check.py", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment,
            cwd=self.folder,
        )

    def check(self, *flags: str) -> tuple[int, dict[str, Any]]:
        """Run it: its exit status and its document."""
        return finish(self.start(*flags))

    def intrude_after(self, number: int) -> None:
        """Let somebody take GPU 1 right after the check's own reading of that number."""
        program = self.folder / "bin/nvidia-smi"
        program.unlink()
        fill = {"STAND_IN": STAND_IN, "FOLDER": self.folder, "NUMBER": number}
        program.write_text(re.sub(r"@(\w+)@", lambda x: str(fill[x[1]]), INTRUSION))
        program.chmod(0o755)

    def holders(self) -> list[int]:
        """Pids of all that have a stand-in node open."""
        found, nodes = set(), f"{self.folder}/dev/nvidia"
        for process in Path("/proc").glob("[0-9]*"):
            # It, or what it has open, may be gone since.
            with suppress(OSError):
                for link in (process / "fd").iterdir():
                    with suppress(OSError):
                        if str(link.readlink()).startswith(nodes):
                            found.add(int(process.name))
        return sorted(found)


def finish(process: subprocess.Popen[str]) -> tuple[int, dict[str, Any]]:
    """A check's exit status and document, once it has ended."""
    text, errors = process.communicate(timeout=PATIENCE_S)
    assert text, errors
    return process.returncode, json.loads(text)


def read_until(process: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    """The first line of its progress that matches."""
    assert process.stderr is not None
    for line in process.stderr:
        match = re.search(pattern, line)
        if match:
            return match
    raise AssertionError(f"no line matched {pattern!r}")
