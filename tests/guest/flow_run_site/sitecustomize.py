"""Counts the remote scripts of a flow run's process, and acts at one of them; see guest.stepping.

Python imports a module of this name when it starts. `guest.stepping` puts this folder on PYTHONPATH
of one flow run, which says by its environment what is wanted; nothing happens in other processes
that inherit it (the preparation before the run, hooks after it).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

TRANSPORTS = {
    "gpu_reclaim.transport.ssh": "SshTransport",
    "gpu_reclaim.transport.pct": "PctTransport",
    "gpu_reclaim.transport.local": "LocalTransport",
    "gpu_reclaim.transport.guest_agent": "GuestAgentTransport",
}
"""Module to the class whose `run` sends scripts."""

DURING_S = 0.04
"""After so long a script has reached the guest and is not yet through with its work."""

POLL_S = 0.02
FORGOTTEN_S = 300
"""Who waits here longer was forgotten, and goes on."""


class Steps:
    """What this process sends, and what is to happen at one of its steps."""

    def __init__(self, folder: Path, wanted: dict[str, Any]) -> None:
        self._folder = folder
        self._at: int | str = wanted["at"]
        self._when: str = wanted["when"]
        self._act: str = wanted["act"]
        self._ignore: list[str] = json.loads(os.environ.get("GPU_LAB_IGNORE", "[]"))
        self._count = 0
        self._met = False
        self._lock = threading.Lock()
        self._here = threading.local()

    def counted(self, run: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """A transport's `run`, counted; the way through a container goes through the node's."""

        def wrapped(transport: Any, script: Any) -> Any:
            if getattr(self._here, "inside", False):
                return run(transport, script)
            self._here.inside = True
            try:
                return self._send(script.name, lambda: run(transport, script))
            finally:
                self._here.inside = False

        return wrapped

    def _send(self, name: str, send: Callable[[], Any]) -> Any:
        if not self._is_the_one(name):
            return send()
        if self._when == "before":
            self._do()
            return send()
        timer = threading.Timer(DURING_S, self._do_meanwhile)
        if self._when == "during":
            timer.start()
        try:
            result = send()
        except Exception:
            timer.cancel()
            self._do()
            raise
        timer.cancel()
        self._do()
        return result

    def _is_the_one(self, name: str) -> bool:
        """Count a script, write it down, and say whether it is the step that is meant."""
        if name in self._ignore:
            return False
        with self._lock:
            self._count += 1
            with (self._folder / "steps").open("a") as steps:
                steps.write(f"{self._count} {name}\n")
            if self._met or self._at not in (self._count, name):
                return False
            self._met = True
            return True

    def _do_meanwhile(self) -> None:
        if self._act == "wait":
            self._tell()
        else:
            self._do()

    def _do(self) -> None:
        if self._act == "kill-worker":
            os.kill(os.getppid(), signal.SIGKILL)
        if self._act in ("kill", "kill-worker"):
            os.kill(os.getpid(), signal.SIGKILL)
        self._tell()
        until = time.monotonic() + FORGOTTEN_S
        while not (self._folder / "go").exists() and time.monotonic() < until:
            time.sleep(POLL_S)

    def _tell(self) -> None:
        (self._folder / "reached").touch()


class Patching:
    """Finds the transports' modules as the other finders do, and counts from their import on."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in TRANSPORTS:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def patched(module: ModuleType) -> None:
                execute(module)
                transport = getattr(module, TRANSPORTS[name])
                transport.run = self._steps.counted(transport.run)

            setattr(spec.loader, "exec_module", patched)  # noqa: B010
        return spec


def main() -> None:
    """Begin, in a flow run's own process."""
    folder = os.environ.get("GPU_LAB_STEPS")
    if folder and "prefect.engine" in sys.orig_argv:
        wanted = json.loads(os.environ["GPU_LAB_STEP"])
        sys.meta_path.insert(0, Patching(Steps(Path(folder), wanted)))


main()
