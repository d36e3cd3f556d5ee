"""Shows a whole reclaim on this machine: no root, no docker, no GPU, no network needed.

    python deployments/demo/demo.py

This program is the pretend guest and its cleaner: it starts the processes and the SSH servers, runs
the flow in a process of its own (story.py), looks for itself who lives, and ends all it started.
Its exit status is 0 only if the verdict was clean, the right processes ended and the others live.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

import family
import show
from pretend_guest import Guest, GuestError, make_folder
from ssh_server import USER, SshServer, make_key

HERE = Path(__file__).resolve().parent
ENDED_BY = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
POLL_S = 0.05
REAL_PLAN_LIMIT_S = 120
LINE = "  %({run})-29s %(message)s"


class Interrupted(Exception):
    """A signal asks the demo to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def _interrupt(number: int, _frame: FrameType | None) -> None:
    _each_signal(signal.SIG_IGN)  # the cleaning that follows is not to be interrupted
    raise Interrupted(number)


def _each_signal(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
    for number in ENDED_BY:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def private_environment(folder: Path) -> dict[str, str]:
    """Our environment without whatever would lead to another Prefect, and with one of our own."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PREFECT_", "GPU_RECLAIM_"))
        and not name.lower().endswith("_proxy")  # everything is on loopback
    }
    return kept | {
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "true",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
        "PREFECT_LOGGING_LEVEL": "WARNING",
        "PREFECT_LOGGING_COLORS": "false",
        "PREFECT_LOGGING_LOGGERS_PREFECT_FLOW_RUNS_LEVEL": "INFO",
        "PREFECT_LOGGING_LOGGERS_PREFECT_TASK_RUNS_LEVEL": "INFO",
        "PREFECT_LOGGING_FORMATTERS_STANDARD_FLOW_RUN_FMT": LINE.format(run="flow_run_name"),
        "PREFECT_LOGGING_FORMATTERS_STANDARD_TASK_RUN_FMT": LINE.format(run="task_run_name"),
        "PREFECT_LOGGING_HANDLERS_CONSOLE_STREAM": "ext://sys.stdout",  # in order with our own
    }


@contextmanager
def clean_machine() -> Iterator[Path]:
    """A private folder; afterwards neither it nor any process of ours is left."""
    family.adopt_orphans()
    folder = make_folder()
    try:
        yield folder
    finally:
        _each_signal(signal.SIG_IGN)
        family.end_children()
        shutil.rmtree(folder, ignore_errors=True)


def tell_story(guest: Guest, stack: ExitStack) -> int:
    """Run the flow against the guest by SSH; the exit status of that process."""
    folder = guest.folder
    client = make_key(folder / "key")
    servers = {
        side: stack.enter_context(
            SshServer(make_key(folder / f"{side}-host-key"), client, guest.path(side))
        )
        for side in ("guest", "node")
    }
    ssh: dict[str, object] = {"user": USER, "key": str(folder / "key")}
    for side, server in servers.items():
        ssh[side] = {"port": server.port, "host_key": server.host_key_line}
    facts = folder / "facts.json"
    facts.write_text(json.dumps(guest.facts() | {"ssh": ssh}), "utf-8")
    story = subprocess.Popen(
        [sys.executable, str(HERE / "story.py"), str(facts), str(folder / "report.json")],
        env=private_environment(folder),
        cwd=folder,  # Prefect and the library read .env and TOML files of the current folder
        stdin=guest.lifeline,
        start_new_session=True,  # Ctrl-C reaches us alone, who then end everything in order
    )
    while story.poll() is None:
        guest.reap()
        time.sleep(POLL_S)
    return story.returncode


def check(guest: Guest) -> bool:
    """Look for ourselves who lives, whatever the report says."""
    guest.reap()
    rows = []
    right = True
    for actor in guest.actors:
        wanted = "end" if actor.dies else "live"
        found = "lives" if actor.lives else "ended"
        right = right and actor.lives is not actor.dies
        rows.append((str(actor.pid), actor.name, actor.about, wanted, found))
    show.heading("5. The demo's own look at the processes it started")
    show.table(["pid ", "process", "what it is", "must", "now"], rows)
    return right


def perform(folder: Path) -> bool:
    """The demo itself; whether all went as it must."""
    with ExitStack() as stack:
        guest = Guest(folder)
        stack.callback(guest.stop)
        guest.start()
        show.heading("gpu-reclaim demo")
        show.say(show.INTRO.strip("\n").format(count=len(guest.actors), folder=folder))
        show.heading("1. The pretend guest")
        show.table(
            ["pid ", "process", "what it is"],
            [(str(actor.pid), actor.name, actor.about) for actor in guest.actors],
        )
        show.say("\n  Starting a private Prefect server (half a minute on a small machine) ...")
        code = tell_story(guest, stack)
        if not (folder / "report.json").exists():
            show.say(f"\nThe flow gave no report (exit status {code}); see above.")
            return False
        return check(guest) and code == 0


def plan_for_real() -> None:
    """Where there are real GPUs: what a reclaim would do, read-only, in our own environment."""
    if shutil.which("nvidia-smi") is None:
        return
    show.heading("The GPUs of this very machine: a plan, which reads and touches nothing")
    command = [sys.executable, str(HERE / "real_plan.py")]
    try:
        done = subprocess.run(command, timeout=REAL_PLAN_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        show.say(f"  There was none within {REAL_PLAN_LIMIT_S} s; see what nvidia-smi says.")
        return
    if done.returncode != 0:
        show.say("  It could not be made; the demo does not depend on it.")


def main() -> int:
    """Run the demo; the exit status."""
    _each_signal(_interrupt)
    started = time.monotonic()
    try:
        with clean_machine() as folder:
            passed = perform(folder)
            plan_for_real()
        if folder.exists():
            show.say(f"\n{folder} could not be removed; remove it by hand.")
    except Interrupted as stop:
        show.say(f"\nStopped by {stop}; whatever the demo started is ended and removed.")
        return 128 + stop.number
    except (GuestError, OSError) as error:
        show.say(f"\nThe demo could not run: {error}")
        return 1
    if passed:
        show.heading("What to type next, for a real host")
        show.say(show.next_steps().strip("\n"))
    seconds = time.monotonic() - started
    result = "passed" if passed else "FAILED: the verdict or a process is not as it must be"
    show.say(f"\nThe demo {result} ({seconds:.0f} s); nothing of it is left on this machine.")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
