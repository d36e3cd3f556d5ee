"""The lab for people: `PYTHONPATH=tests python -m lab up|down|status|shell`."""

import os
import signal
import subprocess
import sys
import threading

from lab import record
from lab.errors import LabError
from lab.lab import VMID, Lab
from lab.paths import LXC, RUN
from lab.waiting import wait_until

_INFO = RUN / "info"


def up() -> None:
    """Starts the lab in a process of its own, which keeps it until `down`."""
    keeper = subprocess.Popen(
        [sys.executable, "-m", "lab", "keep"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert keeper.stdout is not None
    assert keeper.stderr is not None
    if keeper.stdout.readline() != "ready\n":
        raise LabError(keeper.stderr.read().strip())
    status()


def keep() -> None:
    """Starts the lab and keeps it until told to end."""
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    with Lab() as lab:
        _INFO.write_text(
            f"guest: ssh -i {lab.client_key} root@{lab.guest_address}\n"
            f"node:  ssh -i {lab.client_key} -p {lab.node_port} root@{lab.node_address}\n"
            f"guest host key: {lab.guest_host_key}\nnode host key:  {lab.node_host_key}\n"
            f"machine id: {lab.machine_id}\nstate: {lab.state}\n"
        )
        print("ready", flush=True)
        ended.wait()


def down() -> None:
    """Ends the lab that `up` started."""
    user = record.user_of_lab()
    if user is None:
        print("not running")
        return
    if not _INFO.exists():
        raise LabError(f"the lab is used by process {user}, for instance a test run")
    os.kill(user, signal.SIGTERM)
    wait_until("the lab has ended", lambda: record.user_of_lab() is None, timeout=60)


def status() -> None:
    """Shows whether the lab runs, and how to get in."""
    user = record.user_of_lab()
    print("not running" if user is None else f"running, kept by process {user}")
    if user is not None and _INFO.exists():
        print(_INFO.read_text(), end="")


def shell() -> None:
    """Opens a shell in the guest."""
    os.execvp("lxc-attach", ["lxc-attach", "-P", str(LXC), "-n", str(VMID)])


def main() -> int:
    """Runs one command; 2 for one that does not exist."""
    commands = {"up": up, "down": down, "status": status, "shell": shell, "keep": keep}
    if len(sys.argv) != 2 or sys.argv[1] not in commands:
        print("usage: python -m lab up|down|status|shell", file=sys.stderr)
        return 2
    try:
        commands[sys.argv[1]]()
    except LabError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
