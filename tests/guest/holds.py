"""Holding the lab's guest: what is set up, and what must be there or gone afterwards."""

from __future__ import annotations

from typing import Any

from gpu_reclaim.models import ReclaimPolicy, ReclaimReport
from gpu_reclaim.reclaim import reclaim
from guest import units, ways, witness
from lab.lab import Lab
from lab.waiting import wait_until

QUICK: dict[str, Any] = {"term_grace_s": 1, "settle_timeout_s": 2, "stable_samples": 2}
LEASE = "/run/gpu-reclaim/lease"
RECORD = "/var/lib/gpu-reclaim/record"

TRACES = r"""
set +e
ls -d /run/gpu-reclaim /run/gpu-reclaim-lock* /var/lib/gpu-reclaim
find /run/systemd/system /run/systemd/transient -name '*gpu-reclaim*'
systemctl list-units --all --plain --no-legend 'gpu-reclaim*'
true
"""

ACTIVE = "systemctl list-units --plain --no-legend --full --state=active,activating,failed"

NOISE = (
    "/run/systemd/journal/",
    "/run/log/journal",
    "/var/log/journal",
    "/dev/pts",
    "/run/systemd/units",
    # systemd makes it with the first transient unit, and leaves it there, empty.
    "/run/systemd/transient|",
    "/opt/gpu-lab/__pycache__",
    # Named anew by each boot.
    "/tmp/systemd-private-",
    "/var/tmp/systemd-private-",
    # The first login writes it.
    "/run/motd.dynamic",
)


def policy(minutes: float = 5, **changes: Any) -> ReclaimPolicy:
    """A short reclaim with a hold."""
    return ReclaimPolicy(**(QUICK | {"hold_minutes": minutes} | changes))


def held(lab: Lab, minutes: float = 5, **changes: Any) -> ReclaimReport:
    """Reclaim and hold."""
    return reclaim(ways.session(lab, **changes), policy(minutes))


def traces(lab: Lab) -> list[str]:
    """All that is left of a hold in the guest."""
    return lab.do(TRACES).split("\n")[:-1]


def running(lab: Lab) -> set[str]:
    """Units that run or failed, with their states; not the timer of a hold."""
    rows = [" ".join(line.split()[:4]) for line in lab.do(ACTIVE).splitlines()]
    return {row for row in rows if not row.startswith(("gpu-reclaim", "session-", "user"))}


def files(lab: Lab) -> set[str]:
    """Every file of the guest with its kind and mode, but for what running units write."""
    return witness.files(lab, "%p|%y|%m", NOISE)


def is_active(lab: Lab, *names: str) -> list[str]:
    """One word for each unit."""
    return lab.attach(f"systemctl is-active {' '.join(names)}").stdout.split()


def start(lab: Lab, name: str) -> tuple[int, str]:
    """Try to start a unit; exit status, and its state afterwards."""
    done = lab.attach(f"systemctl start {name}")
    return done.returncode, is_active(lab, name)[0]


def expire(lab: Lab) -> None:
    """As if the lease's time had passed."""
    lab.do(f"[ ! -e {LEASE} ] || sed -i 's/^expires_uptime .*/expires_uptime 1/' {LEASE}")


def wait_back(lab: Lab, *names: str, within: float = 25) -> None:
    """Wait until units run and the host has cleaned up."""
    wanted = ["active"] * len(names)
    wait_until(f"{names} are back", lambda: is_active(lab, *names) == wanted, within)
    wait_until("no trace is left", lambda: not traces(lab), within)


def add_triggers(lab: Lab) -> list[str]:
    """A socket, a timer and a path for the server's unit; all live."""
    stem = ways.UNIT.removesuffix(".service")
    units.add(lab, f"{stem}.socket", Socket=["ListenStream=/run/lab-qwen.sock"])
    units.add(lab, f"{stem}.timer", Timer=["OnActiveSec=1h"])
    units.add(lab, f"{stem}.path", Path=["PathExists=/run/lab-qwen.start"])
    names = [f"{stem}.{kind}" for kind in ("socket", "timer", "path")]
    lab.do(f"systemctl start {' '.join(names)}")
    return names


def add_gateway(lab: Lab) -> str:
    """A running unit that requires the server, and so stops along."""
    units.add(
        lab,
        "lab-gateway.service",
        Unit=[f"Requires={ways.UNIT}", f"After={ways.UNIT}"],
        Service=["ExecStart=/bin/sleep 600"],
    )
    lab.do("systemctl start lab-gateway")
    return "lab-gateway.service"
