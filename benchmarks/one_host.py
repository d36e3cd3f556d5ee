"""One host: reclaim_gpus and the library alone, against the two lines of bash they replace.

Each arm runs on the same state of the real-guest lab (a server with four renamed workers that hold
all GPU memory), in turns, so that a slower minute of the machine meets all arms alike. Ratios are
of medians. `make benchmark` runs it; it needs root.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from guest import bash_lines
from lab.lab import Lab

ROUNDS = 9
SERVER_START_S = 120

AIMS = {"reclaim_gpus": 0.8, "library alone": 0.4}
"""Most of the bash lines' time that an arm may take."""


@contextmanager
def prefect_server(home: Path) -> Iterator[None]:
    """A Prefect server of our own; this process talks to it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {
        "PREFECT_HOME": str(home),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_LOGGING_LEVEL": "WARNING",
        "GPU_RECLAIM_DEVICE_PREFIXES": '["/dev/nvidia"]',
    }
    prefect = Path(sys.executable).with_name("prefect")
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(
            [prefect, "server", "start", "--host", "127.0.0.1", "--port", str(port)],
            stdout=log,
            stderr=log,
        )
    try:
        _wait_for(f"http://127.0.0.1:{port}/api/health")
        yield
    finally:
        process.terminate()
        process.wait(timeout=60)


def _wait_for(url: str) -> None:
    deadline = time.monotonic() + SERVER_START_S
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except (urllib.error.URLError, ConnectionError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
        else:
            return


def save_blocks(lab: Lab) -> None:
    """Describe the lab's guest to Prefect."""
    from gpu_reclaim.blocks import GpuHost, ProxmoxGuest, SshAccess

    key = lab.client_key.read_text()
    node = SshAccess(
        address=lab.node_address,
        port=lab.node_port,
        private_key=key,
        host_key=lab.node_host_key,
    )
    node.save("lab-node", overwrite=True)
    ssh = SshAccess(address=lab.guest_address, private_key=key, host_key=lab.guest_host_key)
    ssh.save("lab-ssh", overwrite=True)
    guest = ProxmoxGuest(
        vmid=lab.vmid, hostname=lab.hostname, machine_id=lab.machine_id, node_ssh=node
    )
    guest.save("lab-guest", overwrite=True)
    host = GpuHost(ssh=ssh, guest=guest, units=[bash_lines.UNIT], expected_gpus=4)
    host.save("lab", overwrite=True)


def arms(lab: Lab) -> dict[str, Callable[[], str]]:
    """Name to what is timed; each returns what it found at the end."""
    from gpu_reclaim.flows import reclaim_gpus
    from gpu_reclaim.models import ReclaimPolicy
    from gpu_reclaim.reclaim import reclaim
    from gpu_reclaim.tasks.host import load_host

    host = load_host("lab")
    return {
        "bash lines": lambda: f"{bash_lines.run(lab, stop_unit=True).memory_mib}",
        "reclaim_gpus": lambda: str(reclaim_gpus("lab").verdict),
        "library alone": lambda: str(reclaim(host.session("lab"), ReclaimPolicy()).verdict),
    }


def measure(lab: Lab, rounds: int) -> tuple[dict[str, list[float]], dict[str, set[str]]]:
    """Seconds by arm, and what each arm found; the first round warms up and is not counted."""
    seconds: dict[str, list[float]] = {}
    found: dict[str, set[str]] = {}
    for number in range(rounds + 1):
        for name, arm in arms(lab).items():
            lab.reset()
            lab.start_server()
            started = time.perf_counter()
            outcome = arm()
            took = time.perf_counter() - started
            if number:
                seconds.setdefault(name, []).append(took)
                found.setdefault(name, set()).add(outcome)
            print(f"  round {number} {name:14} {took:6.2f} s  {outcome}", flush=True)
    return seconds, found


def show(seconds: dict[str, list[float]]) -> None:
    """The table of the README."""
    base = statistics.median(seconds["bash lines"])
    print("\n| arm | median (s) | fastest to slowest (s) | ratio | aim |\n|---|---|---|---|---|")
    for name, values in seconds.items():
        middle = statistics.median(values)
        aim = f"{AIMS[name]}" if name in AIMS else ""
        print(
            f"| {name} | {middle:.2f} | {min(values):.2f} to {max(values):.2f} "
            f"| {middle / base:.2f} | {aim} |"
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="counted rounds, at least 7")
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as home, prefect_server(Path(home)), Lab() as lab:
        save_blocks(lab)
        seconds, _ = measure(lab, rounds)
    print(f"\n{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {rounds} rounds in turns")
    show(seconds)


if __name__ == "__main__":
    main()
