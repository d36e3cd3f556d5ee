"""A hook of Prefect's that puts back what a run stopped which ended without doing so itself."""

from __future__ import annotations

from typing import Any

from httpx import HTTPError
from prefect import Flow
from prefect.client.schemas.objects import FlowRun, State
from prefect.flows import FlowStateHook
from prefect.logging.loggers import flow_run_logger

from gpu_reclaim import hold
from gpu_reclaim.errors import GpuReclaimError
from gpu_reclaim.tasks.host import host_of, load_host
from gpu_reclaim.tasks.slots import free_slot_of


def put_back_after(host: str = "") -> FlowStateHook[..., Any]:
    """A hook for `on_cancellation` and `on_crashed` of any flow that holds a host.

    It runs also in the process of the worker, once the run's own is dead, and goes by the host's
    record alone. What another run holds it leaves alone.

    Args:
        host: Name of the GpuHost block; by default the run's own parameter `host`, or the
            host of its parameter `server`.

    Example:
        ```python
        from prefect import flow
        from gpu_reclaim.flows import exclusive_gpus, put_back_after

        BACK = [put_back_after("gpu-box")]

        @flow(on_cancellation=BACK, on_crashed=BACK)
        def evaluation():
            with exclusive_gpus("gpu-box"):
                ...
        ```
    """

    # Prefect passes these by name.
    def put_back_what_it_stopped(
        flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]
    ) -> None:
        log = flow_run_logger(flow_run, flow)
        said = flow_run.parameters
        name, server = host or str(said.get("host") or ""), str(said.get("server") or "")
        try:
            name = name or (host_of(server) if server else "")
            log.info("%s after %s: looking whether anything is to be put back", name, state.name)
            # Not `open_host`: a block around may have that session, and this must not end it.
            session = load_host(name).session(name)
            try:
                report = hold.restore(session, run=str(flow_run.id))
            finally:
                session.links.close()
            log.info("%s", report)
            free_slot_of(session.host, str(flow_run.id))
        except (GpuReclaimError, HTTPError) as error:
            of = name or server or "the host"
            log.error("%s: not put back by this hook; the host does so by itself: %s", of, error)

    return put_back_what_it_stopped
