"""Runs the lab's stand-ins of SGLang's tuning scripts on this very machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from lab.moe_site import install_checkout
from lab.paths import SOURCE
from unit.stand_in import NODES

MAIN, SEP = "tuning_fused_moe_triton.py", "tuning_fused_moe_triton_sep.py"


class Tuner:
    """A checkout, and a folder to run its scripts in."""

    def __init__(self, home: Path, folder: Path) -> None:
        """Lays out the checkout; the home is as made by `make_home`."""
        self.home = home
        self.work = folder / "work"
        self.state = folder / "state"
        self.scripts = install_checkout(folder / "checkout")
        dev = folder / "dev"
        for path in (self.work, self.state / "mem", dev):
            path.mkdir(parents=True)
        for name in NODES:
            (dev / name).touch()
        self._environment = {"PATH": os.environ["PATH"], "PYTHONUNBUFFERED": "1"}
        self._environment |= {"GPU_LAB_DEV": str(dev), "GPU_LAB_STATE": str(self.state)}
        self._started: list[subprocess.Popen[str]] = []
        self.tell()

    def tell(self, faults: Mapping[str, str] | None = None, **content: object) -> None:
        """Writes moe.json."""
        said = {"seconds": 0.1, "faults": faults or {}} | content
        (self.state / "moe.json").write_text(json.dumps(said))

    def start(self, flags: str, script: str = MAIN, **environment: str) -> subprocess.Popen[str]:
        """Starts a script; of the lab's model unless the flags name another one."""
        argv: list[str | Path] = [self.home / "bin/python", self.scripts / script]
        argv += ["--model", self.home / "model", *flags.split()]
        process = subprocess.Popen(
            argv,
            env=self._environment | environment,
            cwd=self.work,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._started.append(process)
        return process

    def run(self, flags: str, script: str = MAIN, **environment: str) -> tuple[int, str, str]:
        """Its exit status, output and errors."""
        process = self.start(flags, script, **environment)
        output, errors = process.communicate(timeout=30)
        return process.returncode, output, errors

    def files(self) -> dict[str, dict[str, dict[str, int]]]:
        """The tables that it wrote, by name."""
        return {path.name: json.loads(path.read_text()) for path in self.work.glob("E=*.json")}

    def processes(self) -> dict[int, str]:
        """Those that run there, with their titles."""
        found = {}
        for process in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if process.name.isdigit() and (process / "cwd").readlink() == self.work:
                    title = (process / "cmdline").read_bytes().split(b"\0")[0]
                    found[int(process.name)] = title.decode()
        return found

    def gpus(self) -> list[str]:
        """The nodes that its processes have open."""
        nodes = []
        for pid in self.processes():
            with contextlib.suppress(OSError):
                names = [link.readlink().name for link in Path(f"/proc/{pid}/fd").iterdir()]
                nodes += [name for name in names if name in NODES[2:]]
        return sorted(nodes)

    def used_mib(self) -> list[int]:
        """What the nvidia-smi stand-in says of each GPU."""
        argv = [str(SOURCE / "guest/nvidia_smi.py"), "--query-gpu=memory.used"]
        done = subprocess.run(
            [sys.executable, *argv, "--format=csv,noheader,nounits"],
            env=self._environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
        return [int(line) for line in done.stdout.split()]

    def end(self) -> None:
        """Ends whatever is left of it."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._started:
            process.communicate()
