"""Pipelines as users write them; a worker runs them by this file's path."""

from __future__ import annotations

from prefect import flow

from gpu_reclaim.commands import Script
from gpu_reclaim.flows import exclusive_gpus, put_back_after
from gpu_reclaim.models import ReclaimPolicy
from gpu_reclaim.tasks.host import open_host
from lab.guest_files import HOLDER

BACK = [put_back_after()]


@flow(on_cancellation=BACK, on_crashed=BACK)
def evaluation(host: str, policy: ReclaimPolicy) -> None:
    """Work on free GPUs in two steps: one starts it, the other waits for it."""
    with exclusive_gpus(host, policy) as gpus, open_host(host) as session:
        command = " ".join(gpus.command(HOLDER, "--gpus", "0", "--mib", "700"))
        begin = f"{command} >/dev/null 2>&1 </dev/null &"
        session.links.run(Script("begin the work", {"stage": begin}, writes=True))
        session.links.run(Script("wait for the work", {"stage": "sleep 0.5"}))
