"""Which Prefect run this is, for those who find a host taken."""

from __future__ import annotations

from functools import lru_cache
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
    """The run and those around it that live in the same process, by their ids."""
    found = [run]
    try:
        while parent := _around(found[-1]):
            found.append(parent)
    except (HTTPError, ObjectNotFound):
        pass  # who it is part of is a help for later, not a need
    return tuple(found)


@lru_cache(maxsize=32)
def _around(run: str) -> str:
    """The run that this one is a part of, in the same process; empty where it is none.

    A run with a deployment of its own has a process of its own. It never changes, and both slot
    and lease ask for it.
    """
    with get_client(sync_client=True) as client:
        this = client.read_flow_run(UUID(run))
        if this.deployment_id is not None or this.parent_task_run_id is None:
            return ""
        return str(client.read_task_run(this.parent_task_run_id).flow_run_id or "")
