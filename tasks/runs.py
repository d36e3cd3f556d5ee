"""Which Prefect run this is, for those who find a host taken."""

from __future__ import annotations

from uuid import UUID

from httpx import HTTPError
from prefect import get_client
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run

from gpu_reclaim.claiming import Holder, default_owner


def this_run() -> Holder:
    """This run, or this process outside of one."""
    if not flow_run.id:
        return Holder(default_owner())
    name = f"Prefect run {flow_run.name} ({default_owner()})"
    return Holder(name, flow_run.ui_url or "", _line(flow_run.id))


def _line(run: str) -> tuple[str, ...]:
    """The run and those around it that live in the same process, by their ids.

    A run with a deployment of its own has a process of its own.
    """
    found = [run]
    try:
        with get_client(sync_client=True) as client:
            while True:
                this = client.read_flow_run(UUID(found[-1]))
                if this.deployment_id is not None or this.parent_task_run_id is None:
                    break
                parent = client.read_task_run(this.parent_task_run_id).flow_run_id
                if parent is None:
                    break
                found.append(str(parent))
    except (HTTPError, ObjectNotFound):
        pass  # who it is part of is a help for later, not a need
    return tuple(found)
