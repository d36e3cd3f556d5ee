"""The part of the demo that runs the flow: blocks, a plan, the reclaim. Started by demo.py."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import reports
import show

from gpu_reclaim.blocks import GpuHost, ProxmoxGuest, SshAccess
from gpu_reclaim.errors import GpuReclaimError, GpusNotReclaimed
from gpu_reclaim.flows import reclaim_gpus
from gpu_reclaim.models import ReclaimPolicy, ReclaimReport, Verdict
from gpu_reclaim.owners import owner

HOST = "demo-guest"
TERM_GRACE_S = 1.5
Facts = dict[str, Any]


def save_blocks(facts: Facts) -> None:
    """Describe the pretend guest and its node, as for a real one."""
    access = {
        side: SshAccess(
            address="127.0.0.1",
            port=facts["ssh"][side]["port"],
            username=facts["ssh"]["user"],
            private_key_path=facts["ssh"]["key"],
            host_key=facts["ssh"][side]["host_key"],
        )
        for side in ("guest", "node")
    }
    guest = ProxmoxGuest(
        vmid=facts["vmid"],
        hostname=facts["hostname"],
        machine_id=facts["machine_id"] or None,
        node_ssh=access["node"],
    )
    host = GpuHost(
        ssh=access["guest"], guest=guest, units=[facts["unit"]], expected_gpus=facts["gpus"]
    )
    for block, name in ((access["guest"], HOST), (access["node"], "demo-node"), (guest, HOST)):
        block.save(name)
    host.save(HOST)


def policy(facts: Facts) -> ReclaimPolicy:
    """The default policy, less patient.

    In a container of Docker or Kubernetes every process belongs to that container, and is spared
    for it unless it is named; the folder in the pattern names ours alone.
    """
    ours = Path("/proc/self/cgroup").read_text("utf-8").splitlines()
    inside = owner(line.split(":", 2)[2] for line in ours).kind == "container"
    match = [rf"^sglang::scheduler_TP\d {facts['folder']}$"] if inside else []
    return ReclaimPolicy(term_grace_s=TERM_GRACE_S, match=match)


def strangers(report: ReclaimReport, facts: Facts) -> list[str]:
    """Whom a plan would end that the demo did not start for that."""
    ours = {(actor["pid"], actor["start"]) for actor in facts["actors"] if actor["dies"]}
    return [
        f"{row.name} (pid {row.pid})"
        for row in report.ended
        if (row.pid, row.start_time) not in ours
    ]


def shorten_logs(folder: str) -> None:
    """Make the runs' log lines fit a terminal."""

    def shorter(record: logging.LogRecord) -> bool:
        text = record.getMessage().replace(f"{folder}/dev/", "").removeprefix(f"{HOST}: ")
        record.msg, record.args = text, ()
        return text != "Finished in state Completed()"

    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).addFilter(shorter)


def show_plan(report: ReclaimReport) -> None:
    """What was found, and what would be done about it."""
    show.say("\n  Before")
    reports.gpus(report)
    show.say("\n  The plan")
    reports.planned(report)
    show.say()
    reports.outcome(report)


def show_reclaim(report: ReclaimReport) -> None:
    """What was done, and what it led to."""
    show.heading("4. After")
    reports.before_and_after(report)
    show.say("\n  Ended")
    reports.units(report.stopped, "stopped")
    reports.ended(report)
    show.say("\n  Spared")
    reports.spared(report)
    show.say(f"\n  Steps ({report.seconds:.1f} s in all)")
    reports.steps(report)
    show.say()
    reports.outcome(report)


def run(facts: Facts) -> ReclaimReport | None:
    """Plan, check the plan, reclaim; None when the plan names a stranger."""
    save_blocks(facts)
    wanted = policy(facts)
    shorten_logs(facts["folder"])
    show.heading('2. A plan (mode="plan" reads, and touches nothing)')
    plan = reclaim_gpus(HOST, wanted.model_copy(update={"mode": "plan"}))
    show_plan(plan)
    unexpected = strangers(plan, facts)
    if unexpected:
        show.say(
            f"\n  Nothing is ended: the plan names {', '.join(unexpected)}, which is not ours."
        )
        return None
    show.heading("3. The reclaim, as it goes")
    try:
        report = reclaim_gpus(HOST, wanted)
    except GpusNotReclaimed as refused:
        report = refused.report
    show_reclaim(report)
    return report


def die_with_parent() -> None:
    """Wait for the end of standard input, then end our own process group: us and our server."""
    os.read(0, 1)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)


def main() -> int:
    """Run it; 0 when the verdict is clean."""
    threading.Thread(target=die_with_parent, daemon=True).start()
    facts: Facts = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    # Then only these files count: what holds a real GPU of this machine does not.
    os.environ["GPU_RECLAIM_DEVICE_PREFIXES"] = json.dumps([facts["device_prefix"]])
    # Its login is not root, and could not write to /run.
    os.environ["GPU_RECLAIM_HOLD_FOLDER"] = facts["folder"]
    try:
        report = run(facts)
    except GpuReclaimError as error:
        show.say(f"\n  {error}")
        return 1
    if report is None:
        return 1
    Path(sys.argv[2]).write_text(report.model_dump_json(), "utf-8")
    return 0 if report.verdict is Verdict.CLEAN else 1


if __name__ == "__main__":
    sys.exit(main())
