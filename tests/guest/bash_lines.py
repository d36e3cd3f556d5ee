"""The two lines of bash that a reclaim replaces, on the lab, for comparison.

As people type them, but for addresses, ports and keys; `benchmarks` runs them too.
"""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from lab.lab import Lab

UNIT = "sglang-qwen.service"

STOP = f"pct exec 129 -- systemctl stop {UNIT}"
"""What the more careful put in front."""

END_BY_NAME = (
    r'pct exec 129 -- bash -c "ps aux | grep python3 | grep -v grep |'
    r' awk \"{print \\\$2}\" | xargs -r kill -9"'
)

END_BY_DEVICE = (
    "fuser -k /dev/nvidia* 2>/dev/null; "
    "nvidia-smi --query-gpu=index,memory.used --format=csv,noheader"
)

PAUSE_S = 3


@dataclass(frozen=True)
class BashRun:
    """What the lines themselves say about how it went.

    Attributes:
        seconds: From the first line's start to the last one's end, with the pause between.
        codes: Exit statuses of `ssh`: of the first line, then of the second.
        printed: Standard output of the second line.
        memory_mib: What it says is in use, by GPU index.
    """

    seconds: float
    codes: tuple[int, int]
    printed: str
    memory_mib: dict[int, int]


def run(lab: Lab, stop_unit: bool) -> BashRun:
    """Run the lines.

    Args:
        lab: The lab.
        stop_unit: Stop the server's unit before.
    """
    first = f"{STOP}; {END_BY_NAME}" if stop_unit else END_BY_NAME
    started = time.monotonic()
    one = _ssh(lab, "node", first)
    time.sleep(PAUSE_S)
    two = _ssh(lab, "guest", END_BY_DEVICE)
    seconds = time.monotonic() - started
    return BashRun(seconds, (one.returncode, two.returncode), two.stdout, _memory(two.stdout))


def _memory(text: str) -> dict[int, int]:
    rows = [line.replace(",", " ").split() for line in text.splitlines()]
    return {int(row[0]): int(row[1]) for row in rows if len(row) == 3 and row[2] == "MiB"}


def _ssh(lab: Lab, where: str, command: str) -> subprocess.CompletedProcess[str]:
    address, port, key = {
        "node": (lab.node_address, lab.node_port, lab.node_host_key),
        "guest": (lab.guest_address, lab.guest_port, lab.guest_host_key),
    }[where]
    options = [
        f"UserKnownHostsFile={_known_hosts(lab, where, key)}",
        f"HostKeyAlias={where}",
        "StrictHostKeyChecking=yes",
        "BatchMode=yes",
    ]
    argv = ["ssh", "-F", "none", "-i", str(lab.client_key), "-p", str(port)]
    argv += [word for option in options for word in ("-o", option)]
    return subprocess.run(
        [*argv, f"root@{address}", command],
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


def _known_hosts(lab: Lab, where: str, key: str) -> Path:
    path = lab.client_key.with_name(f"known_hosts_{where}")
    path.write_text(f"{where} {key}\n")
    return path
