"""A host's GPUs for the length of a block: locked, freed, held, and put back however it ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gpu_reclaim.flows.reclaim import reclaim_gpus
from gpu_reclaim.models import ReclaimPolicy
from gpu_reclaim.steps import check_policy
from gpu_reclaim.tasks.host import (
    DEFAULT_HOST,
    DEFAULT_POLICY,
    load_server,
    open_host,
    with_defaults,
)
from gpu_reclaim.tasks.slots import host_slot
from gpu_reclaim.tasks.stage import (
    Exclusive,
    around,
    kept,
    put_back_at_the_end,
    stage_policy,
)


@contextmanager
def exclusive_gpus(
    host: str = DEFAULT_HOST, policy: ReclaimPolicy = DEFAULT_POLICY, *, server: str = ""
) -> Iterator[Exclusive]:
    """Have a host's GPUs to yourself: nobody else starts there, and afterwards all is as before.

    Entering takes the host's slot in Prefect and its own lock, frees the GPUs and holds what was
    stopped. While the block runs the hold is renewed, and whoever else uses the GPUs is named.
    Leaving, by any way, puts back exactly what was stopped, and removes every trace. When this
    process dies the host does so by itself, `hold_minutes` (5 by default) after its last sign of
    life. When slot or hold are lost the block is ended at once. Nested in itself it does nothing.

    Args:
        host: Name of the GpuHost block document; by default that of GPU_RECLAIM_HOST.
        policy: As for `reclaim_gpus`.
        server: Name of an LlmServer block that must serve again before the block counts as left.

    Yields:
        The report, the intruders so far and, once it is left, what was put back.

    Raises:
        BadInput: What was asked makes no sense; nothing was touched.
        HeldByOther: Another run has the host's slot, `wait_minutes` long; nothing was touched.
        GpusNotReclaimed: The GPUs are not free, or another run holds the host; what was stopped is
            back.
        HoldRefused: Hold or slot were lost, or somebody intruded, while the block ran.
        NotRestored: The block went well, and something did not come back.

    Example:
        ```python
        from prefect import flow
        from gpu_reclaim.flows import exclusive_gpus

        @flow
        def evaluation():
            with exclusive_gpus("gpu-box") as gpus:
                run_on_free_gpus(gpus.command("python3", "tune.py"))
        ```
    """
    policy = stage_policy(with_defaults(policy))
    check_policy(policy)
    host = host or DEFAULT_HOST
    outer = around(host)
    if outer is not None:
        yield outer
        return
    waited_for = load_server(server) if server else None
    exclusive = Exclusive(host)
    stopper = exclusive.stopper
    with (
        open_host(host, policy.via) as session,
        host_slot(host, policy.wait_minutes, stopper.stop),
        put_back_at_the_end(exclusive, session, waited_for),
        stopper,
    ):
        exclusive.note("freeing the GPUs")
        exclusive.report = reclaim_gpus(host, policy)
        with kept(exclusive, session, policy):
            yield exclusive
