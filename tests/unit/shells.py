"""Running scripts on this machine under a chosen shell and a chosen set of tools."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from gpu_reclaim.commands import Result, Script
from gpu_reclaim.transport.local import LocalTransport

SHELLS = ("dash", "bash", "busybox")
"""`busybox` means that every tool is busybox's, not only the shell."""


USUAL_PATH = os.environ["PATH"]


def need(program: str) -> str:
    """Path of a program that these tests cannot do without; they fail where it is missing."""
    path = shutil.which(program, path=USUAL_PATH)
    if path is None:
        pytest.fail(f"these tests need {program}; install it (apt-get install {program})")
    return path


def tool_path(folder: Path, shell: str) -> str:
    """A PATH on which `sh` is that shell; with busybox there is nothing else on it."""
    if shell == "busybox":
        subprocess.run([need("busybox"), "--install", "-s", str(folder)], check=True)
        return str(folder)
    (folder / "sh").symlink_to(need(shell))
    return f"{folder}:{os.environ['PATH']}"


def without(folder: Path, *programs: str) -> str:
    """A PATH with everything that the present one has, but for some programs."""
    for entry in reversed(os.environ["PATH"].split(":")):
        for file in Path(entry).iterdir() if Path(entry).is_dir() else ():
            if file.name not in programs:
                (folder / file.name).unlink(missing_ok=True)
                (folder / file.name).symlink_to(file)
    return str(folder)


def here(sections: Mapping[str, str], *, together: bool = False, timeout_s: float = 60) -> Result:
    """Run sections on this machine, by the PATH of this process."""
    script = Script("a test", sections, timeout_s=timeout_s, together=together)
    return LocalTransport().run(script)


def stub(folder: Path, name: str, text: str) -> Path:
    """An executable shell script of that name."""
    file = folder / name
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return file
