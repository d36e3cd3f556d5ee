"""A client that reclaims with a hold and is killed at a chosen remote step; see `main`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from gpu_reclaim.commands import Result, Script
from gpu_reclaim.reclaim import reclaim
from guest import holds, ways
from lab.lab import Lab

DURING_S = 0.04
"""After so long a script has reached the guest and is not yet through with its work."""


def start(lab: Lab, step: int, when: str) -> subprocess.Popen[str]:
    """A client of its own process; it prints the names of the scripts that it sent.

    Args:
        lab: The lab.
        step: The script at which it is killed, from 1; 0: none.
        when: "after" the script's end, or "during" it.
    """
    guest = ["guest_address", "guest_port", "guest_host_key", "hostname", "machine_id"]
    node = ["node_address", "node_port", "node_host_key"]
    known: dict[str, Any] = {name: getattr(lab, name) for name in [*guest, *node]}
    known["client_key"] = str(lab.client_key)
    return subprocess.Popen(
        [sys.executable, "-m", "guest.killed_client", json.dumps(known), str(step), when],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        stdout=subprocess.PIPE,
        text=True,
    )


def main(known: str, step: str, when: str) -> None:
    """Reclaim; SIGKILL ourselves at a script."""
    values = json.loads(known)
    values["client_key"] = Path(values["client_key"])
    lab = cast("Lab", SimpleNamespace(**values))
    session = ways.session(lab, lease_s=60)
    links, count, inside = session.links, 0, False

    def counted(run: Any) -> Any:
        def wrapped(script: Script) -> Result:
            nonlocal count, inside
            if inside:  # the way through the hypervisor goes through the node's
                return cast("Result", run(script))
            count, inside = count + 1, True
            print(script.name, flush=True)
            if count == int(step) and when == "during":
                threading.Timer(DURING_S, die).start()
            result = run(script)
            inside = False
            if count == int(step):
                die()
            return cast("Result", result)

        return wrapped

    for way in (links.direct, links.hypervisor, links.node):
        # `links.run` itself goes through one of these.
        setattr(way, "run", counted(getattr(way, "run")))  # noqa: B009, B010
    reclaim(session, holds.policy(5))


def die() -> None:
    """As the kernel ends a process for want of memory."""
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
